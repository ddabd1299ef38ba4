"""gpt-oss: messages one behind the other, each with a channel, a recipient or none, and a text (OpenAI's Harmony).

The prompt ends with `<|start|>assistant`: an answer begins within a header. Texts on the analysis channel are
reasoning, those to `functions.NAME` calls, and those on the final and commentary channels content.
"""

from __future__ import annotations

import re

from jdisagg.serve.tools.said import Call, Said, arguments_text, blanks_end, json_value, no_json_from

MESSAGE = "<|message|>"
ENDS = re.compile(r"<\|(?:end|return|start)\|>")  # of a text
CALL_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
MARKS = ("<|end|>", "<|return|>", "<|start|>")
RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")


class HarmonyReader:
    """Implements `Reader`."""

    def __init__(self) -> None:
        self._text, self._header = "", ""
        self._within = False  # of a message's text

    def feed(self, text: str) -> Said:
        self._text += text
        told = list[Said]()
        while self._begun():
            over = self._read_call(told) if self._callee is not None else self._read_text(told)
            if not over:
                break
            self._within = False
        calls = tuple(call for said in told for call in said.calls)
        return Said("".join(said.content for said in told), "".join(said.reasoning for said in told), calls)

    def _begun(self) -> bool:
        """Whether the text of a message has begun."""
        if not self._within:
            header, mark, rest = self._text.partition(MESSAGE)
            if mark:
                self._header, self._text, self._within = header, rest, True
        return self._within

    def _read_text(self, told: list[Said]) -> bool:
        """What is certain of it; whether it is over."""
        found = ENDS.search(self._text)
        shown = len(self._text) - len(self._partial()) if found is None else found.start()
        told.append(self._told(self._text[:shown]))
        self._text = self._text[shown if found is None else found.end() :]
        return found is not None

    def _read_call(self, told: list[Said]) -> bool:
        """Whether it is whole."""
        start = blanks_end(self._text, 0)
        known = no_json_from(self._text, start)
        found = None if known is None else CALL_ENDS.search(self._text, known)
        if found is None:
            return False
        told.append(Said(calls=self._called(self._text[: found.start()])))
        self._text = self._text[found.end() :]
        return True

    def end(self, whole: bool) -> Said:
        if not self._within:
            return Said()
        if self._callee is None:
            return self._told(self._text)
        return Said(calls=self._called(self._text) if whole else ())

    @property
    def _callee(self) -> str | None:
        found = RECIPIENT.search(self._header)
        return None if found is None else found[1]

    def _called(self, text: str) -> tuple[Call, ...]:
        name, arguments = self._callee, json_value(text)
        return () if name is None or not isinstance(arguments, dict) else (Call(name, arguments_text(arguments)),)

    def _told(self, text: str) -> Said:
        found = CHANNEL.search(self._header)
        return Said(reasoning=text) if found is not None and found[1] == "analysis" else Said(text)

    def _partial(self) -> str:
        """What may be the beginning of a mark."""
        for size in range(min(len(MARKS[-1]), len(self._text)), 0, -1):
            if any(mark.startswith(self._text[-size:]) for mark in MARKS):
                return self._text[-size:]
        return ""
