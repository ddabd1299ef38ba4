"""The TPU kernels that pack and unpack, interpreted on the CPU: the definition to the bit, then late copies."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels.pack_kv_pages import tpu as pack_tpu
from pallas_kernels.unpack_kv_pages import tpu as unpack_tpu
from tests.pallas_kernels.shapes import Shape, rest_slow
from tests.pallas_kernels.test_pack_kv_pages import (
    FROM,
    PACK,
    PACK_REFERENCE,
    SMALL,
    TO,
    UNPACK,
    check_pack,
    check_unpack,
    make_pools,
    same,
)
from tests.pallas_kernels.tpu_modes import EAGER, FAST, LATE, RACE

# (shape, dtype of the source, wire, dtype of the destination)
CASES = [
    (Shape(64, 4, 2, 16), "float32", "raw", "float32"),
    (Shape(96, 8, 1, 32), "float32", "fp8", "bfloat16"),
    (Shape(80, 2, 4, 16), "bfloat16", "int4", "float32"),
    (Shape(256, 1, 1, 64), "bfloat16", "int8", "bfloat16"),
    (SMALL, "bfloat16", "raw", "float32"),
]
PACK_TPU = partial(pack_tpu.pack_kv_pages, interpret=FAST, block_pages=2)
UNPACK_TPU = partial(unpack_tpu.unpack_kv_pages, interpret=FAST, block_pages=2)


@pytest.mark.parametrize("case", rest_slow([(case,) for case in CASES[::-1]], 2), ids=str)
def test_kernels_are_the_definition_to_the_bit(case):
    shape, source, wire, dtype = case
    check_pack(PACK_TPU, shape, source, wire)
    check_unpack(partial(UNPACK_TPU, wire=wire), shape, dtype, wire, source)


@pytest.mark.parametrize(
    ("mode", "wire", "cores"),
    rest_slow([(LATE, "raw", 1), (EAGER, "int8", 2), (LATE, "int8", 2), (EAGER, "raw", 1)]),
    ids=["late-raw", "eager-int8-2", "late-int8-2", "eager-raw"],
)
def test_every_copy_is_awaited_before_its_room_is_used_again(wire, cores, mode, capsys):
    options = {"interpret": mode, "block_pages": 2, "cores": cores}
    check_pack(partial(pack_tpu.pack_kv_pages, **options), SMALL, "float32", wire)
    check_unpack(partial(unpack_tpu.unpack_kv_pages, wire=wire, **options), SMALL, "float32", wire)
    assert RACE not in capsys.readouterr().out


def test_the_null_page_is_never_written_and_digests_may_be_left_out():
    pools, held = make_pools(SMALL), make_pools(SMALL, seed=1)
    packed = PACK_TPU(pools, FROM, wire="raw", digests=False)
    assert packed.digests is None
    assert same(packed, PACK(pools, FROM, digests=False))
    written, digests = UNPACK_TPU(held, packed, TO, wire="raw", digests=False)
    assert digests is None
    assert same([pool[0] for pool in written], [pool[0] for pool in held])
    assert same([pool[1:] for pool in written], [pool[1:] for pool in UNPACK(held, packed, TO)[0]])


@pytest.mark.parametrize("kind", rest_slow([jnp.float8_e4m3fn, jnp.int8]), ids=["fp8", "int8"])
def test_values_of_quantised_pools_travel_as_they_are(kind):
    pools = [jax.lax.bitcast_convert_type(pool.astype(jnp.int8), kind) for pool in make_pools(SMALL)]
    packed = PACK_TPU(pools, FROM, wire="raw")
    assert same(packed, PACK_REFERENCE(pools, FROM, wire="raw"))
    written, digests = UNPACK_TPU([jnp.zeros_like(pool) for pool in pools], packed, TO, wire="raw")
    assert same(digests, packed.digests)
    assert same([pool[TO[TO > 0]] for pool in written], [pool[FROM[TO > 0]] for pool in pools])


def test_heads_may_be_sharded():
    heads, whole, later = PartitionSpec(None, "tp"), PartitionSpec(), PartitionSpec(None, None, "tp")
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    cut = partial(jax.shard_map, mesh=mesh, check_vma=False)
    pack = jax.jit(cut(partial(PACK_TPU, wire="fp8"), in_specs=(heads, whole), out_specs=later))
    unpack = jax.jit(cut(partial(UNPACK_TPU, wire="fp8"), in_specs=(heads, later, whole), out_specs=(heads, later)))
    check_pack(lambda pools, ids, wire: pack(pools, ids), SMALL, "float32", "fp8")
    check_unpack(unpack, SMALL, "float32", "fp8")
