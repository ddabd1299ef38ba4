"""How a prompt's KV leaves its prefill worker: in which parts, as which wire, and again where one was lost."""

from __future__ import annotations

from dataclasses import replace

from jdisagg.core.events import ShipKV
from jdisagg.core.messages import Commit
from jdisagg.core.request import Sampled
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import RAW, Role, TransferMode, WorkerConfig
from jdisagg.policy.compression import Wires
from jdisagg.policy.handoff import Signal, State
from jdisagg.policy.outbox import Outbox
from jdisagg.policy.page_pool import PageState
from jdisagg.policy.parts import Piece, layers_of, pieces
from jdisagg.policy.prefill_sequence import PrefillSequence, is_here
from jdisagg.policy.shared_pages import SharedPages
from jdisagg.policy.streaming import Streaming


class PartShipping:
    """The parts of all prompts of one worker, and what shipping them is found to cost."""

    def __init__(self, config: WorkerConfig, shared: SharedPages, out: Outbox) -> None:
        self.config, self.shared, self.out = config, shared, out
        auto = config.role is Role.PREFILL and config.transfer is TransferMode.AUTO
        self.streaming = Streaming(config) if auto else None
        self.wires = Wires(config)

    def mode(self, prompt: PrefillSequence) -> TransferMode:
        """How this prompt's KV leaves; one that ends with its first token ships nothing before that is known."""
        if is_here(prompt, self.config) or prompt.request.sampling.max_tokens == 1:
            return TransferMode.WHOLE
        if self.streaming is None:
            return self.config.transfer
        return self.streaming.mode(len(prompt.request.prompt))

    def cut(self, prompt: PrefillSequence) -> list[KVTransfer]:
        """The parts that may leave now that `planned` tokens are dispatched; they are booked as on their way."""
        total = len(prompt.request.prompt)
        cut = pieces(prompt.mode, self.config, prompt.sent_pages, prompt.planned, total, prompt.group.source)
        if not cut:
            return []
        prompt.handoff.take(Signal.SHIP)
        first_own = max(prompt.sent_pages, len(prompt.held.pages))
        self.shared.pool.move(prompt.pages[first_own : cut[-1].stop], prompt.owner, PageState.IN_FLIGHT)
        prompt.sent_pages = cut[-1].stop
        parts = [self._part(prompt, piece, len(prompt.parts) + index) for index, piece in enumerate(cut)]
        prompt.parts += parts
        return parts

    def _part(self, prompt: PrefillSequence, piece: Piece, index: int) -> KVTransfer:
        return KVTransfer(
            attempt=prompt.owner,
            source=self.config.worker,
            destination=prompt.decode_worker,
            source_pages=prompt.pages[piece.start : piece.stop],
            destination_pages=prompt.pages_there(piece, self.config.page_size),
            num_tokens=piece.num_tokens(len(prompt.request.prompt), self.config.page_size),
            part=index,
            layers=piece.layers,
            wire=self.wires.choose(),
        )

    def manifest(self, prompt: PrefillSequence, first: Sampled) -> Commit:
        """What was shipped in all, and what else the destination needs."""
        return Commit(
            attempt=prompt.owner,
            first=first,
            num_tokens=prompt.request.prompt_tokens,
            num_parts=len(prompt.parts),
            layout=self.config.kv_layout,
            layers=layers_of(prompt.mode, self.config),
            tail=prompt.tail,
        )

    def commit(self, prompt: PrefillSequence, first: Sampled, now_s: float) -> None:
        """Says what was shipped; then the destination is waited for."""
        prompt.handoff.take(Signal.COMMIT)
        self.out.send(prompt.decode_worker, self.manifest(prompt, first))
        prompt.handoff.deadline_s = now_s + self.config.ack_timeout_s
        self.out.arm(prompt.handoff)

    def acknowledged(self, parts: list[KVTransfer], wire_s: float) -> None:
        """All parts of a prompt are in their pages; what they took counts where none was shipped twice."""
        if any(part.resends for part in parts):
            return
        self.wires.shipped(parts, wire_s)
        if self.streaming is not None:
            pages = {page for part in parts for page in part.source_pages}
            self.streaming.shipped(len(parts), len(pages), wire_s)

    def may_reship(self, prompt: PrefillSequence, part: int) -> bool:
        """Whether the part left, and has not failed too often."""
        return part < len(prompt.parts) and prompt.parts[part].resends < self.config.part_tries

    def reship(self, prompt: PrefillSequence, part: int, now_s: float) -> None:
        """Ships a part again: its pages are held until all of them are acknowledged. What lost too much comes raw."""
        if part >= len(prompt.parts):
            return  # it never left
        again = replace(prompt.parts[part], resends=prompt.parts[part].resends + 1, wire=RAW)
        prompt.parts[part] = again
        self.out.put(ShipKV(again))
        if prompt.handoff.state is State.SHIPPED:
            prompt.handoff.deadline_s = now_s + self.config.ack_timeout_s

    # ------------------------------------------------------------ steps, as `auto` times them

    def step_dispatched(self, step_id: int, tokens: int, now_s: float) -> None:
        if self.streaming is not None:
            self.streaming.dispatched(step_id, tokens, now_s)

    def step_done(self, step_id: int, now_s: float) -> None:
        if self.streaming is not None:
            self.streaming.done(step_id, now_s)

    def step_failed(self, step_id: int) -> None:
        if self.streaming is not None:
            self.streaming.failed(step_id)
