"""One request with random features, and whether an answer is one to it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = (
    "def f(x):\n    return",
    "import os\n\n\nclass Tree:\n",
    "for name in names:\n    print(name)\n" * 3,
    "x = 1\n" * 8,
)
SALTS, STOPS = ("a", "b", ""), ("\n\n", "def ", "zzz", "}")
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: tuple[dict[str, Any], ...] = (
    PERSON,
    {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-f0-9]{4}$"}]},
)
REGEX, CHOICES = "[a-f]{3}-[0-9]{2}", ("yes", "no", "perhaps")
TOOL = {"type": "function", "function": {"name": "store_person", "parameters": PERSON}}
EXPLODES = {"allOf": [{"anyOf": [{"properties": {f"k{n}": {"const": m}}} for m in range(6)]} for n in range(9)]}
WRONG: tuple[dict[str, Any], ...] = (
    {"temperature": -1.0},
    {"n": 0},
    {"top_p": 7},
    {"max_tokens": 1_000_000},
    {"guided_json": {"type": "foo"}},
    {"guided_json": {"type": "array", "uniqueItems": True}},
    {"guided_regex": "("},
    {"guided_regex": "a", "guided_choice": ["a"]},
    {"structured_outputs": {"grammar": "start: foo"}},
    {
        "guided_json": {
            "allOf": [{"anyOf": [{"properties": {f"k{n}": {"const": m}}} for m in range(6)]} for n in range(9)]
        }
    },
    {"logit_bias": {"99999999": 1}},
    {"stop_token_ids": [-3]},
    {"priority": 99},
)


@dataclass(frozen=True, slots=True)
class Asked:
    path: str
    body: dict[str, Any]
    features: tuple[str, ...] = ()

    def told(self, said: Any) -> list[Any]:
        """What each choice says, however it was sent."""
        events, texts = said if isinstance(said, list) else [said], dict[int, list[str]]()
        for event in events:
            for choice in event["choices"]:
                part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
                calls = [
                    call["function"]["name"] + call["function"]["arguments"] for call in part.get("tool_calls") or ()
                ]
                texts.setdefault(choice["index"], []).extend([part.get("content") or "", *calls])
        return ["".join(texts[index]) for index in sorted(texts)]

    def ends(self, said: Any) -> list[str]:
        events = said if isinstance(said, list) else [said]
        return [end for event in events for choice in event["choices"] if (end := choice.get("finish_reason"))]

    def fault(self, said: Any) -> str:
        """What is wrong with an answer; "" where nothing is."""
        texts, ends, number = self.told(said), self.ends(said), self.body.get("n", 1)
        if len(texts) != number or len(ends) != number or not set(ends) <= {"stop", "length", "tool_calls"}:
            return f"{number} choices were asked for: {texts} {ends}"
        if isinstance(said, Mapping):
            most = number * self.body["max_tokens"]
            if said["usage"]["completion_tokens"] > most:
                return f"{said['usage']} of at most {most} tokens"
            if ("logprobs" in self.features) != all(choice.get("logprobs") for choice in said["choices"]):
                return f"logprobs: {str(said)[:300]}"
        if {"stop", "length"} & set(ends) and ("stop" in self.features or "length" in ends):
            return ""
        wrong = [text for text in texts if not self._is_of_its_form(text)]
        return f"not of its form: {wrong}" if wrong else ""

    def _is_of_its_form(self, text: str) -> bool:
        body = self.body
        if "tools" in body:  # a required call may be followed by others
            _, *calls = text.split("store_person")
            return bool(calls) and all(map(is_person, calls))
        schema = body.get("guided_json") or (body.get("response_format") or {}).get("json_schema", {}).get("schema")
        if schema is not None:
            return is_valid(text, schema)
        if "guided_regex" in body:
            return re.fullmatch(REGEX, text) is not None
        return text in CHOICES if "guided_choice" in body else True


def is_valid(text: str, schema: Any) -> bool:
    try:
        return Draft202012Validator(schema).is_valid(json.loads(text))
    except ValueError:
        return False


def is_person(text: str) -> bool:
    return is_valid(text, PERSON)


def wrong_of(draw: random.Random) -> Asked:
    """One that no server should take."""
    return Asked(COMPLETIONS, {"prompt": draw.choice(PROMPTS), "max_tokens": 8, **draw.choice(WRONG)}, ("wrong",))


def asked(draw: random.Random, models: Sequence[str] = ()) -> Asked:
    """For one of `models` (adapters) now and then, else for the model itself."""
    chat = draw.random() < 0.3
    body: dict[str, Any] = {"max_tokens": draw.randrange(1, 64), "seed": draw.randrange(1 << 30)}
    prompt = draw.choice(PROMPTS) * draw.choice((1, 1, 2))
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    features = ["chat" if chat else "completion"]
    for name, more in (*_drawing(draw, chat), *_more(draw)):
        if draw.random() < 0.22:
            features.append(name)
            body |= more
    if draw.random() < 0.4:
        name, more = _form(draw, chat)
        features.append(name)
        body |= more
        body.pop("min_tokens", None)
        body["max_tokens"] = max(body["max_tokens"], draw.choice((20, 150)))
    if body.get("min_tokens", 0) > body["max_tokens"]:
        body["max_tokens"] = body["min_tokens"]
    if models and draw.random() < 0.4:
        features.append("adapter")
        body["model"] = draw.choice(models)
    return Asked(CHAT if chat else COMPLETIONS, body, tuple(features))


def _drawing(draw: random.Random, chat: bool) -> list[tuple[str, dict[str, Any]]]:
    top = draw.randrange(6)
    return [
        ("warm", {"temperature": draw.choice((0.5, 1.0, 1.6))}),
        ("cold", {"temperature": 0}),
        ("truncated", {"top_k": draw.randrange(1, 50), "top_p": 0.9, "min_p": 0.01}),
        ("penalties", {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2}),
        ("bias", {"logit_bias": {str(draw.randrange(3, 4000)): draw.choice((-100, 4))}}),
        ("logprobs", {"logprobs": True, "top_logprobs": top} if chat else {"logprobs": top}),
    ]


def _more(draw: random.Random) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("n", {"n": draw.randrange(2, 5)}),
        ("stop", {"stop": draw.sample(STOPS, 2), "stop_token_ids": [draw.randrange(3, 4000)]}),
        ("stream", {"stream": True, "stream_options": {"include_usage": True}}),
        ("priority", {"priority": draw.randrange(-10, 11)}),
        ("salt", {"cache_salt": draw.choice(SALTS)}),
        ("one token a step", {"speculative": False}),
        ("cut prompt", {"truncate_prompt_tokens": draw.randrange(1, 20)}),
        ("min_tokens", {"min_tokens": draw.randrange(1, 12)}),
        ("no end", {"ignore_eos": True}),
        ("request id", {"request_id": f"r-{draw.random()}"}),
    ]


def _form(draw: random.Random, chat: bool) -> tuple[str, dict[str, Any]]:
    schema = draw.choice(SCHEMAS)
    held = {"name": "x", "schema": schema}
    ways: list[tuple[str, dict[str, Any]]] = [
        ("schema", {"guided_json": schema}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": held}}),
        ("regex", {"guided_regex": REGEX}),
        ("choice", {"guided_choice": [*CHOICES]}),
    ]
    if chat:
        named = {"type": "function", "function": {"name": "store_person"}}
        ways.append(("tools", {"tools": [TOOL], "tool_choice": draw.choice(("required", named))}))
    return draw.choice(ways)
