"""A pair that serves matrices in bf16 or int8: compiled once, the same answers in company, alone and on one mesh."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jdisagg
from jdisagg.core.events import KVArrived
from jdisagg.core.model_config import WeightFormat
from jdisagg.model.sources import HFSource
from tests.fixtures import conformance
from tests.fixtures.quantized_folders import compressed

FAMILY = conformance.load("llama3")
GREEDY = jdisagg.SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(0,), ignore_eos=True)
SIZES: dict[str, Any] = {
    "max_model_len": 64,  # the longest prompt, and what it is asked for
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 16,
    "prefix_caching": "off",  # so that nothing of a prompt is computed in one company and read in another
}
STORED = {"bfloat16": jnp.bfloat16, "int8": jnp.int8}
pytestmark = pytest.mark.slow


@contextmanager
def running(mesh: str, weight_dtype: str, folder: Path = FAMILY.folder, **settings: Any) -> Iterator[jdisagg.LLM]:
    with jdisagg.LLM(model=str(folder), mesh=mesh, weight_dtype=weight_dtype, **{**SIZES, **settings}) as llm:
        yield llm


def together(llm: jdisagg.LLM) -> list[tuple[int, ...]]:
    return [tuple(answer.token_ids) for answer in llm.generate_all(FAMILY.prompts, GREEDY)]


def alone(llm: jdisagg.LLM) -> list[tuple[int, ...]]:
    return [tuple(llm.generate(prompt, GREEDY).token_ids) for prompt in FAMILY.prompts]


def numbers(llm: jdisagg.LLM) -> set[Any]:
    """What the first matrices of all workers' layers hold."""
    groups = [group for machine in llm.service.driver.executors.by_worker.values() for group in machine.layer_groups]
    stages = [group.params.merge(group.params.leaves) for group in groups]
    return {stage.layers[0].mlp.gate_up.kernel[...].dtype for stage in stages}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_pair_with_rounded_weights_answers_the_same_in_company_alone_and_on_one_mesh(dtype: str):
    with running("prefill:tp2,decode:pp2", dtype) as llm:
        found = together(llm)
        assert alone(llm) == found
        assert llm.service.recompiles() == 0
        assert numbers(llm) == {jnp.dtype(STORED[dtype])}
    with running("colocated:tp1", dtype) as llm:
        assert together(llm) == found


def test_pages_stay_as_they_were_beside_int8_weights_and_may_be_quantised_for_the_way():
    with running("prefill:tp2,decode:pp2", "int8", transfer_compress="int8") as llm:
        assert llm.deployment.kv.dtype == llm.deployment.prefill_kv.dtype == "float32"
        answers = together(llm)
        arrived = [entry.event for entry in llm.service.journal.entries if isinstance(entry.event, KVArrived)]
        assert arrived and all(event.intact and event.transfer.wire == "int8" for event in arrived)
        assert llm.service.recompiles() == 0
    pairs = [pair for rows in zip(answers, FAMILY.greedy, strict=True) for pair in zip(*rows, strict=True)]
    assert sum(one == other for one, other in pairs) / len(pairs) > 0.7


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as compressed-tensors writes W8A8: projections in int8, a scale a channel, activations by token."""
    folder = shutil.copytree(FAMILY.folder, tmp_path_factory.mktemp("stored") / "w8a8")
    source, tensors = HFSource(FAMILY.folder), dict[str, np.ndarray]()
    for name in source.names:
        whole = source.read(name, tuple(slice(0, size) for size in source.shape(name) or ()))
        tensors[name] = np.asarray(whole, np.float32)
        if name.endswith("_proj.weight"):
            scale = np.abs(tensors[name]).max(axis=1, keepdims=True) / np.float32(120)  # not as rounding would choose
            tensors[name] = np.rint(tensors[name] / scale).astype(np.int8)
            tensors[f"{name}_scale"] = scale
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")
    said = compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True})
    said["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_int8_checkpoint_is_served_by_its_own_numbers_and_answers_the_same_on_one_mesh(stored: Path):
    with running("prefill:tp2,decode:pp2", "stored", stored) as llm:
        assert llm.deployment.weights == WeightFormat("int8", frozenset({"head"}))
        found = together(llm)
        assert alone(llm) == found and llm.service.recompiles() == 0
        groups = llm.service.driver.executors.by_worker["decode-0"].layer_groups
        first = groups[0].params.merge(groups[0].params.leaves).layers[0].mlp.down
    expected = HFSource(stored).read("model.layers.0.mlp.down_proj.weight", (slice(0, 64), slice(0, 128)))
    assert np.asarray(first.kernel[...]).tobytes() == expected.tobytes()
    with running("colocated:tp1", "stored", stored) as llm:
        assert together(llm) == found
    pairs = [pair for rows in zip(found, FAMILY.greedy, strict=True) for pair in zip(*rows, strict=True)]
    assert sum(one == other for one, other in pairs) / len(pairs) > 0.7
