"""Which words go from whom to whom, and what their numbers can be: checked where a word comes from another process.

Pure arithmetic over the message and the two workers' sizes. What a word is about (is there such a handoff still, is it
that worker's) only its actor knows, and drops what it does not know.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jdisagg.core.errors import ConfigError, SenselessWord
from jdisagg.core.messages import (
    MOST_HOLDERS,
    PAGE_NAME_BYTES,
    PAGES_A_WORD,
    Abort,
    AbortAck,
    Ack,
    Adopt,
    Ask,
    CacheChanged,
    CacheHeld,
    CacheWanted,
    Commit,
    Drawn,
    Ended,
    FetchPages,
    Holder,
    Joined,
    Kept,
    Leave,
    Left,
    Message,
    NoPages,
    Preempted,
    Priced,
    Progress,
    Refused,
    Renew,
    Resend,
    Reserve,
    Reserved,
    StartPrefill,
    View,
    Withdraw,
)
from jdisagg.core.request import Attempt, Sampled
from jdisagg.core.steps import KVTransfer
from jdisagg.core.worker_config import MOST, WorkerConfig

TO_ROUTER = (
    *(Reserved, Refused, Abort, AbortAck, Progress, Drawn, Ended, Preempted, View, CacheHeld, CacheChanged),
    *(Left, Joined, Kept, Priced),
)
FROM_ROUTER = (Reserve, StartPrefill, Abort, AbortAck, CacheWanted, Leave, Adopt)
FROM_PREFILL = (Commit, Renew)  # to the worker that decodes
FROM_DECODE = (Ack, Resend)  # and back
EITHER_WAY = (Abort, AbortAck, FetchPages, NoPages)
FROM_FRONT = (Ask, Withdraw)  # to the router, by a link that is no worker's
LARGEST_TOKEN = (1 << 31) - 1
MOST_LAYERS = 1 << 10
MOST_LINES = 1 << 12  # of prices


def check_word(message: Message, sender: WorkerConfig | None, to: WorkerConfig | None) -> None:
    """Raises SenselessWord unless `sender` may say this to `to`; None is the router."""
    if not isinstance(message, _words_between(sender, to)):
        raise _senseless(message, f"is not for {_name(sender)} to say to {_name(to)}")
    for name, value in _numbers_of(message):
        if not 0 <= value < math.inf:
            raise _senseless(message, f"{name} is {value}")
    match message:
        case Reserved() if sender is not None:
            _check_reservation(message, sender)
        case View() if sender is not None and message.free_pages > sender.num_pages:
            raise _senseless(message, f"free_pages is {message.free_pages} of {sender.num_pages}")
        case Drawn(deltas):
            for delta in deltas:
                _check_sampled(message, (*delta.sampled, *delta.prompt))
                _check_most(message, "index", delta.index)
        case Preempted(output=output):
            _check_tokens(message, output)
        case Commit():
            _check_commit(message)
        case CacheHeld() | CacheChanged() if sender is not None:
            _check_cache(message, sender)
        case Priced():
            _check_prices(message)
        case FetchPages() if to is not None:
            _check_kept(message, message.names, to.max_model_len // to.page_size)
        case Joined(config=config) if sender is not None:
            _check_joined(message, config, sender)
        case Reserve() if to is not None:
            _check_length(message, message.prompt_tokens, to)
            _check_names(message, to)
            _check_holders(message, message.holders)
        case StartPrefill(request=request) if to is not None:
            _check_length(message, request.prompt_tokens, to)
            if not to.computes_prompts:
                raise _senseless(message, f"is not for {_name(to)}, which computes no prompts")
            _check_tokens(message, request.prompt)
            if not all(0 <= page <= MOST for page in message.decode_pages):
                raise _senseless(message, f"decode_pages are {message.decode_pages[:3]}")
            if message.tail_tokens > request.prompt_tokens:
                raise _senseless(message, f"tail_tokens is {message.tail_tokens} of {request.prompt_tokens}")
            _check_holders(message, message.holders)
        case _:
            return


def check_transfer(transfer: KVTransfer, sender: WorkerConfig, to: WorkerConfig) -> None:
    """Raises SenselessWord unless this part may go from `sender` to `to`."""
    if (transfer.source, transfer.destination) != (sender.worker, to.worker):
        names = f"from {transfer.source!r} to {transfer.destination!r}"
        raise _senseless(transfer, f"is {names}, and comes from {sender.worker!r} to {to.worker!r}")
    if not (sender.role.prefills and to.role.decodes):
        raise _senseless(transfer, f"is not for {_name(sender)} to send to {_name(to)}")
    for name, value in _numbers_of(transfer):
        if value < 0:
            raise _senseless(transfer, f"{name} is {value}")
    for name, pages, most in (
        ("source_pages", transfer.source_pages, sender.num_pages),
        ("destination_pages", transfer.destination_pages, to.num_pages),
    ):
        if pages and not 0 <= min(pages) <= max(pages) <= most:
            raise _senseless(transfer, f"{name} are {min(pages)} to {max(pages)}, there are {most}")
    if transfer.layers is not None and not 0 <= transfer.layers[0] < transfer.layers[1] <= MOST_LAYERS:
        raise _senseless(transfer, f"layers are {transfer.layers}")
    if transfer.wire not in sender.wires:
        raise _senseless(transfer, f"wire is {transfer.wire[:40]!r}, known are {', '.join(sender.wires)}")


def _words_between(sender: WorkerConfig | None, to: WorkerConfig | None) -> tuple[type, ...]:
    if to is None:
        return TO_ROUTER if sender is not None else ()
    if sender is None:
        return FROM_ROUTER
    words: tuple[type, ...] = EITHER_WAY
    if sender.role.prefills and to.role.decodes:
        words += FROM_PREFILL
    if sender.role.decodes and to.role.prefills:
        words += FROM_DECODE
    return words


def _numbers_of(word: Any) -> Iterable[tuple[str, float]]:
    """Its own numbers, in order, and its attempt's; those of what else it carries are not counted."""
    for each in dataclasses.fields(word):
        value = getattr(word, each.name)
        if type(value) in (int, float):
            yield each.name, value
        elif isinstance(value, Attempt):
            yield "epoch", value.epoch


def _check_reservation(message: Reserved, sender: WorkerConfig) -> None:
    _check_pages(message, message.pages, message.cached_pages, sender)
    if message.page_size not in (0, sender.page_size):
        raise _senseless(message, f"page_size {message.page_size} where {sender.page_size} was said at the joining")


def _check_pages(message: Message, pages: tuple[int, ...], cached: int, sender: WorkerConfig) -> None:
    if not pages or len(set(pages)) != len(pages) or not 1 <= min(pages) <= max(pages) <= sender.num_pages:
        raise _senseless(message, f"{len(pages)} pages that are not all apart and among 1 to {sender.num_pages}")
    if cached > len(pages):
        raise _senseless(message, f"cached_pages is {cached} of {len(pages)}")


def _check_joined(message: Joined, config: WorkerConfig, sender: WorkerConfig) -> None:
    """What a worker has become: a worker of the same name, of sizes that can be."""
    if config.worker != sender.worker:
        raise _senseless(message, f"is of {config.worker!r}, and comes from {sender.worker!r}")
    try:
        config.check()
    except ConfigError as error:
        raise _senseless(message, str(error)) from error


def _check_length(message: Message, prompt_tokens: int, to: WorkerConfig) -> None:
    if not 0 < prompt_tokens <= to.max_model_len:
        raise _senseless(message, f"a prompt of {prompt_tokens} tokens, the limit is {to.max_model_len}")


def _check_names(message: Reserve, to: WorkerConfig) -> None:
    """All full pages are named, or none."""
    pages, size = message.prompt_tokens // to.page_size, len(message.page_names)
    if size not in (0, pages * PAGE_NAME_BYTES):
        raise _senseless(message, f"page_names are {size} bytes, {pages} pages have {pages * PAGE_NAME_BYTES}")


def _check_holders(message: Message, holders: tuple[Holder, ...]) -> None:
    if len(holders) > MOST_HOLDERS or not all(0 <= each.first < each.stop <= MOST for each in holders):
        raise _senseless(message, f"{len(holders)} holders, of which the first are {holders[:2]}")


def _check_cache(message: CacheHeld | CacheChanged, sender: WorkerConfig) -> None:
    pages = sender.pages_of(message.tier)
    if isinstance(message, CacheChanged):
        for names in (message.added, message.removed):
            _check_kept(message, names, pages)
        return
    _check_kept(message, message.names, min(PAGES_A_WORD, pages))
    if not message.part < message.num_parts <= 1 + pages // PAGES_A_WORD:
        raise _senseless(message, f"part {message.part} of {message.num_parts}")


def _check_prices(message: Priced) -> None:
    numbers = [each for _, *seconds in message.lines for each in seconds]
    if len(message.lines) > MOST_LINES or not all(0 <= each < math.inf for each in numbers):
        raise _senseless(message, f"{len(message.lines)} prices, of which the first are {message.lines[:2]}")


def _check_kept(message: Message, names: bytes, most: int) -> None:
    if len(names) % PAGE_NAME_BYTES or len(names) > most * PAGE_NAME_BYTES:
        raise _senseless(message, f"names are {len(names)} bytes, of at most {most} pages of {PAGE_NAME_BYTES}")


def _check_commit(message: Commit) -> None:
    _check_sampled(message, (message.first,))
    _check_tokens(message, message.tail)
    if len(message.tail) > message.num_tokens:
        raise _senseless(message, f"a tail of {len(message.tail)} tokens of {message.num_tokens}")
    _check_most(message, "num_tokens", message.num_tokens)
    if message.num_parts > message.num_tokens * max(1, len(message.layers)):
        raise _senseless(message, f"{message.num_parts} parts of {message.num_tokens} tokens")
    if len(message.layers) > MOST_LAYERS or not all(0 <= a < b <= MOST_LAYERS for a, b in message.layers):
        raise _senseless(message, f"layers are {message.layers[:3]}, of {len(message.layers)}")


def _check_sampled(message: Message, sampled: Sequence[Sampled]) -> None:
    _check_tokens(message, [each.token for each in sampled])
    for each in sampled:
        if each.logprob is not None and any(map(math.isnan, (each.logprob, *(logprob for _, logprob in each.top)))):
            raise _senseless(message, f"a log-probability of token {each.token} is no number")


def _check_tokens(message: Message, tokens: Iterable[int]) -> None:
    wrong = next((token for token in tokens if not 0 <= token <= LARGEST_TOKEN), None)
    if wrong is not None:
        raise _senseless(message, f"{wrong} is no token")


def _check_most(message: Message, name: str, value: int) -> None:
    if not 0 <= value <= MOST:
        raise _senseless(message, f"{name} is {value}, must lie in [0, {MOST}]")


def _name(worker: WorkerConfig | None) -> str:
    return "the router" if worker is None else f"{worker.worker} ({worker.role})"


def _senseless(word: Any, why: str) -> SenselessWord:
    return SenselessWord(f"{type(word).__name__}: {why}")
