"""The HTTP routes. Each reads its body, builds a job or an answer, and leaves errors to the table in `errors.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect

from jdisagg.core.errors import RequestError
from jdisagg.serve.deploy.pools import Pools
from jdisagg.serve.driver.service import Service
from jdisagg.serve.frontends import text
from jdisagg.serve.frontends.adapters import Adapters
from jdisagg.serve.frontends.clients import Clients
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http import errors
from jdisagg.serve.frontends.http.admin import add_admin, add_debug, add_page, admin_check
from jdisagg.serve.frontends.http.chat import chat_ids
from jdisagg.serve.frontends.http.connections import AccessLog
from jdisagg.serve.frontends.http.embeddings import EmbeddingsBody, ScoreBody, add_embeddings
from jdisagg.serve.frontends.http.errors import documented
from jdisagg.serve.frontends.http.front import Front
from jdisagg.serve.frontends.http.gate import Gate, read_body
from jdisagg.serve.frontends.http.jobs import Job, chat_job, check_model, completion_job, decode, encode
from jdisagg.serve.frontends.http.messages import CountBody, MessagesBody, add_messages
from jdisagg.serve.frontends.http.rendering import BestOfRenderer, Renderer, RendererOf
from jdisagg.serve.frontends.http.responses import ResponsesBody, add_responses
from jdisagg.serve.frontends.http.schema import BODIES as PLAIN_BODIES
from jdisagg.serve.frontends.http.schema import (
    CacheBody,
    ChatBody,
    ChatFields,
    CompletionBody,
    DetokenizeBody,
    DrainBody,
    LoadAdapterBody,
    RoleBody,
    TokenizeBody,
    UnloadAdapterBody,
    parse,
    takes,
)
from jdisagg.serve.observability.cluster_view import ClusterView
from jdisagg.serve.observability.metrics import Metrics
from jdisagg.serve.observability.records import DebugState
from jdisagg.serve.observability.tracing import Profiles, own_profile

# The routes under /admin/workers: what workers there are, and changes of their roles.

CHANGES = documented(400, 401, 404, 408, 409, 413)


def add_workers(app: FastAPI, check: Callable[[Request], None], pools: Pools, most_bytes: int) -> None:
    """`check` raises unless the request has the admin's key."""

    @app.get("/admin/workers", responses=documented(401))
    async def workers(request: Request) -> dict[str, Any]:
        """Every worker: what it is, where it stands, what else it can be, and what its last change took."""
        check(request)
        return {"workers": pools.described()}

    @app.post("/admin/workers/{worker}/drain", status_code=202, openapi_extra=takes(DrainBody), responses=CHANGES)
    async def drain(request: Request, worker: str) -> dict[str, Any]:
        """It is given nothing new; what it has after `drain_s` goes on elsewhere. /role brings it back."""
        check(request)
        body = parse(DrainBody, await read_body(request, most_bytes) or b"{}")
        return await pools.drain(worker, body.drain_s)

    @app.post("/admin/workers/{worker}/role", status_code=202, openapi_extra=takes(RoleBody), responses=CHANGES)
    async def role(request: Request, worker: str) -> dict[str, Any]:
        """It is drained, its weights are cut anew on its devices, and it joins again as this."""
        check(request)
        body = parse(RoleBody, await read_body(request, most_bytes))
        return await pools.change(worker, body.role, body.mesh, body.drain_s)


# Loading and unloading of adapters, by vLLM's routes and with the admin's key.

LOADS = documented(400, 401, 408, 413)
UNLOADS = documented(400, 401, 404, 408, 413)


def add_adapters(app: FastAPI, check: Callable[[Request], None], adapters: Adapters, most_bytes: int) -> None:
    """`check` raises unless the request has the admin's key."""

    @app.post("/v1/load_lora_adapter", openapi_extra=takes(LoadAdapterBody), responses=LOADS)
    async def load(request: Request) -> PlainTextResponse:
        """Clients may ask for it by `lora_name` from now on; every process of the cluster reads `lora_path` itself."""
        check(request)
        body = parse(LoadAdapterBody, await read_body(request, most_bytes))
        await asyncio.to_thread(adapters.load, body.lora_name, body.lora_path, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", openapi_extra=takes(UnloadAdapterBody), responses=UNLOADS)
    async def unload(request: Request) -> PlainTextResponse:
        """It is not there for new requests; those that run end with it."""
        check(request)
        body = parse(UnloadAdapterBody, await read_body(request, most_bytes))
        adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


# The route that says who holds the KV of a prompt.


def add_cache(app: FastAPI, service: Service, debug_state: DebugState, most_bytes: int) -> None:
    @app.post("/debug/cache", openapi_extra=takes(CacheBody), responses=documented(400, 401, 408, 413))
    async def cache(request: Request) -> dict[str, Any]:
        """Who holds how much of a prompt's KV, in which tier, and the seconds that it would take from each source, and
        computed; of workers of other processes, as far as the router follows what they keep."""
        body = parse(CacheBody, await read_body(request, most_bytes))
        prompt = body.prompt
        tokens = (await encode(service, [prompt], True))[0] if isinstance(prompt, str) else tuple(prompt)
        held = debug_state.holders(tokens, body.cache_salt, service.now_s())
        return {"prompt_tokens": len(tokens), "workers": held}


TOKENS = errors.documented(400, 401, 404, 408, 413, 503)
GENERATION = errors.documented(400, 401, 404, 408, 413, 429, 503)
BODIES = (*PLAIN_BODIES, ResponsesBody, MessagesBody, CountBody, EmbeddingsBody, ScoreBody)
STATE: dict[int | str, dict[str, Any]] = {503: {"description": "The body's `status` says why not"}}
EMPTY = Response(status_code=499)  # for a client that has left: nobody reads it


def create_app(
    service: Service,
    settings: FrontSettings | None = None,
    metrics: Metrics | None = None,
    debug_state: DebugState | None = None,
    clients: Clients | None = None,
    profiles: Callable[[float], Profiles] = own_profile,
) -> FastAPI:
    """The HTTP front of a running stack; `GET /metrics` shows `metrics`, and `GET /debug/...` show `debug_state`.

    `profiles` are taken for POST /admin/profile.
    """
    settings = settings or FrontSettings()
    clients = clients or Clients(settings, service.now_s)
    app = FastAPI(title="jdisagg", version=settings.version, redirect_slashes=False)  # it would trust the Host header
    front, metrics = Front(service, settings, clients), metrics or Metrics(service.model_name)
    errors.install(app)
    _add_generation(app, front)
    add_responses(app, front)
    add_messages(app, front)
    add_embeddings(app, front)
    _add_tokens(app, front)
    _add_state(app, front, metrics)
    if debug_state is not None:
        add_debug(app, debug_state, ClusterView(service, metrics, debug_state, settings.version))
        add_cache(app, service, debug_state, settings.max_body_bytes)
    add_page(app)
    if settings.admin_key is not None:
        check = admin_check(settings.admin_key)
        add_admin(app, check, profiles)
        add_adapters(app, check, settings.adapters, settings.max_body_bytes)
        add_workers(app, check, service.pools, settings.max_body_bytes)
    app.add_middleware(Gate, clients=clients)
    app.add_middleware(AccessLog)
    _describe_bodies(app)
    return app


async def prepare_completion(front: Front, body: CompletionBody, name: str) -> tuple[Job, RendererOf]:
    job = await completion_job(body, front.service, front.settings, name)
    return job, BestOfRenderer if job.kept else Renderer


async def prepare_chat(front: Front, body: ChatBody, name: str) -> tuple[Job, RendererOf]:
    return await chat_job(body, front.service, front.settings, name), Renderer


def _add_generation(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions", openapi_extra=takes(CompletionBody), responses=GENERATION)
    async def completions(request: Request) -> Response:
        return await front.answer(request, CompletionBody, prepare_completion)

    @app.post("/v1/chat/completions", openapi_extra=takes(ChatBody), responses=GENERATION)
    async def chat_completions(request: Request) -> Response:
        return await front.answer(request, ChatBody, prepare_chat)

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, __: Exception) -> Response:
        return EMPTY


async def tokenized(front: Front, body: TokenizeBody) -> dict[str, Any]:
    """Returns the answer to a body of `/tokenize`. Raises RequestError."""
    service = front.service
    check_model(body.model, service, front.settings)
    ids = await _tokens_of(body, service)
    strings = await front.token_texts(ids) if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": service.max_model_len, "tokens": [*ids], "token_strs": strings}


async def detokenized(front: Front, body: DetokenizeBody) -> dict[str, Any]:
    """Returns the answer to a body of `/detokenize`. Raises RequestError."""
    check_model(body.model, front.service, front.settings)
    return {"prompt": await decode(front.service, body.tokens, body.skip_special_tokens)}


def _add_tokens(app: FastAPI, front: Front) -> None:
    @app.post("/tokenize", openapi_extra=takes(TokenizeBody), responses=TOKENS)
    async def tokenize(request: Request) -> Response:
        shown = await tokenized(front, await front.body(request, TokenizeBody))
        return Response(await text.dump_slowly(shown), media_type="application/json")

    @app.post("/detokenize", openapi_extra=takes(DetokenizeBody), responses=TOKENS)
    async def detokenize(request: Request) -> dict[str, Any]:
        return await detokenized(front, await front.body(request, DetokenizeBody))


async def _tokens_of(body: TokenizeBody, service: Service) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        return (await encode(service, [body.prompt], body.add_special_tokens is not False))[0]
    fields = {name: getattr(body, name) for name in body.model_fields_set & ChatFields.model_fields.keys()}
    return await chat_ids(ChatFields(**fields), service.tokenizer, service.max_model_len, bool(body.add_special_tokens))


def _add_state(app: FastAPI, front: Front, collected: Metrics) -> None:
    service, settings = front.service, front.settings

    @app.get("/v1/models", responses=errors.documented(401))
    async def models() -> dict[str, Any]:
        names = dict.fromkeys([service.model_name, *settings.served_names, *settings.adapters.found])
        return {"object": "list", "data": [front.model(name) for name in names]}

    @app.get("/v1/models/{name:path}", responses=errors.documented(401, 404))
    async def model(name: str) -> dict[str, Any]:
        check_model(name, service, settings)
        return front.model(name)

    @app.get("/health", responses=STATE)
    async def health() -> Response:
        """200 once the stack runs, also while it drains: a process that finishes its work is healthy. `degraded` is
        served with less than there was, for what `why` says; `model_fingerprint` is equal where the model is."""
        why = collected.troubles.told(service.now_s())
        state = "draining" if service.draining else "unready" if not service.ready else "degraded" if why else "ok"
        able = {"live": service.alive, "ready": service.ready and not service.draining}
        return _state(state, ("unready",), **able, why=why, model_fingerprint=settings.model_fingerprint)

    @app.get("/ready", responses=STATE)
    async def ready() -> Response:
        """200 while new requests are taken."""
        state = "draining" if service.draining else "ok" if service.ready else "unready"
        return _state(state, bad=("unready", "draining"))

    @app.get("/live", responses=STATE)
    @app.get("/ping", responses=STATE)
    @app.post("/ping", include_in_schema=False)
    async def live() -> Response:
        """200 while the process answers and its driver lives; without one it ends by itself."""
        return _state("ok" if service.alive else "dead", bad=("dead",))

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": settings.version}

    @app.get("/server_info", responses=errors.documented(401))
    async def server_info() -> dict[str, Any]:
        """What is served, and how requests are read."""
        parsers = {"tool_call_parser": settings.parsers.tools, "reasoning_parser": settings.parsers.reasoning}
        more = {"structured_output": settings.no_grammars or "on", "fingerprint": settings.model_fingerprint}
        return {"version": settings.version, **front.model(service.model_name), **parsers, **more}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(collected.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _state(state: str, bad: tuple[str, ...], **more: object) -> Response:
    return JSONResponse({"status": state, **more}, status_code=503 if state in bad else 200)


def _describe_bodies(app: FastAPI) -> None:
    plain = app.openapi

    def described() -> dict[str, Any]:
        document = plain()
        kinds = [(kind, "validation") for kind in BODIES]
        _, models = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        document.setdefault("components", {}).setdefault("schemas", {}).update(models["$defs"])
        _without_422(document)
        return document

    app.openapi = described


def _without_422(document: dict[str, Any]) -> None:
    """FastAPI declares a status that is never sent here: what is wrong with a request is 400."""
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
