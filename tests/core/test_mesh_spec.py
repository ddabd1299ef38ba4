import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.errors import MeshError
from jdisagg.core.mesh_spec import MeshSpec, PoolSpec
from jdisagg.core.worker_config import Role

sizes = st.integers(1, 8)


@given(sizes, sizes, sizes, sizes, sizes)
def test_a_mesh_written_and_read_back_is_the_same(p_count, p_tp, d_count, d_pp, d_tp):
    spec = MeshSpec((PoolSpec(Role.PREFILL, p_count, 1, p_tp), PoolSpec(Role.DECODE, d_count, d_pp, d_tp)))
    assert MeshSpec.parse(str(spec)) == spec


def test_workers_take_devices_one_after_the_other():
    workers = MeshSpec.parse("prefill:2xtp4,decode:pp2tp2").workers()
    assert [(w.worker, list(w.device_ids)) for w in workers] == [
        ("prefill-0", [0, 1, 2, 3]),
        ("prefill-1", [4, 5, 6, 7]),
        ("decode-0", [8, 9, 10, 11]),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefil:tp2,decode:tp1", "unknown role 'prefil'"),
        ("prefill:tp2", "no decode pool"),
        ("decode:tp2", "no prefill pool"),
        ("prefill:tp0,decode:tp1", "size of 0"),
        ("prefill:pp2,decode:tp1", "pp2 is not taken"),
        ("colocated:tp1,decode:tp1", "mixes colocated"),
        ("prefill:tp1,prefill:tp2,decode:tp1", "twice"),
        ("prefill:tp2tp4,decode:tp1", "an axis twice"),
        ("", "cannot read ''"),
        ("prefill:4,decode:2", "cannot read 'prefill:4'"),
    ],
)
def test_a_bad_mesh_says_what_is_wrong_and_what_is_allowed(text, says):
    with pytest.raises(MeshError, match=says):
        MeshSpec.parse(text)
