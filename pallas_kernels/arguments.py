"""The argument object of each attention operation, checked by its dispatch and passed to every implementation.

Arrays are the leaves of a pytree; options are part of its structure, so different options trace another program.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
from jax import Array

from pallas_kernels.quantized import QuantizedPages

OPTIONS = "scale", "window", "soft_cap", "value_size"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["q", "kv_pages", "page_table", "lengths", "sinks"],
    meta_fields=list(OPTIONS),
)
@dataclass(frozen=True)
class PagedAttentionArgs:
    """Arguments of decode attention, as `pallas_kernels.paged_attention` describes them."""

    q: Array  # [B * R, Hq, D], R rows for each slot
    kv_pages: Array | QuantizedPages  # [P, Hkv, C, page_size, D]
    page_table: Array  # i32[B, W]
    lengths: Array  # i32[B * R], tokens that a row sees
    sinks: Array | None = None  # [Hq]
    scale: float = field(kw_only=True)
    window: int | None = field(default=None, kw_only=True)
    soft_cap: float | None = field(default=None, kw_only=True)
    value_size: int | None = field(default=None, kw_only=True)  # numbers of a row that are V too, for pages of one part

    @property
    def arrays(self) -> tuple[Array, Array | QuantizedPages, Array, Array, Array | None]:
        return self.q, self.kv_pages, self.page_table, self.lengths, self.sinks


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["q", "kv_pages", "page_table", "kv_lens", "cu_q_lens", "sinks"],
    meta_fields=list(OPTIONS),
)
@dataclass(frozen=True)
class PrefillAttentionArgs:
    """Arguments of prefill attention, as `pallas_kernels.prefill_attention` describes them."""

    q: Array  # [T, Hq, D]
    kv_pages: Array | QuantizedPages  # [P, Hkv, C, page_size, D]
    page_table: Array  # i32[S, W]
    kv_lens: Array  # i32[S], tokens that a sequence holds
    cu_q_lens: Array  # i32[S + 1], first row of q of each sequence
    sinks: Array | None = None  # [Hq]
    scale: float = field(kw_only=True)
    window: int | None = field(default=None, kw_only=True)
    soft_cap: float | None = field(default=None, kw_only=True)
    value_size: int | None = field(default=None, kw_only=True)  # numbers of a row that are V too, for pages of one part

    @property
    def arrays(self) -> tuple[Array, Array | QuantizedPages, Array, Array, Array, Array | None]:
        return self.q, self.kv_pages, self.page_table, self.kv_lens, self.cu_q_lens, self.sinks
