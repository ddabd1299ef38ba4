"""The page of interfaces: HTTP by the app's own OpenAPI document, gRPC by the .proto, Python by its docstrings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jdisagg
from docs.generate.markdown import table
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import BODIES, create_app
from jdisagg.serve.frontends.http.messages import MessagesBody
from jdisagg.serve.frontends.http.responses import ResponsesBody
from jdisagg.serve.frontends.http.schema import IGNORED, REFUSED
from tests.serve.scripted import ScriptedService

ROOT = Path(__file__).parents[2]
GRPC = ROOT / "jdisagg" / "serve" / "frontends" / "grpc"
PROTOS = (GRPC / "jetstream.proto", "service Orchestrator"), (GRPC / "inference.proto", "service Inference")
INTRO = """# HTTP, gRPC, Python

Any client of the OpenAI API (completions, chat, responses, embeddings) works with `http://HOST:8000/v1`, any client of
Anthropic's messages with `http://HOST:8000`, any client of JetStream's `Orchestrator` with the gRPC port, where
`jdisagg.v1.Inference` has the routes of HTTP in JSON (health and reflection are served too). `GET /openapi.json` is the
machine's edition of the HTTP part. Every answer has `x-request-id`; a body with `"ledger": true` gets back where its
time went. With `--api_key` every request sends `Authorization: Bearer KEY` or `x-api-key: KEY`; `/admin` is for the key
named `admin`."""
DOES = {
    "/v1/completions": "A completion, or several; `stream` for server-sent events.",
    "/v1/chat/completions": "The answer to messages, by the model's own template.",
    "/tokenize": "Token ids of a text or of messages.",
    "/detokenize": "The text of token ids.",
    "/v1/models": "What is served.",
    "/v1/models/{name}": "One of them.",
    "/version": "Of jdisagg.",
}


def document() -> Mapping[str, Any]:
    """The OpenAPI document of a router with /debug and /admin."""
    settings, records = FrontSettings(admin_key="any"), SimpleNamespace(records=None, transfer=None)
    return create_app(ScriptedService(), settings, debug_state=cast(Any, records)).openapi()


def text() -> str:
    parts = [INTRO, "## HTTP", routes(), *map(body_text, BODIES), refused_text(), grpc_text(), python_text()]
    return "\n\n".join(parts)


def routes() -> str:
    found = [
        (f"`{method.upper()} {path}`", described(path, operation), ", ".join(sorted(operation["responses"])))
        for path, operations in document()["paths"].items()
        for method, operation in operations.items()
    ]
    return table(("request", "what", "statuses"), found)


def described(path: str, operation: Mapping[str, Any]) -> str:
    """Its docstring's first paragraph."""
    return (operation.get("description") or DOES.get(path, "")).split("\n\n")[0]


def body_text(kind: type[Any]) -> str:
    schema = kind.model_json_schema()
    needed = schema.get("required", [])
    rows = [
        (f"`{name}`", kind_of(field), "needed" if name in needed else default_of(field))
        for name, field in schema["properties"].items()
    ]
    return f"### Body of {paragraph(kind.__doc__).rstrip('.')}\n\n{table(('field', 'kind', 'default'), rows)}"


def kind_of(field: Mapping[str, Any]) -> str:
    """As `integer 1 to 128`; alternatives with `or`."""
    kinds = [one_kind(each) for each in field.get("anyOf", [field]) if each.get("type") != "null"]
    return " or ".join(dict.fromkeys(kinds))


def one_kind(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if field.get("type") == "array":
        return f"list of {kind_of(field.get('items', {})) or 'values'}"
    least = field.get("minimum")
    most = field["exclusiveMaximum"] - 1 if "exclusiveMaximum" in field else field.get("maximum")
    bounds = f" {least} to {most}" if least is not None and most is not None else ""
    return f"{field.get('type', 'any')}{bounds}"


def default_of(field: Mapping[str, Any]) -> str:
    return f"`{field['default']}`" if field.get("default") not in (None, "") else ""


def refused_text() -> str:
    """What clients of others know, by interface."""
    ours = ("completions and chat", REFUSED), ("responses", ResponsesBody.refused)
    bodies = (*ours, ("messages", MessagesBody.refused))
    names = list(dict.fromkeys(name for _, fields in bodies for name in sorted(fields)))
    rows = [
        (f"`{name}`", ", ".join(where for where, fields in bodies if name in fields), harmless(name, bodies))
        for name in sorted(names)
    ]
    refused = table(("field", "refused by", "but for"), rows)
    ignored = table(("field", "why it may be let by"), [(f"`{name}`", why) for name, why in sorted(IGNORED.items())])
    return (
        "### Refused\n\nKnown fields that are refused by name (400) unless they are null, empty or ask for nothing,"
        f" where the body above has no field of that name.\n\n{refused}\n\n### Let by\n\nKnown fields that"
        f" change nothing; so is every field that nobody knows.\n\n{ignored}"
    )


def harmless(name: str, bodies: Sequence[tuple[str, Mapping[str, tuple[Any, ...]]]]) -> str:
    values = next(fields[name] for _, fields in bodies if name in fields)
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


def grpc_text() -> str:
    shown = []
    for path, start in PROTOS:
        proto = path.read_text(encoding="utf-8")
        package = proto[proto.index("package") : proto.index(";", proto.index("package")) + 1]
        shown.append(f"```protobuf\n{package}\n\n{proto[proto.index(start) :].rstrip()}\n```")
    return "\n\n".join(["## gRPC", *shown])


def python_text() -> str:
    methods = "\n\n".join(methods_of(jdisagg.LLM))
    sampling = [(f"`{each.name}`", f"`{each.type}`") for each in fields(jdisagg.SamplingParams)]
    return (
        f"## Python\n\n### jdisagg.LLM(**settings)\n\n{paragraph(jdisagg.LLM.__doc__)}\n\n{methods}"
        f"\n\n### jdisagg.SamplingParams\n\n{paragraph(jdisagg.SamplingParams.__doc__)}\n\n"
        + table(("field", "type"), sampling)
    )


def methods_of(kind: type) -> Iterator[str]:
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            yield f"- `{signature(name, method)}`: {paragraph(method.__doc__) or 'Ends it.'}"


def signature(name: str, method: Callable[..., Any]) -> str:
    """As `generate(prompt: Prompt, sampling: SamplingParams = ...) -> Completion`."""
    known = inspect.signature(method)
    parts = [
        f"{each.name}: {each.annotation}" + (" = ..." if each.default is not inspect.Parameter.empty else "")
        for each in known.parameters.values()
        if each.name != "self"
    ]
    return f"{name}({', '.join(parts)}) -> {known.return_annotation}"


def paragraph(doc: str | None) -> str:
    """The first one, on one line."""
    return " ".join((doc or "").strip().split("\n\n")[0].split())
