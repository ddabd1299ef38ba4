"""A source of plain weights from a Hugging Face folder with quantised ones, dequantised slice by slice.

The stored dtype decides, not the module lists of the config: a tensor in floating point is read as it is. Products with
quantised weights use `channels`.
"""

from __future__ import annotations

from math import prod

import numpy as np

from jdisagg.model.names import Index
from jdisagg.model.quantized.config import QuantizationConfig, ScaledFormat, StorageFormat
from jdisagg.model.sources import FLOATS, HFSource, StoredChannels

OF_PAGES = (".k_scale", ".v_scale", ".kv_scale")
# Scales of activations and of KV pages, which are not read.
UNREAD = (
    ".input_scale",
    ".input_scale_ub",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".output_scale",
    ".output_zero_point",
    ".q_scale",
    ".prob_scale",
    *OF_PAGES,
)


class QuantizedSource:
    """Slices of dequantised weights in float32, and of other tensors in their stored dtype."""

    def __init__(self, inner: HFSource, quantization: QuantizationConfig) -> None:
        self.inner, self.quantization = inner, quantization
        self._scheme = quantization.scheme
        self._shapes: dict[str, tuple[int, ...] | None] = {}

    @property
    def place(self) -> str:
        return self.inner.place

    @property
    def names(self) -> list[str]:
        """Names of the network's tensors, without auxiliary tensors such as scales."""
        found = (self._plain_name(stored) for stored in self.inner.names)
        return sorted({name for name in found if name is not None})

    def scheme_of(self, name: str) -> StorageFormat | None:
        """Returns the storage scheme of a tensor; None if it is plain."""
        scheme = self._scheme
        if not name.endswith(scheme.plain) or self._is_plain(name):
            return None
        return scheme if self.inner.shape(self._stem(name) + scheme.numbers) is not None else None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns a tensor's shape. Raises a `CheckpointError` if a quantised tensor's scales or zero points are
        invalid."""
        if name not in self._shapes:
            scheme = self.scheme_of(name)
            known = self.inner.shape(name) if scheme is None else scheme.shape(self.inner, self._stem(name))
            self._shapes[name] = known
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        return "float32" if self.scheme_of(name) is not None else self.inner.dtype(name)

    def read(self, name: str, index: Index) -> np.ndarray:
        scheme = self.scheme_of(name)
        if scheme is None:
            return self.inner.read(name, index)
        if any(part.start >= part.stop for part in index):
            return np.empty([max(0, part.stop - part.start) for part in index], np.float32)
        return scheme.read(self.inner, self._stem(name), index)

    def channels(self, name: str) -> StoredChannels | None:
        scheme = self.scheme_of(name)
        return scheme.channels(self.inner, self._stem(name)) if isinstance(scheme, ScaledFormat) else None

    def is_kept(self, dtype: str) -> bool:
        """Returns True if products of `dtype` can use the numbers as stored."""
        scheme = self._scheme
        return isinstance(scheme, ScaledFormat) and scheme.block is None and scheme.of_products == dtype

    @property
    def scheme_label(self) -> str:
        return self._scheme.label

    @property
    def label(self) -> str:
        """Storage scheme, with a note on activation and KV scales that are not used."""
        unread = " (activations are not)" * self.quantization.activations
        kv_scales = self.quantization.kv_cache or any(name.endswith(OF_PAGES) for name in self.inner.names)
        pages = "; scales of KV pages are not read" * kv_scales
        return f"{self._scheme.label}{unread}{pages}"

    def stored_bytes(self) -> int:
        return sum(map(self.inner.num_bytes, self.inner.names))

    def num_weights(self) -> int:
        return sum(prod(self.shape(name) or ()) for name in self.names)

    def _is_plain(self, name: str) -> bool:
        return self.inner.shape(name) is not None and self.inner.dtype(name) in FLOATS

    def _stem(self, name: str) -> str:
        return name.removesuffix(self._scheme.plain)

    def _plain_name(self, stored: str) -> str | None:
        """Returns the network's name of a stored tensor; None for an auxiliary one."""
        scheme = self._scheme
        for ending in scheme.beside:
            if stored.endswith(ending) and self.inner.shape(stored.removesuffix(ending) + scheme.numbers) is not None:
                return None
        if stored.endswith(UNREAD):
            return None
        return stored.removesuffix(scheme.numbers) + scheme.plain if stored.endswith(scheme.numbers) else stored
