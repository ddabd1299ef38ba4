"""`LLM`: the whole stack in your own process, for research and for batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console

from jdisagg import devices
from jdisagg.core.errors import FlagError, RequestError
from jdisagg.core.request import Adapter, SamplingParams
from jdisagg.core.settings import REMOVED, Settings
from jdisagg.named_models import located
from jdisagg.serve.deploy import assemble
from jdisagg.serve.deploy.deployment import mesh_of, resolve_deployment
from jdisagg.serve.frontends import offline
from jdisagg.serve.frontends.adapters import adapters_of
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.grammars import why_no_grammars
from jdisagg.serve.frontends.offline import Completion, Messages, Prompt
from jdisagg.serve.frontends.text import Piece
from jdisagg.serve.frontends.tools.asked import parsers_of

GREEDY = SamplingParams(max_tokens=128, temperature=0.0)
GREEDY_CHAT = SamplingParams(temperature=0.0)
Answer = TypeVar("Answer")


class LLM:
    """A running stack; arguments are the launcher's flags. Close it, or use it as a context manager.

    >>> with LLM(mesh="prefill:tp2,decode:pp2") as llm:
    ...     print(llm.generate("def fibonacci(n):").text)
    """

    def __init__(self, **settings: Any) -> None:
        """Loads, compiles and warms the stack. Raises ConfigError, MeshError or CheckpointError."""
        for name in settings.keys() & REMOVED.keys():
            raise FlagError(f"{name} {REMOVED[name]}")
        self.settings = Settings(**settings)
        self.settings.check()
        self.settings = located(self.settings, Console(stderr=True))
        mesh = mesh_of(self.settings)
        all_devices = devices.prepare_mesh(mesh, self.settings.platform, self.settings.compile_cache_dir)
        first = devices.first_of_most(all_devices)
        self.deployment = resolve_deployment(
            self.settings, first.platform, devices.memory_bytes(first), chip=devices.chip_of(first)
        )
        self.service = assemble.build(self.deployment, self.settings, all_devices)
        self.adapters = adapters_of(self.settings, self.deployment.model, self.deployment.model_name)
        self.service.start()
        self._front = FrontSettings(
            sampling_defaults=self.service.sampling_defaults,
            eos_ids=self.service.tokenizer.eos_ids,
            parsers=parsers_of(self.service.tokenizer, self.settings.tool_call_parser, self.settings.reasoning_parser),
            no_grammars=why_no_grammars(self.settings),
            embeddings=self.settings.embeddings,
            adapters=self.adapters,
            model_fingerprint=self.service.fingerprint,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def load_adapter(self, name: str, folder: str) -> Adapter:
        """Loads an adapter for `SamplingParams.adapter`; needs `enable_lora`, or adapters in `lora`. Raises
        RequestError."""
        return self.adapters.load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter; running requests keep it to their end. Raises RequestError."""
        self.adapters.unload(name)

    def adapter(self, name: str) -> Adapter:
        """Returns a loaded adapter by name. Raises RequestError."""
        adapter = self.adapters.find(name)
        if adapter is None:
            raise RequestError(f"no adapter {name!r} is loaded; there are: {', '.join(self.adapters.found) or 'none'}")
        return adapter

    def generate(self, prompt: Prompt, sampling: SamplingParams = GREEDY) -> Completion:
        """Returns one whole completion of a text or of token ids."""
        return self.generate_all([prompt], sampling)[0]

    def generate_all(self, prompts: Sequence[Prompt], sampling: SamplingParams = GREEDY) -> list[Completion]:
        """Returns completions in the prompts' order; they run together, batched by the workers."""
        return self._wait_for(offline.complete_all(self.service, prompts, sampling, self._front))

    def chat(self, messages: Messages, sampling: SamplingParams = GREEDY_CHAT, **options: Any) -> Completion:
        """Returns the answer to messages of {"role", "content"}, by the model's chat template. Its length is limited
        only by the model's context. `options` are fields of a chat over HTTP: tools, tool_choice, response_format,
        chat_template_kwargs and more. Tool calls are in `choices[n].calls`, reasoning in `choices[n].reasoning`."""
        return self._wait_for(offline.chat(self.service, messages, sampling, self._front, options))

    def embed(self, prompts: Sequence[Prompt], pooling: str | None = None) -> list[list[float]]:
        """Returns a vector for each prompt, of an LLM with embeddings="last" or "mean"; `pooling` overrides it."""
        return self._wait_for(offline.embed(self.service, prompts, self._front, pooling))

    def stream(self, prompt: Prompt, sampling: SamplingParams = GREEDY) -> AsyncGenerator[Piece]:
        """Yields pieces of the answer as they come, on the caller's event loop. Closing the generator cancels the
        request."""
        return offline.stream(self.service, prompt, sampling, self._front)

    def _wait_for(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self.service.stop()
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
