import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.errors import MeshError
from jdisagg.core.mesh_spec import MeshSpec, PoolSpec
from jdisagg.core.worker_config import Role

sizes = st.integers(1, 8)
firsts = st.none() | st.integers(0, 40)


def pools(role: Role) -> st.SearchStrategy[PoolSpec]:
    return st.builds(PoolSpec, st.just(role), sizes, st.just(1) if role is Role.PREFILL else sizes, sizes, firsts)


specs = st.builds(lambda *p: MeshSpec(p), pools(Role.PREFILL), pools(Role.DECODE)) | st.builds(
    lambda p: MeshSpec((p,)), pools(Role.COLOCATED)
)


@given(specs)
def test_a_mesh_written_and_read_back_is_the_same(spec):
    assert MeshSpec.parse(str(spec)) == spec
    assert str(MeshSpec.parse(str(spec))) == str(spec)


@given(st.text("predcolt:,x@0129 k", max_size=30) | st.text(max_size=12))
def test_a_text_is_either_a_mesh_or_named_in_the_error(text):
    try:
        spec = MeshSpec.parse(text)
    except MeshError as error:
        assert repr(text) in str(error)
    else:
        assert MeshSpec.parse(str(spec)) == spec


@given(specs)
def test_every_worker_has_its_devices_and_who_shares_is_known(spec):
    places = spec.workers()
    assert all(len(place.device_ids) == place.pp * place.tp for place in places)
    on = spec.on_device()
    for device, workers in on.items():
        assert set(workers) == {place.worker for place in places if device in place.device_ids}
    assert max(on) == spec.num_devices - 1
    alone = sum(len(place.device_ids) for place in places) == len(on)
    assert alone == (not spec.shared())
    assert {d for ids in spec.shared().values() for d in ids} == {d for d, w in on.items() if len(w) > 1}


def test_workers_take_devices_one_after_the_other():
    workers = MeshSpec.parse("prefill:2xtp4,decode:pp2tp2").workers()
    assert [(w.worker, list(w.device_ids)) for w in workers] == [
        ("prefill-0", [0, 1, 2, 3]),
        ("prefill-1", [4, 5, 6, 7]),
        ("decode-0", [8, 9, 10, 11]),
    ]


@pytest.mark.parametrize(
    ("text", "ids", "devices"),
    [
        ("prefill:tp1@0,decode:tp1@0", [[0], [0]], 1),
        ("prefill:tp2@0,decode:pp2@0", [[0, 1], [0, 1]], 2),
        ("prefill:2xtp1,decode:pp2@1", [[0], [1], [1, 2]], 3),
        ("prefill:tp2@4,decode:tp1", [[4, 5], [6]], 7),
        ("decode:tp1@1,prefill:tp1@0", [[1], [0]], 2),
        ("colocated:2xtp2@3", [[3, 4], [5, 6]], 7),
    ],
)
def test_a_pool_may_say_at_which_device_it_starts(text, ids, devices):
    spec = MeshSpec.parse(text)
    assert [list(worker.device_ids) for worker in spec.workers()] == ids
    assert spec.num_devices == devices and str(spec) == text


def test_those_who_share_devices_are_named_with_them():
    assert MeshSpec.parse("prefill:2xtp2,decode:pp2@1").shared() == {
        ("prefill-0", "decode-0"): (1,),
        ("prefill-1", "decode-0"): (2,),
    }
    assert not MeshSpec.parse("prefill:tp2,decode:pp2").shared()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefil:tp2,decode:tp1", "unknown role 'prefil'"),
        ("prefill:tp2", "no decode pool"),
        ("decode:tp2", "no prefill pool"),
        ("prefill:tp0,decode:tp1", "size of 0"),
        ("colocated:tp1,decode:tp1", "must be both others or none"),
        ("prefill:tp1,decode:pp2,colocated:tp1", "equally many stages"),
        ("prefill:tp1,prefill:tp2,decode:tp1", "twice"),
        ("prefill:tp2tp4,decode:tp1", "an axis twice"),
        ("", "cannot read ''"),
        ("prefill:4,decode:2", "cannot read 'prefill:4'"),
        ("prefill:tp1@,decode:tp1@0", "cannot read 'prefill:tp1@'"),
        ("prefill:tp1@-1,decode:tp1", "cannot read 'prefill:tp1@-1'"),
        ("prefill:@0tp1,decode:tp1", "cannot read 'prefill:@0tp1'"),
        ("prefill:tp1,decode:tp" + "9" * 5000, "cannot read 'decode:tp9"),
    ],
)
def test_a_bad_mesh_says_what_is_wrong_and_what_is_allowed(text, says):
    with pytest.raises(MeshError, match=says):
        MeshSpec.parse(text)


def test_a_prefill_worker_may_have_stages():
    spec = MeshSpec.parse("prefill:pp2tp4,decode:pp3")
    assert str(spec) == "prefill:pp2tp4,decode:pp3" and spec.decode_pp == 3
    assert [(place.pp, place.tp, place.device_ids) for place in spec.workers()] == [
        (2, 4, range(0, 8)),
        (3, 1, range(8, 11)),
    ]


def test_a_ring_is_read_and_written_and_has_the_devices_of_its_stages():
    spec = MeshSpec.parse("prefill:tp2,decode:2xring4tp2@2")
    assert str(spec) == "prefill:tp2,decode:2xring4tp2@2" and spec.is_ring and spec.decode_pp == 4
    assert [place.device_ids for place in spec.workers()] == [range(2), range(2, 10), range(10, 18)]
    assert not MeshSpec.parse("prefill:tp2,decode:pp4tp2").is_ring


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefill:ring2,decode:tp1", "a ring decodes and does nothing else"),
        ("colocated:ring2", "a ring decodes and does nothing else"),
        ("prefill:tp1,decode:ring1tp2", "a ring takes 2 stages or more"),
        ("prefill:tp1,decode:pp2ring2", "says pp and ring"),
        ("prefill:tp1,decode:ring2,colocated:pp2", "a ring and colocated workers cut the layers differently"),
    ],
)
def test_a_ring_that_cannot_be_says_why(text, says):
    with pytest.raises(MeshError, match=says):
        MeshSpec.parse(text)


@pytest.mark.parametrize("text", ["prefill@gpu:2xtp4,decode@cpu:tp1", "prefill@cpu:tp1,decode@tpu:pp2tp2@4"])
def test_pools_on_unlike_devices_are_read_and_written(text: str):
    spec = MeshSpec.parse(text)
    assert str(spec) == text
    named = {place.role: place.platform for place in spec.workers()}
    assert named == {pool.role: pool.platform for pool in spec.pools} and set(spec.platforms) == set(named.values())
    assert spec.platforms[-1] == "cpu", "accelerators come first"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefill@gpu:tp1,decode:tp1", "names the platform of some pools: name each one's, or none's"),
        ("prefill@gpu:tp1,decode@tpu:tp1", "names gpu and tpu, and no process has both"),
        ("prefill@npu:tp1,decode@cpu:tp1", "unknown platform 'npu' .*; platforms are cpu, gpu, tpu"),
        ("prefill@gpu:tp1@0,decode@cpu:tp1@0", "device 0 cannot be of gpu and cpu"),
        ("prefill@:tp1,decode@cpu:tp1", "cannot read 'prefill@:tp1'"),
    ],
)
def test_platforms_that_cannot_be_are_refused_in_one_line(text: str, says: str):
    with pytest.raises(MeshError, match=says):
        MeshSpec.parse(text)
