"""Which reader is for a model: by name, or by what its chat template and its vocabulary hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jdisagg.model.content import SpecialText
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.tools.asked import NONE, ForcedReader, Tools
from jdisagg.serve.tools.calls import CallReader, Syntax
from jdisagg.serve.tools.gemma import Gemma
from jdisagg.serve.tools.harmony import HarmonyReader
from jdisagg.serve.tools.marked import DSML, GLM, KIMI_K3, QWEN, Marked
from jdisagg.serve.tools.pythonic import Pythonic
from jdisagg.serve.tools.said import Reader
from jdisagg.serve.tools.syntaxes import DeepSeek, Functools, KimiK2, Llama3, Mistral, Tagged
from jdisagg.serve.tools.thinking import Plain, ThinkingReader
from jdisagg.serve.tools.told import TOOL_CALLS, Told

AUTO, OFF, HARMONY = "auto", "off", "gpt_oss"
SYNTAXES: dict[str, Callable[[Mapping[str, Any]], Syntax]] = {  # by the schemas of the tools' arguments
    "hermes": lambda tools: Tagged(),
    "llama3": Llama3,
    "llama4": Pythonic,
    "mistral": lambda tools: Mistral(),
    "deepseek": lambda tools: DeepSeek(),
    "gemma4": lambda tools: Gemma(),
    "phi4": lambda tools: Tagged("<|tool_call|>", "<|/tool_call|>"),
    "functools": lambda tools: Functools(),
    "qwen3_coder": lambda tools: Marked(QWEN, tools),
    "glm": lambda tools: Marked(GLM, tools),
    "dsml": lambda tools: Marked(DSML, tools),
    "kimi_k2": lambda tools: KimiK2(),
    "kimi_k3": lambda tools: Marked(KIMI_K3, tools),
}
THINKING = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
THINKING["gemma4"] = ("<|channel>thought\n", "<channel|>")
THINKING["kimi_k3"] = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
# What a template or a vocabulary has that a syntax needs; the first that is there counts.
SIGNS = (
    ("<|constrain|>", HARMONY),
    ("<|tool_call>", "gemma4"),
    ("[TOOL_CALLS]", "mistral"),
    ("｜DSML｜", "dsml"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|open|>", "kimi_k3"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3_coder"),
    ("<|/tool_call|>", "phi4"),
    ("functools[", "functools"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "llama4"),
    ("<|python_tag|>", "llama3"),
)
THINKING_SIGNS = (
    *(("<|constrain|>", HARMONY), ("<|channel>", "gemma4"), ("[THINK]", "mistral")),
    *(("<|open|>", "kimi_k3"), ("</think>", "think")),
)


@dataclass(frozen=True, slots=True)
class Parsers:
    """Of one model, by name; OFF where it has none."""

    tools: str = OFF
    reasoning: str = OFF

    def reader(self, tools: Mapping[str, Any] | None, prompt: str) -> Reader | None:
        """For one answer to `prompt`, whose tools have these names and arguments' schemas (None: it has none); None
        where all is content."""
        if HARMONY in (self.tools, self.reasoning):
            return HarmonyReader()
        calls = tools is not None and self.tools != OFF
        if not calls and self.reasoning == OFF:
            return None
        then = CallReader(SYNTAXES[self.tools](tools or {})) if calls else Plain()
        if self.reasoning == OFF:
            return then
        opener, closer = THINKING[self.reasoning]
        return ThinkingReader(opener, closer, then, begun=prompt.rstrip().endswith(opener.rstrip()))


def parsers_of(tokenizer: Tokenizer, tools: str = AUTO, reasoning: str = AUTO) -> Parsers:
    """What --tool_call_parser and --reasoning_parser come to for this model."""

    def found(signs: tuple[tuple[str, str], ...]) -> str:
        return next((name for sign, name in signs if tokenizer.holds(sign)), OFF)

    return Parsers(found(SIGNS) if tools == AUTO else tools, found(THINKING_SIGNS) if reasoning == AUTO else reasoning)


def reads_of(
    parsers: Parsers, tools: Tools | None, prompt: str, special: SpecialText, skip_special: bool
) -> Callable[[], Told] | None:
    """What begins to read an answer to `prompt`; None where all of it is content."""
    hidden = special.pattern if skip_special else None
    if tools is not None and tools.forced:
        word = "stop" if tools.named else TOOL_CALLS  # as OpenAI has it
        return lambda: Told(ForcedReader(tools), hidden, stop_word=word)
    schemas = None if tools is None or tools.choice == NONE else tools.schemas
    if parsers.reader(schemas, prompt) is None:
        return None

    def begin() -> Told:
        reader = parsers.reader(schemas, prompt)
        assert reader is not None
        return Told(reader, hidden, stop_word=TOOL_CALLS)

    return begin
