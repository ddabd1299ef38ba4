"""The sizes of a stack, worked out from settings and the devices' memory."""

import json
import logging
from math import prod
from pathlib import Path

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.core.hardware import CHIPS
from jdisagg.core.layout.kv_layout import DTYPE_BYTES
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import WorkerConfig
from jdisagg.engine.declaration import local_bytes
from jdisagg.model.params import StageSpec, abstract_stage_params
from jdisagg.serve.deploy.deployment import Deployment, resolve_deployment
from tests.model.sharded import mesh_of

GIB = 1 << 30
ROOT = Path(__file__).parents[2]


def resolved(mesh: str, device_bytes: int | None = GIB, **settings) -> Deployment:
    platform = "cpu" if device_bytes is None else "gpu"
    return resolve_deployment(Settings(mesh=mesh, hbm_fraction=1.0, **settings), platform, device_bytes)


def bytes_on_devices(deployment: Deployment, config: WorkerConfig) -> list[tuple[int, int]]:
    """Weights with KV, and a page, of one device of each of the worker's stages."""
    place, kv = deployment.place(config.worker), deployment.kv
    found = []
    for run in deployment.layers_of(place) if place.pp > 1 else (range(deployment.model.num_layers),):
        page = len(run) * prod(kv.page_shape(place.tp)) * DTYPE_BYTES[kv.dtype]
        groups = [run] if place.pp > 1 else deployment.layers
        weights = sum(
            local_bytes(leaf)
            for group in groups
            for leaf in abstract_stage_params(
                StageSpec(deployment.model, group, mesh_of(place.tp), deployment.dtype, deployment.weights)
            ).leaves
        )
        found.append((weights + config.num_pages * page, page))
    return found


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        ("prefill:tp2,decode:tp1", {"prefill-0": 1, "decode-0": 1}),
        ("prefill:tp1@0,decode:tp1@0", {"prefill-0": 0.5, "decode-0": 0.5}),
        ("prefill:2xtp1,decode:tp1@0", {"prefill-0": 0.5, "prefill-1": 1, "decode-0": 0.5}),
        ("prefill:pp2,decode:tp1", {"prefill-0": 1, "decode-0": 1}),
        ("prefill:tp1@1,decode:pp2@0", {"prefill-0": 0.5, "decode-0": 0.5}),  # its stages hold equally many pages
    ],
)
@pytest.mark.parametrize("weight_dtype", ["dtype", "int8", "fp8"])
def test_the_fullest_device_of_a_worker_is_full_but_for_less_than_a_page(
    mesh: str, parts: dict[str, float], weight_dtype: str
):
    """With weights as they lie there: a prefill worker holds tied tables twice, and in int8 a byte a number."""
    deployment = resolved(mesh, weight_dtype=weight_dtype)
    for config in deployment.workers:
        used = bytes_on_devices(deployment, config)
        left = [parts[config.worker] * GIB - size for size, _ in used]
        assert min(left) >= 0, "no device holds more than its part"
        assert any(each < page for each, (_, page) in zip(left, used, strict=True))


def test_prefill_stages_are_even_and_chunks_fill_them_all():
    prefill, decode = (deployment := resolved("prefill:pp2,decode:pp2")).workers
    assert deployment.layers == (range(0, 4), range(4, 6)), "by cost: the second has the head besides"
    assert (prefill.layer_groups, decode.layer_groups) == (((0, 3), (3, 6)), ((0, 4), (4, 6)))
    assert (prefill.prefill_stages, prefill.num_microbatches, prefill.chunks_in_flight) == (2, 1, 3)
    assert (decode.prefill_stages, decode.num_microbatches, decode.chunks_in_flight) == (1, 2, 2)
    with pytest.raises(ConfigError, match=r"7 prefill stages .* 6 layers"):
        resolved("prefill:pp7,decode:tp1")


def test_too_little_memory_for_two_names_the_worker_and_both_sizes():
    alone = resolved("colocated:tp1", kv_tokens=2048)
    ((enough_for_one, _),) = bytes_on_devices(alone, alone.workers[0])
    resolved("colocated:tp1", enough_for_one, max_model_len=2048)
    with pytest.raises(
        ConfigError, match=r"prefill-0 does not fit: .* room for 0 KV tokens, and one sequence may have 2048"
    ):
        resolved("prefill:tp1@0,decode:tp1@0", enough_for_one, max_model_len=2048)


def test_sharing_is_warned_of_and_its_absence_is_not(caplog):
    with caplog.at_level(logging.WARNING):
        resolved("prefill:tp1,decode:tp1", None)
    assert not caplog.records
    resolved("prefill:2xtp1,decode:pp3@0", None)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "prefill-0 and decode-0 share device 0",
        "prefill-1 and decode-0 share device 1",
    ]


def test_the_budget_of_a_mixed_step_is_met_by_chunks_of_whole_pages_and_a_row_for_every_slot():
    (both,) = resolved("colocated:tp1", max_num_batched_tokens=128, max_num_seqs=8, page_size=16).workers
    assert both.mixed_steps and both.prefill_buckets[-1] == 112 and both.step_tokens == 120
    (apart,) = resolved("colocated:tp1", max_num_batched_tokens=128, max_num_seqs=8, mixed_steps="off").workers
    assert not apart.mixed_steps and apart.prefill_buckets[-1] == 128
    pools = resolved("prefill:tp1,decode:tp1", max_num_batched_tokens=128, max_num_seqs=8).workers
    assert not pools[0].mixed_steps and pools[0].prefill_buckets[-1] == 128


def test_a_decode_worker_takes_chunks_of_whole_pages_as_far_as_a_steps_budget_goes():
    def ends(**asked):
        decode = resolved("prefill:tp1,decode:pp2", max_num_seqs=8, page_size=16, **asked).workers[1]
        return decode.short_prompt_tokens, decode.mixed_steps, decode.computes_prompts

    assert ends() == (64, True, True)
    assert ends(short_prompt_tokens=50, mixed_steps="off") == (48, False, True)
    assert ends(max_num_batched_tokens=40) == (32, True, True), "four rows a step"
    nothing = (0, False, False)
    assert ends(short_prompt_tokens=0) == ends(max_num_batched_tokens=19) == ends(prefix_caching="off") == nothing
    assert resolved("colocated:tp1").workers[0].short_prompt_tokens == 0


def test_a_budget_that_holds_every_row_and_no_page_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"=20 holds 8 decode rows and no page of 16 .* raise it to 24 or more"):
        resolved("colocated:tp1", max_num_batched_tokens=20, max_num_seqs=8, page_size=16)


def test_what_nobody_says_is_a_laptops_on_the_cpu():
    deployment = resolved("prefill:tp1,decode:pp2", None)
    prefill, decode = deployment.workers
    assert (decode.num_slots, prefill.prefill_buckets, prefill.max_chunk_seqs) == (8, (128, 512), 8)
    assert prefill.page_size == decode.page_size == 32
    assert len(deployment.sizes.reasons) == 4


def test_what_is_said_is_taken_and_needs_no_reason():
    said = {"max_num_seqs": 6, "max_num_batched_tokens": 96, "max_chunk_seqs": 3, "page_size": 16}
    deployment = resolved("prefill:tp1,decode:tp1", **said)
    prefill, decode = deployment.workers
    assert (decode.num_slots, prefill.prefill_buckets[-1], prefill.max_chunk_seqs, decode.page_size) == (6, 96, 3, 16)
    assert deployment.sizes.reasons == ()


def test_what_nobody_says_follows_from_the_chip_and_what_its_memory_holds():
    chip, folder = CHIPS["h100"], str(ROOT / "configs" / "llama3_70b")
    settings = Settings(mesh="prefill:tp4,decode:pp2tp2", model=folder, load_format="random")
    deployment = resolve_deployment(settings, "gpu", chip.memory_bytes, chip=chip)
    prefill, decode = deployment.workers
    assert prefill.prefill_buckets == (128, 512, 2048) and prefill.max_chunk_seqs == 32
    assert decode.num_slots == 512 and decode.slots_per_microbatch == 256
    assert decode.table_buckets == (2048 // 32, 8192 // 32), "few: each is a program of every stage"
    smaller = resolve_deployment(settings, "gpu", int(0.6 * chip.memory_bytes), chip=chip)
    assert smaller.workers[1].num_slots < 512


def test_slots_that_nobody_said_leave_room_for_prompts_in_the_tokens_that_somebody_did():
    chip, folder = CHIPS["v5e"], str(ROOT / "configs" / "llama3_8b")
    settings = Settings(mesh="colocated:tp4", model=folder, load_format="random", max_num_batched_tokens=256)
    (worker,) = resolve_deployment(settings, "tpu", chip.memory_bytes, chip=chip).workers
    assert (worker.num_slots, worker.prefill_buckets[-1]) == (128, 128)


def test_a_router_of_accelerators_that_are_elsewhere_agrees_about_pages():
    """Its identity names them, and it knows of no memory and no chip."""
    chip, folder = CHIPS["v5p"], str(ROOT / "configs" / "llama3_70b")
    settings = Settings(mesh="prefill:tp8,decode:pp4tp2", model=folder, load_format="random")
    known = resolve_deployment(settings, "tpu", chip.memory_bytes, chip=chip)
    alone = resolve_deployment(settings, "tpu", None, sized=False)
    assert known.kv == alone.kv and known.kv.page_size == 64


def test_quantised_pages_are_those_of_both_sides_unless_another_dtype_is_said():
    both = resolved("prefill:tp1,decode:tp1", None, kv_dtype="fp8")
    assert both.kv.dtype == both.prefill_kv.dtype == "float8_e4m3fn"
    one = resolved("prefill:tp1,decode:tp1", None, kv_dtype="int8", prefill_kv_dtype="float32")
    assert (one.prefill_kv.dtype, one.kv.dtype) == ("float32", "int8")


def test_int8_pages_hold_almost_four_times_the_tokens_of_f32_and_their_scales_are_counted():
    plain, small = (resolved("prefill:tp1,decode:tp1", dtype="float32", kv_dtype=each) for each in ("float32", "int8"))
    ratio = small.workers[1].num_pages / plain.workers[1].num_pages
    size = plain.model.head_dim
    assert ratio == pytest.approx(4 * size / (size + 4), rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mesh": "prefill:tp1,decode:ring2"}, "--mesh=prefill:tp1,decode:ring2: a ring's pages are not quantised"),
        ({"prefill_kv_dtype": "fp8"}, "--kv_dtype=int8, --prefill_kv_dtype=fp8: pages of one cannot become"),
        ({"transfer_compress": "fp8"}, "--transfer_compress=fp8: quantised pages travel as they are"),
        ({"tier_compress": "int4"}, "--tier_compress=int4: quantised pages travel as they are"),
    ],
)
def test_what_quantised_pages_do_not_go_with_is_refused_in_one_line(settings: dict, says: str):
    with pytest.raises(ConfigError) as error:
        resolved(**{"mesh": "prefill:tp1,decode:tp1", "device_bytes": None, "kv_dtype": "int8", **settings})
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"head_dim": 64}, "heads of 64 on a TPU: quantised rows are of 128 numbers"),
        ({"head_dim": 128, "page_size": 32}, "pages of 32 tokens on a TPU: say --page_size=64"),
        ({"head_dim": 128}, ""),
    ],
)
def test_a_tpu_takes_quantised_pages_that_fill_its_tiles(sizes: dict, says: str, tmp_path):
    config = json.loads((ROOT / "configs" / "llama3_8b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": sizes["head_dim"]}))
    settings = Settings(
        mesh="prefill:tp1,decode:tp1",
        model=str(tmp_path),
        load_format="random",
        kv_dtype="int8",
        page_size=sizes.get("page_size", 0),
    )
    if says:
        with pytest.raises(ConfigError, match=says):
            resolve_deployment(settings, "tpu", 95 * GIB)
    else:
        assert resolve_deployment(settings, "tpu", 95 * GIB).kv.page_size == 64
