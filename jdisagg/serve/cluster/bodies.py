"""What a body on a control link says, read and checked: whatever a peer wrote, what comes out is of the declared types.

A body is a message from worker to worker or to or from the router, a notice of KV, or a process's status
report. What makes no sense raises SenselessWord, or BadTicket, by which the link with whoever said it ends.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

from jdisagg.core.codec import decode, shown
from jdisagg.core.errors import DecodeError, SenselessWord
from jdisagg.core.messages import Ended, Message, Progress
from jdisagg.core.protocol import check_word
from jdisagg.core.request import WorkerId
from jdisagg.core.worker_config import MOST, WorkerConfig
from jdisagg.serve.cluster.remote_kv import read_notice
from jdisagg.serve.cluster.remote_pages import read_lent
from jdisagg.serve.driver.role_change import ReshapeTimes
from jdisagg.serve.observability.records import TransferStats, read_transfer_stats
from jdisagg.serve.observability.worker_metrics import Samples, read_samples


def read_word(body: dict[str, Any], sender: WorkerConfig | None, to: WorkerConfig | None) -> Message | None:
    """The message of a body, None where it is a notice of KV or of pages that are lent. Either end is None where it is
    the router."""
    if "kv" in body or "lent" in body:
        if sender is None or to is None:
            raise SenselessWord("KV goes from worker to worker, and the router is none")
        if "kv" in body:
            read_notice(body["kv"], sender, to)
        else:
            read_lent(body["lent"])
        return None
    try:
        message = decode(body.get("message"))
    except DecodeError as error:
        raise SenselessWord(str(error)) from error
    if not isinstance(message, Message):
        raise SenselessWord(f"{type(message).__name__} is no message")
    check_word(message, sender, to)
    return message


def shifted(message: Message, shift_s: float) -> Message:
    """Times of another process's clock as times of this one's."""
    return replace(message, at_s=message.at_s + shift_s) if isinstance(message, Progress | Ended) else message


def read_shift_s(record: Any) -> float:
    """What the clock of the process that says its `now_s` lacks to be ours, and the way here."""
    try:
        shift_s = time.monotonic() - float(record["now_s"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SenselessWord(f"a clock that cannot be read: {type(error).__name__}: {shown(error)}") from error
    if not math.isfinite(shift_s):
        raise SenselessWord(f"a clock that says {shown(record['now_s'])}")
    return shift_s


def read_status(status: Any) -> tuple[float, int, Samples, TransferStats, dict[WorkerId, ReshapeTimes]]:
    """Its clock's shift, its recompiles, its samples, and its workers' transfer statistics and changes of role."""
    shift_s = read_shift_s(status)
    recompiles, samples, transfer_stats = (status.get(name) for name in ("recompiles", "samples", "transfer_stats"))
    if type(recompiles) is not int or not 0 <= recompiles <= MOST:
        raise SenselessWord(f"a status of {shown(recompiles)} recompiles")
    took = read_reshape_times(status.get("reshape_times") or {})
    return shift_s, recompiles, read_samples(samples), read_transfer_stats(transfer_stats or {}), took


def read_reshape_times(record: Any) -> dict[WorkerId, ReshapeTimes]:
    """What the latest changes of a process's workers took. Raises SenselessWord."""
    try:
        return {WorkerId(str(worker)): _reshape_times(each) for worker, each in record.items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise SenselessWord(f"times of changes that cannot be read: {shown(record)}") from error


def _reshape_times(record: Any) -> ReshapeTimes:
    seconds = {name: float(record[name]) for name in ("reshard_s", "compile_s", "warm_s")}
    counts = {name: int(record[name]) for name in ("moved_bytes", "num_programs")}
    if not all(0 <= each < 1 << 62 for each in (*seconds.values(), *counts.values())):
        raise ValueError(f"{seconds} and {counts}")
    return ReshapeTimes(**seconds, **counts, read_again=tuple(str(each)[:200] for each in record["read_again"][:1000]))
