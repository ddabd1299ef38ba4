"""Which reader is for a model: by name, or by what its chat template and its vocabulary hold."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from jdisagg.model.content import SpecialText
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.tools.asked import NONE, ForcedReader, Tools
from jdisagg.serve.tools.calls import CallReader, Syntax
from jdisagg.serve.tools.gemma import Gemma
from jdisagg.serve.tools.harmony import HarmonyReader
from jdisagg.serve.tools.pythonic import Pythonic
from jdisagg.serve.tools.said import Reader
from jdisagg.serve.tools.syntaxes import DeepSeek, Functools, Llama3, Mistral, Tagged
from jdisagg.serve.tools.thinking import Plain, ThinkingReader
from jdisagg.serve.tools.told import TOOL_CALLS, Told

AUTO, OFF, HARMONY = "auto", "off", "gpt_oss"
SYNTAXES: dict[str, Callable[[Collection[str]], Syntax]] = {
    "hermes": lambda names: Tagged(),
    "llama3": Llama3,
    "llama4": Pythonic,
    "mistral": lambda names: Mistral(),
    "deepseek": lambda names: DeepSeek(),
    "gemma4": lambda names: Gemma(),
    "phi4": lambda names: Tagged("<|tool_call|>", "<|/tool_call|>"),
    "functools": lambda names: Functools(),
}
THINKING = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
THINKING["gemma4"] = ("<|channel>thought\n", "<channel|>")
# What a template or a vocabulary has that a syntax needs; the first that is there counts.
SIGNS = (
    ("<|constrain|>", HARMONY),
    ("<|tool_call>", "gemma4"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|/tool_call|>", "phi4"),
    ("functools[", "functools"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "llama4"),
    ("<|python_tag|>", "llama3"),
)
THINKING_SIGNS = (("<|constrain|>", HARMONY), ("<|channel>", "gemma4"), ("[THINK]", "mistral"), ("</think>", "think"))


@dataclass(frozen=True, slots=True)
class Parsers:
    """Of one model, by name; OFF where it has none."""

    tools: str = OFF
    reasoning: str = OFF

    def reader(self, names: Collection[str] | None, prompt: str) -> Reader | None:
        """For one answer to `prompt`, whose tools have these `names` (None: it has none); None where all is content."""
        if HARMONY in (self.tools, self.reasoning):
            return HarmonyReader()
        calls = names is not None and self.tools != OFF
        if not calls and self.reasoning == OFF:
            return None
        then = CallReader(SYNTAXES[self.tools](names or ())) if calls else Plain()
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
    names = None if tools is None or tools.choice == NONE else tools.names
    if parsers.reader(names, prompt) is None:
        return None

    def begin() -> Told:
        reader = parsers.reader(names, prompt)
        assert reader is not None
        return Told(reader, hidden, stop_word=TOOL_CALLS)

    return begin
