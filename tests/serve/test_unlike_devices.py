"""Pools on unlike devices of one machine, each with its own dtype and pages: here both are CPUs, by the same path."""

from __future__ import annotations

import re
from typing import Any

import pytest

import jdisagg
from jdisagg import devices
from jdisagg.core.errors import MeshError
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Role
from jdisagg.serve.deploy.deployment import resolve_deployment
from tests.fixtures import conformance

FAMILY = conformance.load("llama3")
GREEDY = jdisagg.SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(0,), ignore_eos=True)
SIZES: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
UNLIKE = "prefill@gpu:tp2,decode@cpu:tp1"


@pytest.mark.slow
def test_pools_that_name_their_platforms_say_what_a_uniform_pair_says():
    pages: dict[str, Any] = {"prefill_page_size": 32, "page_size": 16}
    mesh = "prefill@cpu:tp1,decode@cpu:tp1"
    with jdisagg.LLM(model=str(FAMILY.folder), mesh=mesh, load_format="hf", **SIZES, **pages) as llm:
        assert [list(each.token_ids) for each in llm.generate_all(FAMILY.prompts, GREEDY)] == FAMILY.greedy
        assert llm.service.recompiles() == 0
        machines = llm.service.driver.executors.by_worker
        assert {name: each.place.layout.page_size for name, each in machines.items()} == {
            "prefill-0": 32, "decode-0": 16,
        }  # fmt: skip


@pytest.mark.slow
def test_a_prefill_worker_in_bfloat16_ships_to_a_decode_worker_in_float32():
    dtypes = {"prefill_dtype": "bfloat16", "page_size": 16}
    with jdisagg.LLM(
        model=str(FAMILY.folder), mesh="prefill:tp1,decode:tp1", load_format="hf", **SIZES, **dtypes
    ) as llm:
        got = [list(each.token_ids) for each in llm.generate_all(FAMILY.prompts, GREEDY)]
        held = {
            name: each.layer_groups[0].params.leaves for name, each in llm.service.driver.executors.by_worker.items()
        }
        kinds = {name: {str(leaf.dtype) for leaf in leaves} for name, leaves in held.items()}
        assert "bfloat16" in kinds["prefill-0"] and kinds["decode-0"] == {"float32"}
    pairs = [pair for rows in zip(got, FAMILY.greedy, strict=True) for pair in zip(*rows, strict=True)]
    assert sum(one == other for one, other in pairs) > 0.7 * len(pairs)


def test_each_pool_has_the_dtype_and_the_memory_of_its_devices():
    settings = Settings(model=str(FAMILY.folder), mesh=UNLIKE, max_model_len=64, max_num_seqs=1000)
    found = resolve_deployment(settings, "gpu", 1 << 30)
    assert {role: found.dtype_of(role) for role in (Role.PREFILL, Role.DECODE)} == {
        "prefill": "bfloat16", "decode": "float32",
    }  # fmt: skip
    assert (found.prefill_kv.dtype, found.kv.dtype) == ("bfloat16", "float32")
    prefill, decode = found.workers
    assert decode.num_pages == 1000 * found.kv.pages_for(64), "every slot's longest sequence, on the host"
    assert prefill.num_pages != decode.num_pages, "what the accelerator has room for"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"dtype": "float32"}, ("float32", "float32")),
        ({"dtype": "float32", "prefill_dtype": "bfloat16"}, ("bfloat16", "float32")),
        ({"prefill_dtype": "float32"}, ("float32", "float32")),
    ],
)
def test_a_dtype_that_is_asked_for_goes_before_what_devices_are_best_at(given: dict[str, Any], expected):
    settings = Settings(model=str(FAMILY.folder), mesh=UNLIKE, max_model_len=64, **given)
    found = resolve_deployment(settings, "gpu", 1 << 30)
    assert (found.dtype_of(Role.PREFILL), found.dtype_of(Role.DECODE)) == expected


def test_a_platform_that_is_absent_is_one_line_with_what_there_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "accelerator_at_hand", lambda: False)
    with pytest.raises(MeshError) as refused:
        devices.prepare_mesh(MeshSpec.parse(UNLIKE), "auto")
    says = rf"--mesh={UNLIKE} stands on 2 gpu devices, and this machine has \d+ cpu"
    assert re.fullmatch(says, str(refused.value))


def test_a_platform_beside_a_mesh_that_names_its_own_is_refused():
    with pytest.raises(MeshError, match=r"--platform=cpu and --mesh=.* which names its own: leave --platform out"):
        devices.prepare_mesh(MeshSpec.parse(UNLIKE), "cpu")


def test_devices_are_counted_over_all_platforms_and_found_in_the_meshs_order():
    mesh = MeshSpec.parse("prefill@cpu:tp1,decode@cpu:pp2")
    found = devices.prepare_mesh(mesh, "auto")
    assert [each.platform for each in found] == ["cpu"] * 3 and len(set(found)) == 3
