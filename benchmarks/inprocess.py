"""The stack in this process, asked through its own streams: what HTTP adds is the difference to `http_client`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from benchmarks.load import Sample
from benchmarks.workload import Job
from jdisagg.core.errors import JdisaggError
from jdisagg.core.request import FinishReason, Request, RequestId, SamplingParams
from jdisagg.core.settings import Settings
from jdisagg.serve.driver.service import Service


def settings_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Launcher settings from texts like "max_num_seqs=32". Raises ValueError naming the pair."""
    known = {each.name: type(each.default) for each in fields(Settings)}
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in known:
            raise ValueError(f"{pair!r} is no setting of jdisagg.launch; they are written name=value")
        found[name] = known[name](value)
    return found


class Local:
    """Asks a `Service` of this process, on its event loop."""

    def __init__(self, service: Service) -> None:
        self.service, self._numbers = service, itertools.count()

    async def ask(self, job: Job) -> Sample:
        """One answer, greedy and of exactly `job.max_tokens`; failures are samples with an `error`."""
        sent_s = time.perf_counter()
        tokens = self.service.tokenizer.encode(job.prompt) if isinstance(job.prompt, str) else job.prompt
        sampling = SamplingParams(max_tokens=job.max_tokens, temperature=0.0)
        name = RequestId(f"load-{next(self._numbers)}")
        request = Request(name, tuple(tokens), sampling, arrival_s=self.service.now_s())
        arrivals, num_tokens, finish = [], 0, None
        try:
            async for update in self.service.stream(request):
                if update.delta.sampled:
                    arrivals.append(time.perf_counter())
                    num_tokens += len(update.delta.sampled)
                finish = update.finish or finish
        except JdisaggError as error:
            return Sample(sent_s, error=f"{type(error).__name__}: {error}", ended_s=time.perf_counter())
        if finish is None or finish.reason not in (FinishReason.LENGTH, FinishReason.STOP):
            return Sample(sent_s, error=f"ended as {finish and finish.reason}: {finish and finish.detail}")
        ended_s = time.perf_counter()
        return Sample(sent_s, tuple(arrivals), ended_s, len(tokens), num_tokens, finish.ledger.parts_ns())
