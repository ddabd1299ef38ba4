"""What a simulated cluster's prefix caches were asked for and had, pool by pool, read off the words of its actors."""

from __future__ import annotations

from collections.abc import Sequence

from jdisagg.core.events import Send
from jdisagg.core.messages import Progress, StartPrefill
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import Role, WorkerConfig
from jdisagg.sim.outcome import Lookups


class PrefixLookups:
    """A prompt is looked up where it is computed, and where it is decoded if that is another worker."""

    def __init__(self, workers: Sequence[WorkerConfig]) -> None:
        self._roles = {config.worker: config.role for config in workers if config.prefix_caching}
        self.by_role = {role: Lookups() for role in Role if role in self._roles.values()}

    def said(self, actor: WorkerId, effect: Send) -> None:
        """Of every word that may tell of a prompt's beginning; others are of no concern."""
        message = effect.message
        if isinstance(message, Progress):
            self._found(actor, message.cached_tokens)
        elif isinstance(message, StartPrefill):
            tokens = len(message.request.prompt)
            self._looked_up(effect.to, tokens)
            if message.decode_worker != effect.to:
                self._looked_up(message.decode_worker, tokens)
                self._found(message.decode_worker, message.cached_pages * message.decode_page_size)

    def _looked_up(self, worker: WorkerId, tokens: int) -> None:
        if worker in self._roles:
            self.by_role[self._roles[worker]].looked_up += tokens

    def _found(self, worker: WorkerId, tokens: int) -> None:
        if worker in self._roles:
            self.by_role[self._roles[worker]].found += tokens
