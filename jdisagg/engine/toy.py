"""A toy executor without arithmetic worth the name, for tests and simulation: no JAX, no time.

Its "KV" is the tokens themselves, one per token slot of a page, in every layer group. A token is sampled as a hash of
all tokens read back through the pages of all groups. A page that is wrong, stale, foreign or not yet arrived, even in
one group alone, gives a wrong token; `toy_output` gives the right ones. Prefill and decode sample alike, as a model
does: a sequence prefilled again continues where it was.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jdisagg.core.events import StepDone
from jdisagg.core.layout.kv_layout import NULL_PAGE
from jdisagg.core.request import POOLED_ONE, Attempt, Sampled, SamplingParams
from jdisagg.core.steps import GRAMMAR, NGRAM, Admission, DecodeRows, KVTransfer, PrefillChunk, PrefillChunks, StepPlan
from jdisagg.core.tiers import PageMove
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.executor import GroupDone, PendingStep
from jdisagg.engine.runner import GatedSteps, StagedStep

VOCAB = 97
NOTHING = -1  # content of a token slot that was never written
TOKEN_BYTES = 8  # bytes per token in a record
ADAPTER_BITS = 16  # bits of the token in a token slot; the adapter's digest is above them


class ToyError(Exception):
    """Raised by an executor that was told to fail at a plan."""


def next_token(tokens: list[int], sampling: SamplingParams, num_output: int) -> int:
    """Returns the token after `tokens`, of which `num_output` are output: a polynomial hash, stops masked before
    min_tokens. Every grammar allows even tokens only."""
    state = 17
    for token in tokens:
        state = (state * 31 + token + 2) % 2147483647
    token = state * 13 % VOCAB
    while num_output < sampling.min_tokens and token in sampling.stop_token_ids:
        token = (token + 1) % VOCAB
    return token - token % 2 if sampling.grammar else token


def marked(token: int, sampling: SamplingParams) -> int:
    """Returns a token's KV with an adapter's mark, so that a page of another adapter gives a wrong token."""
    adapter = sampling.adapter
    return token if adapter is None else token ^ zlib.crc32(adapter.digest.encode()) << ADAPTER_BITS


def toy_output(prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    """Returns the whole output of a request by definition, its stop token included."""
    output: list[int] = []
    while len(output) < sampling.max_tokens:
        seen = [marked(token, sampling) for token in (*prompt, *output)]
        output.append(next_token(seen, sampling, len(output)))
        if output[-1] in sampling.stop_token_ids:
            break
    return output


@dataclass(slots=True)
class ToySlot:
    """A decode slot as the device knows it."""

    token: int  # the token fed next
    position: int
    table: list[int]
    sampling: SamplingParams
    num_output: int
    recalled: list[int]  # output tokens that the host has reported
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class ToyStep:
    result: StepDone

    def read(self) -> StepDone:
        return self.result


@dataclass(frozen=True, slots=True)
class ToyPages:
    records: np.ndarray

    def read(self) -> tuple[np.ndarray, bool]:
        return self.records, True


def digest_of(contents: tuple[tuple[tuple[int, ...], ...], ...]) -> int:
    return zlib.crc32(repr(contents).encode())


@dataclass(frozen=True, slots=True)
class ToyShipment:
    transfer: KVTransfer
    contents: tuple[tuple[tuple[int, ...], ...], ...]  # pages per layer group
    digest: int  # digest of the contents at packing

    def wait_packed(self) -> None:
        return

    def wait(self) -> None:
        """Returns at once; a driver of virtual time adds the transfer time."""
        return

    def intact(self) -> bool:
        return digest_of(self.contents) == self.digest

    def flipped(self) -> ToyShipment:
        """Returns the shipment with one bit changed, as by a fault in transfer."""
        (first, *tokens), *pages = self.contents[-1]
        changed = ((first ^ 1, *tokens), *pages)
        return replace(self, contents=(*self.contents[:-1], changed))


class ToyExecutor:
    """A toy executor that implements `Executor`. Plans whose ids are in `fail_plans` raise before they change
    anything."""

    law = staticmethod(next_token)  # the function that samples

    def __init__(self, config: WorkerConfig, fail_plans: Collection[int] = ()) -> None:
        self.config, self.fail_plans = config, fail_plans
        self.layer_groups = config.layer_groups or ((0, 1),)
        self.groups = [[[NOTHING] * config.page_size for _ in range(config.num_pages + 1)] for _ in self.layer_groups]
        self.slots: dict[int, ToySlot] = {}
        self.gates = GatedSteps()

    @property
    def num_layers(self) -> int:
        return self.layer_groups[-1][1]

    @property
    def pages(self) -> list[list[int]]:
        """Returns the first layer group's pages: token slots by page id."""
        return self.groups[0]

    def run(self, plan: StepPlan, group_done: GroupDone | None = None) -> PendingStep:
        if plan.step_id in self.fail_plans:
            raise ToyError(f"told to fail at plan {plan.step_id}")
        return self.gates.run(plan.decode.gates if plan.decode else (), self._stages(plan, group_done))

    def open_gates(self, attempt: Attempt) -> None:
        self.gates.open(attempt)

    def _stages(self, plan: StepPlan, group_done: GroupDone | None) -> StagedStep[ToyStep]:
        """Runs the step stage by stage; a stage writes and reads the pages of its layer group."""
        chunks = plan.prefill.chunks if plan.prefill else ()
        if plan.prefill is not None:
            self._check_sizes(plan.prefill)
        rows = self._take(plan.decode) if plan.decode else {}
        seen: dict[int, list[list[int]]] = {slot: [] for slot in rows}
        for stage, (group, (_, stop)) in enumerate(zip(self.groups, self.layer_groups, strict=True)):
            yield stage
            for slot, row in rows.items():
                self._write(group, row.table, row.position, marked(row.token, row.sampling))
                seen[slot].append(self._row(group, row.table, row.position + 1))
            for chunk in chunks:
                for position, token in enumerate(chunk.tokens, chunk.start):
                    self._write(group, chunk.pages, position, marked(token, chunk.sampling))
            if group_done is not None and group is not self.groups[-1]:
                group_done(stop)
        drawn, guessed = self._drawn(plan.decode, seen), self._guessed(plan.decode, seen)
        return ToyStep(StepDone(plan.step_id, drawn, *self._chunk_results(chunks), guessed))

    # ------------------------------------------------------------ prefill

    def _chunk_results(self, chunks: Sequence[PrefillChunk]) -> tuple[Any, Any, Any]:
        first = tuple((chunk.request_id, self._first(chunk)) for chunk in chunks if chunk.last)
        scores = tuple((chunk.request_id, _scores(chunk)) for chunk in chunks if _asked(chunk))
        pooling = [chunk for chunk in chunks if chunk.last or chunk.sampling.pooling == "mean"]
        return first, scores, tuple((each.request_id, _pooled(each)) for each in pooling if each.sampling.pooling)

    def _check_sizes(self, plan: PrefillChunks) -> None:
        config = self.config
        assert plan.bucket_tokens in config.prefill_buckets and plan.num_tokens <= plan.bucket_tokens
        assert plan.table_pages in config.table_buckets and len(plan.chunks) <= config.max_chunk_seqs
        for chunk in plan.chunks:
            assert len(chunk.pages) == config.pages_for(chunk.start + len(chunk.tokens)) <= plan.table_pages

    def _first(self, chunk: PrefillChunk) -> Sampled:
        tokens = self._read(chunk.pages, chunk.start + len(chunk.tokens))
        _check_recalled(chunk.sampling, chunk.history.output, tokens, chunk.num_output)
        return Sampled(self.law(tokens, chunk.sampling, chunk.num_output))

    # ------------------------------------------------------------ decode

    def _drawn(
        self, rows: DecodeRows | None, seen: dict[int, list[list[int]]]
    ) -> tuple[tuple[int, tuple[Sampled, ...] | None], ...]:
        """Samples per row; rows with a width above 1 sample one token per step, or accept as many of a draft as their
        position says."""
        if rows is None:
            return ()
        widths = rows.widths or (1,) * len(rows.active)
        return tuple(
            (slot, self._draw(self.slots[slot], _agreed(seen[slot]), width, rows.turns) if slot in seen else None)
            for slot, width in zip(rows.active, widths, strict=True)
        )

    def _guessed(self, rows: DecodeRows | None, seen: Collection[int]) -> tuple[tuple[int, str, int], ...]:
        """Returns the drafts of the step; a row's draft is as long as its width allows."""
        if rows is None or rows.turns:
            return ()
        wide = [(slot, width) for slot, width in zip(rows.active, rows.widths, strict=False) if width > 1]
        return tuple((slot, self._guesser(slot), width - 1) for slot, width in wide if slot in seen)

    def _guesser(self, slot: int) -> str:
        return GRAMMAR if self.slots[slot].sampling.grammar else NGRAM

    def _draw(self, row: ToySlot, tokens: list[int], width: int, turns: bool) -> tuple[Sampled, ...]:
        _check_recalled(row.sampling, row.recalled, tokens, row.num_output)
        drawn = [_advance(row, tokens, self.law)]
        for _ in range(width - 1 if turns else row.position % width):
            if row.stopped:
                break
            for group in self.groups:
                self._write(group, row.table, row.position, marked(row.token, row.sampling))
            drawn.append(_advance(row, self._read(row.table, row.position + 1), self.law))
        return tuple(drawn)

    def _take(self, plan: DecodeRows) -> dict[int, ToySlot]:
        """Writes the rows' changes into the slots; returns those that draw, by slot."""
        slots_each = self.config.slots_per_microbatch
        for slot in plan.retire:
            self.slots.pop(slot, None)  # a slot whose admission failed is retired too
        for admission in plan.admit:
            self._admit(admission)
        for read in plan.read:
            self.slots[read.slot].recalled += read.tokens
        for grant in plan.grants:
            assert grant.slot in plan.active and grant.index == len(self.slots[grant.slot].table)
            self.slots[grant.slot].table.append(grant.page)
        assert all(slot // slots_each == plan.microbatch for slot in plan.active)
        assert plan.table_pages in self.config.table_buckets
        for row in (self.slots[slot] for slot in plan.active):
            assert row.stopped or self.config.pages_for(row.position + 1) <= plan.table_pages, "the table is too narrow"
        return {slot: row for slot in plan.active if not (row := self.slots[slot]).stopped}

    def _admit(self, admission: Admission) -> None:
        assert admission.slot not in self.slots, f"slot {admission.slot} was not retired"
        self.slots[admission.slot] = ToySlot(
            admission.token,
            admission.position,
            list(admission.pages),
            admission.sampling,
            admission.num_output,
            list(admission.history.output),
        )

    # ------------------------------------------------------------ pages

    def ship(self, transfer: KVTransfer, destination: ToyExecutor) -> ToyShipment:
        groups = self._groups_of(transfer)
        contents = tuple(tuple(tuple(each[page]) for page in transfer.source_pages) for each in groups)
        return ToyShipment(transfer, contents, digest_of(contents))

    @property
    def record_bytes(self) -> int:
        return len(self.groups) * self.config.page_size * TOKEN_BYTES

    def pack_pages(self, pages: Sequence[int]) -> ToyPages:
        """Packs pages as records; a record holds the tokens of a page, group by group."""
        tokens = [[token for group in self.groups for token in group[page]] for page in pages]
        return ToyPages(np.array(tokens, np.int64).reshape(len(pages), -1).view(np.uint8))

    def land_pages(self, move: PageMove, records: np.ndarray, good: Sequence[bool]) -> ToyShipment:
        """Starts records on the way to pages; pages whose record is not good are not written."""
        size, worker = self.config.page_size, self.config.worker
        tokens = np.ascontiguousarray(records).view(np.int64).reshape(len(records), len(self.groups), size).tolist()
        contents = tuple(tuple(tuple(page[at]) for page in tokens) for at in range(len(self.groups)))
        pages = tuple(page if fine else NULL_PAGE for page, fine in zip(move.destination_pages, good, strict=True))
        transfer = KVTransfer(move.owner, worker, worker, (), pages, len(pages) * size)
        return ToyShipment(transfer, contents, digest_of(contents))

    def check(self, shipment: ToyShipment) -> Callable[[], bool]:
        return shipment.intact

    def drop(self, shipment: ToyShipment) -> None:
        """Drops a shipment; toy shipments hold no device memory."""

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


def _agreed(rows: list[list[int]]) -> list[int]:
    """Returns the tokens that all groups agree on; NOTHING if one of them holds another."""
    return [seen[0] if len(set(seen)) == 1 else NOTHING for seen in zip(*rows, strict=True)]


def _advance(row: ToySlot, tokens: list[int], law: Callable[[list[int], SamplingParams, int], int]) -> Sampled:
    row.position += 1
    row.token = law(tokens, row.sampling, row.num_output)
    row.num_output += 1
    row.stopped = row.token in row.sampling.stop_token_ids
    return Sampled(row.token)


def _check_recalled(sampling: SamplingParams, recalled: Sequence[int], tokens: list[int], num_output: int) -> None:
    """Raises a `ToyError` if the output that the host knows, from which grammar masks are made, is not the sampled
    one."""
    drawn = tokens[len(tokens) - num_output :]
    if sampling.grammar and [marked(token, sampling) for token in recalled] != drawn:
        raise ToyError(f"the host knows {recalled} where {drawn} were drawn")


def _asked(chunk: PrefillChunk) -> bool:
    return chunk.sampling.prompt_logprobs is not None


def _pooled(chunk: PrefillChunk) -> tuple[int, ...]:
    """Returns the pooled state of a chunk; a token's state is its id and its position."""
    states = [(token, place) for place, token in enumerate(chunk.tokens, chunk.start)]
    taken = states if chunk.sampling.pooling == "mean" else states[-1:]
    return tuple(POOLED_ONE * sum(column) for column in zip(*taken, strict=True))


def _scores(chunk: PrefillChunk) -> tuple[Sampled, ...]:
    """Returns one score per prompt token that has a predecessor."""
    tokens = chunk.tokens if chunk.start else chunk.tokens[1:]
    return tuple(Sampled(token, 0.0) for token in tokens)
