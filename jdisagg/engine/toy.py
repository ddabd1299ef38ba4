"""An executor without arithmetic worth the name, for tests and simulation: no JAX, no arrays, no time.

Its "KV" is the tokens themselves, kept a page slot each in every layer group, and a token is drawn as a hash of all
tokens read back through the pages of all groups. So a page that is wrong, stale, foreign or not yet there, be it in one
group alone, gives a wrong token, and `toy_output` says which tokens are right.
Prefill and decode draw alike, as a model does: a sequence prefilled again goes on where it was.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from jdisagg.core.events import DecodeDone, PrefillDone
from jdisagg.core.kv_layout import NULL_PAGE
from jdisagg.core.plans import Admission, DecodePlan, KVTransfer, PrefillChunk, PrefillPlan
from jdisagg.core.request import Sampled, SamplingParams
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.executor import GroupDone, PendingDecode
from jdisagg.engine.gates import Gates, Stages

VOCAB = 97
NOTHING = -1  # what a page slot holds that nobody wrote


class ToyFault(Exception):
    """Raised by an executor that was told to fail at a plan."""


def next_token(tokens: list[int], sampling: SamplingParams, num_output: int) -> int:
    """The token after `tokens`, of which `num_output` are output: a polynomial hash, stops masked before min_tokens."""
    state = 17
    for token in tokens:
        state = (state * 31 + token + 2) % 2147483647
    token = state * 13 % VOCAB
    while num_output < sampling.min_tokens and token in sampling.stop_token_ids:
        token = (token + 1) % VOCAB
    return token


def toy_output(prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    """The whole output of a request, its stop token included: the definition."""
    output: list[int] = []
    while len(output) < sampling.max_tokens:
        output.append(next_token([*prompt, *output], sampling, len(output)))
        if output[-1] in sampling.stop_token_ids:
            break
    return output


@dataclass(slots=True)
class ToySlot:
    """A decode slot as the device knows it."""

    token: int  # fed next
    position: int
    table: list[int]
    sampling: SamplingParams
    num_output: int
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class ToyPrefill:
    result: PrefillDone

    def read(self) -> PrefillDone:
        return self.result


@dataclass(frozen=True, slots=True)
class ToyDecode:
    result: DecodeDone

    def read(self) -> DecodeDone:
        return self.result


def digest_of(contents: tuple[tuple[tuple[int, ...], ...], ...]) -> int:
    return zlib.crc32(repr(contents).encode())


@dataclass(frozen=True, slots=True)
class ToyShipment:
    transfer: KVTransfer
    contents: tuple[tuple[tuple[int, ...], ...], ...]  # of each of its layer groups, the pages
    digest: int  # of the contents when they were packed

    def wait_packed(self) -> None:
        return

    def wait(self) -> None:
        """Toy bytes are there at once; a driver of virtual time prices their way."""
        return

    def intact(self) -> bool:
        return digest_of(self.contents) == self.digest

    def flipped(self) -> ToyShipment:
        """As it is after one bit of it changed on the way."""
        (first, *tokens), *pages = self.contents[-1]
        changed = ((first ^ 1, *tokens), *pages)
        return replace(self, contents=(*self.contents[:-1], changed))


class ToyExecutor:
    """Implements `Executor`. Plans whose ids are in `fail_plans` raise before they change anything."""

    def __init__(self, config: WorkerConfig, fail_plans: Collection[int] = ()) -> None:
        self.config, self.fail_plans = config, fail_plans
        self.layer_groups = config.layer_groups or ((0, 1),)
        self.groups = [[[NOTHING] * config.page_size for _ in range(config.num_pages + 1)] for _ in self.layer_groups]
        self.slots: dict[int, ToySlot] = {}
        self.gates = Gates()

    @property
    def num_layers(self) -> int:
        return self.layer_groups[-1][1]

    @property
    def pages(self) -> list[list[int]]:
        """Of the first layer group: token slots by page id."""
        return self.groups[0]

    # ------------------------------------------------------------ prefill

    def run_prefill(self, plan: PrefillPlan, group_done: GroupDone | None = None) -> ToyPrefill:
        self._check_sizes(plan)
        for group, (_, stop) in zip(self.groups, self.layer_groups, strict=True):
            for chunk in plan.chunks:
                for position, token in enumerate(chunk.tokens, chunk.start):
                    self._write(group, chunk.pages, position, token)
            if group_done is not None and group is not self.groups[-1]:
                group_done(stop)
        sampled = tuple((chunk.request_id, self._first(chunk)) for chunk in plan.chunks if chunk.last)
        scored = tuple((chunk.request_id, _scores(chunk)) for chunk in plan.chunks if _asked(chunk))
        return ToyPrefill(PrefillDone(plan.plan_id, sampled, scored))

    def _check_sizes(self, plan: PrefillPlan) -> None:
        self._maybe_fail(plan.plan_id)
        config = self.config
        assert plan.bucket_tokens in config.prefill_buckets and plan.num_tokens <= plan.bucket_tokens
        assert plan.table_pages in config.table_buckets and len(plan.chunks) <= config.max_chunk_seqs
        for chunk in plan.chunks:
            assert len(chunk.pages) == config.pages_for(chunk.start + len(chunk.tokens)) <= plan.table_pages

    def _first(self, chunk: PrefillChunk) -> Sampled:
        tokens = self._read(chunk.pages, chunk.start + len(chunk.tokens))
        return Sampled(next_token(tokens, chunk.sampling, chunk.num_output))

    # ------------------------------------------------------------ decode

    def run_decode(self, plan: DecodePlan) -> PendingDecode:
        self._maybe_fail(plan.plan_id)
        return self.gates.run(plan.gates, self._step(plan))

    def open_gates(self, handoff: str, epoch: int) -> None:
        self.gates.open(handoff, epoch)

    def _step(self, plan: DecodePlan) -> Stages[ToyDecode]:
        """A stage writes and reads the pages of its layer group."""
        self._take(plan)
        rows = {slot: row for slot in plan.active if not (row := self.slots[slot]).stopped}
        seen: dict[int, list[list[int]]] = {slot: [] for slot in rows}
        for stage, group in enumerate(self.groups):
            yield stage
            for slot, row in rows.items():
                self._write(group, row.table, row.position, row.token)
                seen[slot].append(self._row(group, row.table, row.position + 1))
        drawn = {slot: _advance(row, _agreed(seen[slot])) for slot, row in rows.items()}
        return ToyDecode(DecodeDone(plan.plan_id, tuple((slot, drawn.get(slot)) for slot in plan.active)))

    def _take(self, plan: DecodePlan) -> None:
        slots_each = self.config.slots_per_microbatch
        for slot in plan.retire:
            self.slots.pop(slot, None)  # a slot whose admission failed is retired all the same
        for admission in plan.admit:
            self._admit(admission)
        for grant in plan.grants:
            assert grant.slot in plan.active and grant.index == len(self.slots[grant.slot].table)
            self.slots[grant.slot].table.append(grant.page)
        assert all(slot // slots_each == plan.microbatch for slot in plan.active)
        assert plan.table_pages in self.config.table_buckets
        for row in (self.slots[slot] for slot in plan.active):
            assert row.stopped or self.config.pages_for(row.position + 1) <= plan.table_pages, "the table is too narrow"

    def _admit(self, admission: Admission) -> None:
        assert admission.slot not in self.slots, f"slot {admission.slot} was not retired"
        self.slots[admission.slot] = ToySlot(
            admission.token, admission.position, list(admission.pages), admission.sampling, admission.num_output
        )

    # ------------------------------------------------------------ pages

    def ship(self, transfer: KVTransfer, destination: ToyExecutor) -> ToyShipment:
        groups = self._groups_of(transfer)
        contents = tuple(tuple(tuple(each[page]) for page in transfer.source_pages) for each in groups)
        return ToyShipment(transfer, contents, digest_of(contents))

    def check(self, shipment: ToyShipment) -> Callable[[], bool]:
        return shipment.intact

    def insert(self, shipment: ToyShipment) -> None:
        for group, contents in zip(self._groups_of(shipment.transfer), shipment.contents, strict=True):
            tokens, size = [token for page in contents for token in page], self.config.page_size
            tokens += [NOTHING] * (-len(tokens) % size)
            for index, page in enumerate(shipment.transfer.destination_pages):
                if page != NULL_PAGE:
                    group[page] = tokens[index * size : (index + 1) * size]
        self.gates.inserted(shipment.transfer)

    def _groups_of(self, transfer: KVTransfer) -> list[list[list[int]]]:
        first, stop = transfer.layers or (0, self.layer_groups[-1][1])
        pairs = zip(self.groups, self.layer_groups, strict=True)
        return [group for group, layers in pairs if first <= layers[0] and layers[1] <= stop]

    def _write(self, group: list[list[int]], table: Sequence[int], position: int, token: int) -> None:
        page = table[position // self.config.page_size]
        assert page != NULL_PAGE, "the null page belongs to nobody"
        group[page][position % self.config.page_size] = token

    def _read(self, table: Sequence[int], num_tokens: int) -> list[int]:
        return _agreed([self._row(group, table, num_tokens) for group in self.groups])

    def _row(self, group: list[list[int]], table: Sequence[int], num_tokens: int) -> list[int]:
        return [token for page in table[: self.config.pages_for(num_tokens)] for token in group[page]][:num_tokens]

    def _maybe_fail(self, plan_id: int) -> None:
        if plan_id in self.fail_plans:
            raise ToyFault(f"told to fail at plan {plan_id}")


def _agreed(rows: list[list[int]]) -> list[int]:
    """The tokens that all groups agree on; NOTHING where one of them holds another."""
    return [seen[0] if len(set(seen)) == 1 else NOTHING for seen in zip(*rows, strict=True)]


def _advance(row: ToySlot, tokens: list[int]) -> Sampled:
    """Draws the slot's next token after `tokens`."""
    row.position += 1
    row.token = next_token(tokens, row.sampling, row.num_output)
    row.num_output += 1
    row.stopped = row.token in row.sampling.stop_token_ids
    return Sampled(row.token)


def _asked(chunk: PrefillChunk) -> bool:
    return chunk.sampling.prompt_logprobs is not None


def _scores(chunk: PrefillChunk) -> tuple[Sampled, ...]:
    """One entry a prompt token that has a predecessor."""
    tokens = chunk.tokens if chunk.start else chunk.tokens[1:]
    return tuple(Sampled(token, 0.0) for token in tokens)
