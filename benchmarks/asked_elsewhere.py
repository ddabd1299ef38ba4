"""Random requests to what is neither completions nor chat: vectors, scores, responses, messages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.asked import PERSON, PROMPTS, Asked, is_person

EMBEDDINGS, SCORE, RESPONSES, MESSAGES = "/v1/embeddings", "/v1/score", "/v1/responses", "/v1/messages"
TRIPLES = 3  # texts of one request, at most


@dataclass(frozen=True, slots=True)
class Vectors(Asked):
    """Embeddings or scores: a number or numbers for each text."""

    def told(self, said: Any) -> list[Any]:
        return [each.get("embedding", each.get("score")) for each in said["data"]]

    def fault(self, said: Any) -> str:
        found, number = self.told(said), len(self.body.get("input", self.body.get("text_2", ())))
        lengths = {len(each) if isinstance(each, list) else 1 for each in found}
        if len(found) != number or len(lengths) != 1 or lengths != {self.body.get("dimensions", max(lengths))}:
            return f"{number} texts gave {len(found)} vectors of {sorted(lengths)} numbers"
        flat = [value for each in found for value in (each if isinstance(each, list) else [each])]
        return "" if all(abs(value) <= 1 + 1e-5 for value in flat) and any(flat) else f"not of length one: {found}"


@dataclass(frozen=True, slots=True)
class Items(Asked):
    """A response or a message: parts, of which those of text are told."""

    def told(self, said: Any) -> list[Any]:
        if self.path == MESSAGES:
            return ["".join(each.get("text", "") for each in said["content"])]
        items = [part for item in said["output"] for part in item.get("content") or ()]
        return ["".join(each.get("text", "") for each in items)]

    def ends(self, said: Any) -> list[str]:
        return [said["stop_reason" if self.path == MESSAGES else "status"]]

    def fault(self, said: Any) -> str:
        ends, most = self.ends(said), self.body.get("max_output_tokens", self.body.get("max_tokens"))
        if not set(ends) <= {"completed", "incomplete", "end_turn", "max_tokens", "stop_sequence"}:
            return f"ended as {ends}"
        if said["usage"]["output_tokens"] > most:
            return f"{said['usage']} of at most {most} tokens"
        if "format" in self.features and ends == ["completed"]:
            text = self.told(said)[0]
            return "" if is_person(text) else f"not of its form: {text}"
        return ""


def asked_elsewhere(draw: random.Random, models: Sequence[str] = ()) -> Asked:
    """One of the four, for one of `models` or the model itself."""
    body: dict[str, Any] = {"model": draw.choice(models)} if models and draw.random() < 0.4 else {}
    more = ("adapter",) if body else ()
    path = draw.choice((EMBEDDINGS, SCORE, RESPONSES, MESSAGES))
    if path in (EMBEDDINGS, SCORE):
        return _vectors(draw, path, body, more)
    return _items(draw, path, body, more)


def _vectors(draw: random.Random, path: str, body: dict[str, Any], more: tuple[str, ...]) -> Asked:
    texts = [draw.choice(PROMPTS) * draw.choice((1, 2)) for _ in range(draw.randrange(1, TRIPLES + 1))]
    body |= {"pooling": draw.choice(("last", "mean"))}
    if path == SCORE:
        return Vectors(path, {**body, "text_1": draw.choice(PROMPTS), "text_2": texts}, ("score", *more))
    if draw.random() < 0.3:
        body["dimensions"] = draw.randrange(2, 64)
    return Vectors(path, {**body, "input": texts}, ("embedding", *more))


def _items(draw: random.Random, path: str, body: dict[str, Any], more: tuple[str, ...]) -> Asked:
    body |= {"temperature": draw.choice((0, 1)), "seed": draw.randrange(1 << 30)}
    prompt, tokens = draw.choice(PROMPTS), draw.randrange(1, 48)
    if path == MESSAGES:
        messages = [{"role": "user", "content": prompt}]
        return Items(path, {**body, "max_tokens": tokens, "messages": messages}, ("message", *more))
    if draw.random() < 0.3:
        body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": PERSON, "strict": True}}
        more, tokens = (*more, "format"), tokens + 100
    return Items(path, {**body, "max_output_tokens": tokens, "input": prompt}, ("response", *more))
