"""Hugging Face -> Orbax -> Hugging Face: nothing is lost, and each kind loads into shards."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jdisagg.commands.convert import main
from jdisagg.core.errors import CheckpointError, FlagError
from jdisagg.model.checkpoint import OrbaxSource, open_source
from jdisagg.model.export import checkpoint_tensors, save_hf
from jdisagg.model.hf_config import read_config
from jdisagg.model.network import forward
from jdisagg.model.params import StageSpec, load_stage
from jdisagg.model.sources import HFSource
from jdisagg.model.tokenizer import Tokenizer
from tests.fixtures.conformance import ROOT, load
from tests.hostile.disks import full_after
from tests.hostile.model_folders import copy, pipe
from tests.model.sharded import mesh_of


def run(source: Path, target: Path, fmt: str, *more: str) -> int:
    return main(["convert", f"--input={source}", f"--output={target}", f"--format={fmt}", *more])


@pytest.fixture(scope="module")
def orbax_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "orbax"
    assert run(ROOT / "qwen2", target, "orbax") == 0
    return target


@pytest.mark.parametrize("tp", [1, 4])
def test_an_orbax_checkpoint_restores_into_the_same_shards(orbax_folder: Path, tp: int):
    config, mesh = read_config(orbax_folder), mesh_of(tp)
    sources = [open_source(ROOT / "qwen2", "hf", config), open_source(orbax_folder, "orbax", config)]
    straight, restored = (load_stage(each, StageSpec(config, range(4), mesh, jnp.float32)) for each in sources)
    assert straight.specs == restored.specs
    for ours, theirs in zip(straight.leaves, restored.leaves, strict=True):
        assert ours.sharding == theirs.sharding
        np.testing.assert_array_equal(ours, theirs)


def test_config_and_tokenizer_come_along(orbax_folder: Path):
    assert read_config(orbax_folder) == read_config(ROOT / "qwen2")
    messages = [{"role": "user", "content": "hello"}]
    assert Tokenizer(orbax_folder).chat(messages) == Tokenizer(ROOT / "qwen2").chat(messages)


def test_the_way_back_gives_the_same_bytes(orbax_folder: Path, tmp_path: Path):
    assert run(orbax_folder, tmp_path / "back", "hf") == 0
    before, after = HFSource(ROOT / "qwen2"), HFSource(tmp_path / "back")
    assert before.names == after.names
    for name, tensor in load_file(tmp_path / "back" / "model.safetensors").items():
        found = before.read(name, tuple(slice(0, size) for size in tensor.shape))
        assert found.dtype == tensor.dtype
        assert found.tobytes() == tensor.tobytes()


def test_a_dtype_is_cast_and_written_into_the_config(tmp_path: Path):
    assert run(ROOT / "llama3", tmp_path / "f32", "hf", "--dtype=float32") == 0
    tensors = load_file(tmp_path / "f32" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}
    assert json.loads((tmp_path / "f32" / "config.json").read_text())["torch_dtype"] == "float32"


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_a_model_in_memory_is_written_as_files_that_give_the_same_logits(family: str, tmp_path: Path):
    fixture = load(family)
    config = read_config(fixture.folder)
    params = load_stage(HFSource(fixture.folder), StageSpec(config, range(4), mesh_of(1), jnp.float32))
    save_hf(tmp_path, checkpoint_tensors(params.merge(params.leaves)), file_bytes=300_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = load_stage(HFSource(tmp_path), StageSpec(config, range(4), mesh_of(1), jnp.float32))
    logits = jax.jit(lambda leaves, tokens: forward(again.merge(leaves), tokens))
    tokens = np.array(fixture.prompts[0])[None]
    assert np.abs(np.asarray(logits(again.leaves, tokens))[0] - fixture.logits[0]).max() <= 1e-4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--input=/nowhere", "--output=OUT"], "/nowhere"),
        (["--output=OUT"], "--input=FOLDER"),
        (["--inputt=x", "--output=OUT"], "inputt"),
        ([f"--input={ROOT / 'qwen2'}", "--output=OUT", "--format=gguf"], "orbax|hf"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["convert", *(each.replace("OUT", str(tmp_path / "out")) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def test_a_folder_that_holds_something_is_not_written_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "precious").write_text("mine")
    assert run(ROOT / "qwen2", tmp_path, "orbax") == 2
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "precious").read_text() == "mine"


def test_an_unknown_load_format_is_named():
    with pytest.raises(FlagError, match="gguf"):
        open_source(ROOT / "qwen2", "gguf", read_config(ROOT / "qwen2"))


def test_an_orbax_source_names_what_it_does_not_have(orbax_folder: Path):
    assert OrbaxSource(orbax_folder).shape("lm_head.weight") is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a thread that orbax left behind
@pytest.mark.parametrize("fmt", ["orbax", "hf"])
def test_a_full_disk_is_one_line_and_leaves_nothing(fmt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with full_after(100_000):
        assert run(ROOT / "qwen2", tmp_path / "out", fmt) == 2
    error = capsys.readouterr().err
    assert f"cannot write {tmp_path / 'out'}: " in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["a file", "/proc/model", "/dev/null/model"])
def test_a_place_that_cannot_be_written_is_one_line(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a file").write_text("mine")
    assert run(ROOT / "qwen2", tmp_path / target, "hf") == 2
    error = capsys.readouterr().err
    assert "cannot write" in error and error.count("\n") == 1
    assert (tmp_path / "a file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_a_pipe_among_the_companions_is_refused_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = copy(tmp_path / "model")
    pipe(source, "vocab.json")
    assert run(source, tmp_path / "out", "hf") == 2
    assert "vocab.json is a pipe" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_damaged_orbax_checkpoint_is_one_line(orbax_folder: Path, tmp_path: Path):
    config = read_config(orbax_folder)
    files = [path for path in (orbax_folder / "weights").rglob("*") if path.is_file()]
    for number, path in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(orbax_folder, folder)
        damaged = folder / path.relative_to(orbax_folder)
        damaged.write_bytes(damaged.read_bytes()[: path.stat().st_size // 2])
        try:
            load_stage(OrbaxSource(folder), StageSpec(config, range(4), mesh_of(1), jnp.float32))
        except CheckpointError as error:
            assert "\n" not in str(error) and str(folder) in str(error)


def test_a_pipe_in_an_orbax_checkpoint_is_refused(orbax_folder: Path, tmp_path: Path):
    shutil.copytree(orbax_folder, tmp_path / "model")
    os.mkfifo(tmp_path / "model" / "weights" / "more")
    with pytest.raises(CheckpointError, match="more is a pipe"):
        OrbaxSource(tmp_path / "model")
