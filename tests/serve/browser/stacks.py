"""What the browser is pointed at: four toy workers that tell a text we know, at the pace of a small model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

from jdisagg.core.request import SamplingParams
from jdisagg.core.router_config import Routing
from jdisagg.core.worker_config import Role, Stages, WorkerConfig
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from tests.serve.live_http import serving
from tests.serve.live_toy import SlowToy, ToyStack, toy_stack, worker_config
from tests.serve.scripted import FIXTURE

LONGEST, PAGES = 1024, 192
TEXT = """A prompt is computed on one mesh and answered on another.

The **KV cache** travels between them, page by page, while the rest of the prompt is still being computed:

```python
def handoff(pages):
    for page in pages:
        ship(page)
```

So a long prompt never stands in the way of those who wait for their next token."""


class Teller(SlowToy):
    """A toy that writes `text`, whatever it was asked, and ends."""

    tokenizer = Tokenizer(FIXTURE)
    text: ClassVar[str] = TEXT
    ids: ClassVar[Sequence[int]] = ()
    pause_s, chunk_s = 0.004, 0.03

    @classmethod
    def tell(cls, text: str, pause_s: float = 0.004) -> None:
        """From now on."""
        cls.text, cls.pause_s = text, pause_s
        cls.ids = cls.tokenizer.encode(text, add_special_tokens=False)

    @staticmethod
    def law(tokens: list[int], sampling: SamplingParams, num_output: int) -> int:
        ids = Teller.ids
        return ids[num_output] if num_output < len(ids) else Teller.tokenizer.eos_ids[0]


def worker(name: str, role: Role) -> WorkerConfig:
    config = replace(worker_config(name, role, PAGES), max_model_len=LONGEST, layer_groups=((0, 3), (3, 6)))
    return replace(config, decode=Stages(2 if role is Role.DECODE else 1))


CONFIGS = [worker(f"{role.value}-{index}", role) for role in (Role.PREFILL, Role.DECODE) for index in range(2)]


@contextmanager
def told_stack(api_key: str | None = None) -> Iterator[tuple[ToyStack, str]]:
    """A stack of tellers and the URL of its front."""
    Teller.tell(TEXT)
    with toy_stack(configs=CONFIGS, kind=Teller, routing=Routing.CACHE_AWARE) as stack:
        settings = FrontSettings(api_key=api_key)
        with serving(create_app(stack.service, settings, stack.metrics, stack.service.debug_state)) as url:
            yield stack, url
