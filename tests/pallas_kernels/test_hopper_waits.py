"""That every barrier at which a kernel's copies arrive is waited for, read from what jax traces: the interpreter copies
at once, and so misses a wait that is missing where another orders the same threads."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from pallas_kernels.grouped_product import hopper as product
from pallas_kernels.pack_kv_pages import hopper as pack
from pallas_kernels.paged_attention import hopper as decode
from pallas_kernels.prefill_attention import hopper as prefill
from pallas_kernels.quantized import QuantizedPages
from pallas_kernels.unpack_kv_pages import hopper as unpack
from pallas_kernels.wire_format import PackedPages
from tests.pallas_kernels.shapes import by_arrays

ARRIVE, WAIT = "copy_gmem_to_smem", "barrier_wait"


def bodies(equation: Any) -> Iterator[Jaxpr]:
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else [value]:
            inner = each.jaxpr if isinstance(each, ClosedJaxpr) else each
            if isinstance(inner, Jaxpr):
                yield inner


def barriers_of(variables: Iterable[Any]) -> list[Any]:
    return [each for each in variables if "barrier[" in str(getattr(each, "aval", ""))]


def tell(jaxpr: Jaxpr, names: dict[Any, Any], found: dict[str, set[Any]]) -> None:
    """Adds to `found` the barriers of every copy and every wait in `jaxpr`. names: which barrier a variable is."""
    for equation in jaxpr.eqns:
        mine = [names.setdefault(each, each) for each in barriers_of(equation.invars)]
        if equation.primitive.name in found:
            found[equation.primitive.name] |= set(mine)
        for inner in bodies(equation):
            theirs = barriers_of([*inner.constvars, *inner.invars])
            if mine and theirs:
                names.update(zip(theirs, mine, strict=True))
            tell(inner, names, found)


def shape(dims: tuple[int, ...], dtype: str) -> Any:
    return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))


def ints(*dims: int) -> Any:
    return shape(dims, "int32")


Q, PAGES, CODES = (
    shape((4, 8, 128), "bfloat16"),
    shape((9, 2, 2, 64, 128), "bfloat16"),
    shape((9, 2, 2, 64, 128), "int8"),
)
QUANTISED = QuantizedPages(CODES, shape((9, 2, 128), "float32"))
LATENTS, WIDE = shape((9, 1, 1, 64, 576), "bfloat16"), shape((4, 8, 576), "bfloat16")
PACKED = PackedPages(shape((1, 3, 2, 2, 64, 128), "bfloat16"), None, None)
DECODE, CHUNK = (ints(4, 4), ints(4)), (ints(2, 4), ints(2), ints(3))
KERNELS = {
    "decode": (by_arrays(decode.paged_attention), Q, PAGES, *DECODE),
    "decode of codes": (by_arrays(decode.paged_attention), Q, QUANTISED, *DECODE),
    "decode of latents": (partial(by_arrays(decode.paged_attention), value_size=512), WIDE, LATENTS, *DECODE),
    "prefill": (by_arrays(prefill.prefill_attention), Q, PAGES, *CHUNK),
    "prefill of codes": (by_arrays(prefill.prefill_attention), Q, QUANTISED, *CHUNK),
    "grouped product": (
        partial(product.grouped_product, out_first=False),
        shape((200, 128), "bfloat16"),
        shape((2, 128, 128), "bfloat16"),
        ints(2),
    ),
    "prefill of latents": (partial(by_arrays(prefill.prefill_attention), value_size=512), WIDE, LATENTS, *CHUNK),
    "pack": (partial(pack.pack_kv_pages, wire="raw"), [PAGES], ints(3)),
    "unpack": (partial(unpack.unpack_kv_pages, wire="raw"), [PAGES], PACKED, ints(3)),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_barrier_at_which_copies_arrive_is_waited_for(kernel):
    function, *arguments = KERNELS[kernel]
    found: dict[str, set[Any]] = {ARRIVE: set(), WAIT: set()}
    tell(jax.make_jaxpr(function)(*arguments).jaxpr, {}, found)
    assert found[ARRIVE] and found[ARRIVE] <= found[WAIT]
