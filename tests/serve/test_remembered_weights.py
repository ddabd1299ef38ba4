"""What was measured of a model's weights on this machine, found again by the next start as long as nothing changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import jax
import pytest

from jdisagg.core.model_config import WeightFormat
from jdisagg.core.settings import Settings
from jdisagg.model.checkpoint import open_source
from jdisagg.model.names import Index
from jdisagg.model.sources import HFSource
from jdisagg.parallel.topology import machine_name
from jdisagg.serve.deploy.assemble import choose_weights
from jdisagg.serve.deploy.deployment import resolve_deployment
from jdisagg.serve.driver.role_change import Choice, ChoiceMemory, choices_folder, key_of
from tests.fixtures.conformance import ROOT

KEPT = WeightFormat("int8", frozenset({"1.mlp.down"}))


class Unreadable(HFSource):
    """Whoever measures reads weights."""

    def read(self, name: str, index: Index) -> Any:
        raise AssertionError(f"{name} was read")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(ROOT / "qwen2", tmp_path / "model")


def asked(model: Path, **settings: Any) -> Settings:
    return Settings(**{"model": str(model), "mesh": "prefill:tp1,decode:tp1", "weight_dtype": "auto", **settings})


def start(settings: Settings, folder: Path | None, source: HFSource | None = None) -> tuple[WeightFormat, str]:
    """The weights of one start, and the line that it tells."""
    deployment, told = resolve_deployment(settings, "cpu", None), list[str]()
    found = source or open_source(settings.model, "hf", deployment.model)
    weights = choose_weights(deployment, settings, found, told.append, folder)
    (line,) = told
    return weights, line


def memory(settings: Settings, folder: Path) -> ChoiceMemory:
    return ChoiceMemory.of(resolve_deployment(settings, "cpu", None), folder)


@pytest.mark.parametrize("weight_dtype", ["auto", "int8"])
def test_a_second_start_takes_what_the_first_one_measured_and_says_since_when(
    weight_dtype: str, model: Path, tmp_path: Path
):
    settings, folder = asked(model, weight_dtype=weight_dtype), tmp_path / "kept"
    weights, line = start(settings, folder)
    assert line.endswith("; measured") and [path.suffix for path in folder.iterdir()] == [".json"]
    again, later = start(settings, folder, Unreadable(model))
    assert again == weights
    assert later == line.removesuffix("measured") + f"remembered from {date.today().isoformat()}", "the same figures"


def test_nothing_is_kept_where_compiled_programs_are_not(model: Path, tmp_path: Path):
    settings = asked(model, weight_dtype="int8")
    assert all(start(settings, None)[1].endswith("; measured") for _ in range(2))


def change_a_byte(model: Path) -> None:
    path = next(model.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"weight_dtype": "int8"}, None),
        ({"mesh": "prefill:tp1,decode:pp2"}, None),
        ({"max_num_seqs": 3}, None),
        ({"dtype": "bfloat16"}, None),
        ({}, change_a_byte),
    ],
    ids=["asked", "mesh", "rows", "dtype", "files"],
)
def test_what_another_run_measured_is_not_taken(
    settings: dict[str, Any], change: Callable[[Path], None] | None, model: Path, tmp_path: Path
):
    memory(asked(model), tmp_path).keep(Choice(KEPT, "auto: int8", "2026-01-02"))
    assert memory(asked(model), tmp_path).find() == Choice(KEPT, "auto: int8", "2026-01-02")
    if change is not None:
        change(model)
    assert memory(asked(model, **settings), tmp_path).find() is None


@pytest.mark.parametrize("word", ["machine", "cores", "versions", "code"])
def test_another_machine_version_or_code_measures_for_itself(word: str, model: Path, tmp_path: Path):
    here = memory(asked(model), tmp_path)
    assert word in key_of(resolve_deployment(asked(model), "cpu", None))
    replace(here, key=here.key | {word: "another"}).keep(Choice(KEPT, "auto: int8", "2026-01-02"))
    assert here.find() is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"int8"', '"int3"'),
        lambda text: text.replace('"1.mlp.down"', '"99.mlp.down"'),
        lambda text: text.replace('"1.mlp.down"', "[7]"),
        lambda text: text.replace('"int8"', '["int8"]'),
        lambda text: text.replace('"2026-01-02"', "null"),
    ],
)
def test_a_damaged_file_is_measured_over(damage: Callable[[str], str], model: Path, tmp_path: Path):
    here = memory(asked(model), tmp_path)
    here.keep(Choice(KEPT, "auto: int8", "2026-01-02"))
    (path,) = tmp_path.glob("weights-*.json")
    assert json.loads(path.read_text())["full"] == ["1.mlp.down"]
    path.write_text(damage(path.read_text()))
    assert here.find() is None


def test_a_folder_that_cannot_be_written_costs_a_warning(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    memory(asked(model), tmp_path / "file").keep(Choice(KEPT, "auto: int8", "2026-01-02"))
    assert "not kept for the next start" in caplog.text


def test_choices_lie_in_the_machines_own_folder_of_the_compile_cache():
    before = {name: jax.config.values[name] for name in ("jax_compilation_cache_dir", "jax_enable_compilation_cache")}
    try:
        jax.config.update("jax_enable_compilation_cache", True)
        for given, found in (("/a", f"/a/{machine_name()}"), (f"/a/{machine_name()}", f"/a/{machine_name()}")):
            jax.config.update("jax_compilation_cache_dir", given)
            assert choices_folder() == Path(found)
        jax.config.update("jax_enable_compilation_cache", False)
        assert choices_folder() is None
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
