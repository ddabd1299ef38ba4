"""Which contest a case is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from benchmarks import kernels_ours, kernels_products
from benchmarks.kernels_cases import Case
from benchmarks.kernels_floors import Contest, Sizes

MAKERS: Mapping[str, Callable[[Case, Sizes, str], Contest]] = MappingProxyType(
    {
        "paged_attention": kernels_ours.decode_contest,
        "prefill_attention": kernels_ours.prefill_contest,
        "write_kv_pages": kernels_ours.write_contest,
        "pack_kv_pages": kernels_ours.pack_contest,
        "unpack_kv_pages": kernels_ours.unpack_contest,
        "product": kernels_products.product_contest,
        "grouped_product": kernels_products.grouped_contest,
    }
)


def contest_of(case: Case, sizes: Sizes, platform: str) -> Contest:
    return MAKERS[case.operation](case, sizes, platform)
