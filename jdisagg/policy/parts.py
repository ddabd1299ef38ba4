"""How a prompt's KV is cut into parts: which pages and layers may leave after a chunk. Pure arithmetic.

A page may leave when no later chunk writes to it. Pages that the destination holds already never leave.
"""

from __future__ import annotations

from typing import NamedTuple

from jdisagg.core.worker_config import TransferMode, WorkerConfig


class Piece(NamedTuple):
    """Pages `start` to `stop` of a sequence (places in its page list, not ids), of some layers."""

    start: int
    stop: int
    layers: tuple[int, int] | None  # None: all

    def num_tokens(self, total: int, page_size: int) -> int:
        """Whose KV these pages hold, of a sequence of `total` tokens."""
        return min(self.stop * page_size, total) - self.start * page_size


def pieces(
    mode: TransferMode, config: WorkerConfig, sent_pages: int, computed: int, total: int, group_pages: int = 1
) -> tuple[Piece, ...]:
    """What leaves once `computed` of `total` prompt tokens are computed and `sent_pages` leading pages are away.

    `mode` is WHOLE, CHUNK or LAYER; pieces of one chunk are in the order in which their layers are computed. Pages
    leave `group_pages` at a time, but for the sequence's last, so that they fill whole pages of the destination.
    """
    last = computed == total
    stop = config.pages_for(total) if last else computed // config.page_size // group_pages * group_pages
    if stop <= sent_pages or (mode is TransferMode.WHOLE and not last):
        return ()
    return tuple(Piece(sent_pages, stop, layers) for layers in layers_of(mode, config) or (None,))


def layers_of(mode: TransferMode, config: WorkerConfig) -> tuple[tuple[int, int], ...]:
    """Of the pieces of one chunk, in their order; (): one piece holds all."""
    return config.layer_groups if mode is TransferMode.LAYER and len(config.layer_groups) > 1 else ()
