"""Pages as records: what any mesh wrote any mesh reads, byte for byte, whatever the cuts and the wire."""

from collections.abc import Sequence

import jax
import numpy as np
import pytest

from jdisagg.core.layout.kv_layout import NULL_PAGE, DraftPages, KVLayout
from jdisagg.core.layout.reshard import plan_transfer
from jdisagg.core.worker_config import RAW, Digests
from jdisagg.kv.pools import POOL_SPEC, StagePages
from jdisagg.kv.shipping import ReceivedSlices, TransferPrograms, check_landed, insert_landed, pack_pages, shapes_of
from jdisagg.kv.tiers.records import RecordLayout, fill_records, land_records
from jdisagg.parallel.submesh import StageMesh
from tests.kv.test_shipping import LAYERS, PAGES, fill, held_by, stages

Mesh = tuple[list[StagePages], dict[StageMesh, TransferPrograms]]
CUTS = {"whole": [range(3)], "stages": [range(0, 1), range(1, 3)]}
FROM, TO = (3, 1, 7, 20, 5), (9, 2, 24, 11, 6)


def mesh(layout: KVLayout, cut: str, tp: int) -> Mesh:
    return stages(layout, CUTS[cut], [StageMesh(jax.devices()[n * tp : (n + 1) * tp]) for n in range(len(CUTS[cut]))])


def records_of(form: RecordLayout, held: Mesh, pages: Sequence[int]) -> np.ndarray:
    records = form.empty(len(pages))
    packed = pack_pages(*held, form.shapes, pages, pages, wire=form.wire)
    assert fill_records(form, records, packed, error_bound=0.2)
    return records


def landed(form: RecordLayout, records: np.ndarray, there: Mesh, pages: Sequence[int]) -> list[ReceivedSlices]:
    number = len(pages)
    plan = plan_transfer(form.shapes, shapes_of(there[0]), form.layout.num_kv_heads, (number, number))
    return land_records(form, records, pages, there[0], plan.moves)


def intact(there: Mesh, come: list[ReceivedSlices]) -> bool:
    return all(np.asarray(each).all() for each in check_landed(*there, come))


def content(layout: KVLayout) -> np.ndarray:
    shape = (LAYERS, PAGES + 1, layout.num_kv_heads, layout.parts, layout.page_size, layout.head_dim)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("heads", "written", "read"), [
    (2, ("whole", 1), ("stages", 2)), (2, ("stages", 2), ("whole", 1)), (2, ("stages", 1), ("whole", 4)),
    (6, ("whole", 3), ("stages", 2)), (3, ("stages", 2), ("whole", 4)), (1, ("whole", 3), ("stages", 2)),
])  # fmt: skip
def test_what_one_mesh_wrote_another_reads(heads, written, read):
    layout = KVLayout(LAYERS, heads, 4, page_size=2)
    form, source, there = RecordLayout(layout), mesh(layout, *written), mesh(layout, *read)
    was = content(layout)
    fill(source[0], was)
    records = records_of(form, source, FROM)
    come = landed(form, records, there, TO)
    assert intact(there, come)
    insert_landed(*there, come)
    now = held_by(there[0])
    np.testing.assert_array_equal(now[:, TO], was[:, FROM])
    others = sorted(set(range(1, PAGES + 1)) - set(TO))
    assert not now[:, others].any(), "a page was touched that nobody asked for"
    np.testing.assert_array_equal(records_of(form, there, TO), records)


@pytest.mark.parametrize("wire", ["int8", "fp8", "int4"])
def test_quantised_records_bring_what_a_transfer_of_that_wire_brings(wire):
    layout = KVLayout(LAYERS, 2, 8, page_size=4)
    source, there = mesh(layout, "stages", 1), mesh(layout, "whole", 2)
    was = content(layout)
    fill(source[0], was)
    form = RecordLayout(layout, wire)
    records = records_of(form, source, FROM)
    assert form.record_bytes < RecordLayout(layout).record_bytes
    come = landed(form, records, there, TO)
    assert intact(there, come)
    insert_landed(*there, come)
    lost = np.abs(held_by(there[0])[:, TO] - was[:, FROM]).max() / np.abs(was).max()
    assert 0 < lost < 0.15
    assert not fill_records(form, records, pack_pages(*source, form.shapes, FROM, FROM, wire=wire), error_bound=1e-6)


def test_a_drafts_pages_lie_in_the_records_behind_the_models():
    layout, small = KVLayout(LAYERS, 2, 4, page_size=2), KVLayout(2, 3, 8, page_size=2)
    draft = DraftPages("small", small, LAYERS)
    form, was = RecordLayout(layout, draft=draft), content(layout)
    assert form.record_bytes > RecordLayout(layout).record_bytes and form.shapes[1].draft_heads == 3
    ends: list[Mesh] = []
    for cut, tp in (("stages", 1), ("whole", 2)):
        held, programs = mesh(layout, cut, tp)
        last = held[-1].submesh
        ends.append(([*held, StagePages(small, draft.layers, PAGES, last, draft="small")], programs))
    source, there = ends
    fill(source[0][:-1], was)
    own = np.random.default_rng(1).standard_normal((2, PAGES + 1, 3, 2, 2, 8)).astype(np.float32)
    source[0][-1].pools = [jax.device_put(each, source[0][-1].submesh.sharding(POOL_SPEC)) for each in own]
    records = records_of(form, source, FROM)
    come = landed(form, records, there, TO)
    assert intact(there, come)
    insert_landed(*there, come)
    np.testing.assert_array_equal(held_by(there[0][:-1])[:, TO], was[:, FROM])
    np.testing.assert_array_equal(held_by(there[0][-1:])[:, TO], own[:, FROM])
    records[3, form.parts[-1].offset + 1] ^= 4
    assert not intact(there, landed(form, records, there, TO))


def test_one_bit_of_a_record_that_changed_is_found_out_on_the_devices():
    layout = KVLayout(LAYERS, 2, 4, page_size=2)
    form, source, there = RecordLayout(layout), mesh(layout, "whole", 2), mesh(layout, "stages", 1)
    fill(source[0], content(layout))
    records = records_of(form, source, FROM)
    records[3, 77] ^= 4
    assert not intact(there, landed(form, records, there, TO))


def test_records_without_digests_are_smaller_and_are_read_all_the_same():
    layout = KVLayout(LAYERS, 2, 4, page_size=2)
    source, there = mesh(layout, "whole", 2), mesh(layout, "stages", 1)
    fill(source[0], content(layout))
    for digests in (Digests.OFF, Digests.SAMPLED):
        form = RecordLayout(layout, RAW, digests)
        assert [part.kind for part in form.parts] == ["values"]
        insert_landed(*there, landed(form, records_of(form, source, FROM), there, TO))
        np.testing.assert_array_equal(held_by(there[0])[:, TO], content(layout)[:, FROM])


def test_a_page_that_is_not_to_be_written_goes_to_the_null_page():
    layout = KVLayout(LAYERS, 2, 4, page_size=2)
    form, source, there = RecordLayout(layout), mesh(layout, "whole", 1), mesh(layout, "whole", 1)
    fill(source[0], content(layout))
    records = records_of(form, source, FROM)
    records[2] = 0
    pages = (*TO[:2], NULL_PAGE, *TO[3:])
    come = landed(form, records, there, pages)
    assert intact(there, come), "the digest of nothing is nothing"
    insert_landed(*there, come)
    now = held_by(there[0])
    assert now[:, TO[3]].any() and not now[:, TO[2]].any()


def test_other_models_layouts_and_wires_have_other_fingerprints():
    layout = KVLayout(LAYERS, 2, 4, page_size=2)
    drafts = [DraftPages(name, layout, LAYERS) for name in ("small", "other")]
    forms = [
        *(RecordLayout(layout, draft=each) for each in drafts),
        RecordLayout(layout),
        RecordLayout(KVLayout(LAYERS, 2, 4, page_size=4)),
        RecordLayout(layout, "int8"),
    ]
    found = {form.fingerprint(model) for form in forms for model in ("one", "other")}
    assert len(found) == 10 and RecordLayout(layout).fingerprint("one") in found
