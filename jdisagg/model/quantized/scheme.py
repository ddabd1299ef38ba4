"""What a way of quantising weights is to a source: which tensors make one of the network's, and its slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jdisagg.model.names import Index
from jdisagg.model.sources import Source


class Scheme(Protocol):
    """One way of storing weights. A weight `X` + `plain` is stored as `X` + `numbers`, its scales in `X` + `beside`."""

    @property
    def label(self) -> str:
        """As a reader knows it, with bits and groups."""
        ...

    @property
    def plain(self) -> str:
        """How a weight's name ends for the network."""
        ...

    @property
    def numbers(self) -> str:
        """How the name of the tensor that holds its numbers ends; may be the same as `plain`."""
        ...

    @property
    def beside(self) -> tuple[str, ...]:
        """How the names of tensors end that are nothing without it."""
        ...

    def shape(self, source: Source, stem: str) -> tuple[int, ...]:
        """The plain weight's shape. Raises a `CheckpointError` where one of its tensors is not as it must be."""
        ...

    def read(self, source: Source, stem: str, index: Index) -> np.ndarray:
        """The slice of the plain weight in float32, from those bytes only that it takes."""
        ...


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a checkpoint says of its weights, and of what it means to be rounded as well and is not here."""

    scheme: Scheme
    activations: bool = False  # products are meant to take them quantised
    kv_cache: bool = False  # there are scales for KV pages
