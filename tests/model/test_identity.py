"""Every byte of a model is in its fingerprint, wherever it lies; a second start reads none of them again."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jdisagg.core.errors import CheckpointError
from jdisagg.core.model_identity import ModelIdentity
from jdisagg.model import identity
from jdisagg.model.checkpoint import read_model, save_orbax
from jdisagg.model.identity import ModelFiles, hash_files
from tests.fixtures.conformance import ROOT
from tests.fixtures.gguf_files import QUANTISED
from tests.fixtures.other_weights import EMBEDDED, change_weights

OLD_NS = 1_600_000_000_000_000_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The embedded model, with a chat template of its own."""
    folder = shutil.copytree(EMBEDDED, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


def files_of(folder: Path, cache: Path | None = None, load_format: str = "hf", seed: int = 0) -> ModelFiles:
    return ModelFiles(folder, read_model(folder), load_format, seed, folder, cache)


def identity_of(folder: Path, cache: Path | None = None) -> ModelIdentity:
    return files_of(folder, cache).identity


def flip(path: Path, at: int = -2) -> None:
    """Changes one byte and nothing else that a listing of the folder shows."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "matrices": (change_weights, "weights"),
    "one byte of the weights": (lambda folder: flip(folder / "model.safetensors"), "weights"),
    "a byte of config.json": (lambda folder: flip(folder / "config.json", 3), "config"),
    "a byte of generation_config.json": (lambda folder: flip(folder / "generation_config.json", -1), "config"),
    "a byte of tokenizer.json": (lambda folder: flip(folder / "tokenizer.json", 100), "tokenizer"),
    "a byte of tokenizer_config.json": (lambda folder: flip(folder / "tokenizer_config.json", 10), "tokenizer"),
    "the chat template": (lambda folder: flip(folder / "chat_template.jinja"), "tokenizer"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_same_size_gives_another_fingerprint_and_says_which_part_differs(change: str, model: Path):
    before = identity_of(model)
    if change.startswith("a byte of") and "tokenizer" not in change:
        read = read_model(model)  # the file still has to be JSON: only its blanks change
        path = model / change.removeprefix("a byte of ")
        path.write_text(path.read_text().replace("\n  ", "\n\t ", 1))
        assert read_model(model) == read
    else:
        CHANGES[change][0](model)
    after, part = identity_of(model), CHANGES[change][1]
    assert before.fingerprint != after.fingerprint and getattr(before, part) != getattr(after, part)
    assert part == "tokenizer" or before.tokenizer == after.tokenizer or part == "config"
    assert part == "weights" or before.weights == after.weights


def test_the_same_bytes_elsewhere_and_at_another_time_are_the_same_model(model: Path, tmp_path: Path):
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    for path in copy.iterdir():
        os.utime(path, ns=(OLD_NS, OLD_NS))
    assert identity_of(copy) == identity_of(model)


def test_the_names_of_files_count_and_so_does_which_file_holds_what(tmp_path: Path):
    def made(**contents: bytes) -> str:
        folder = shutil.copytree(ROOT / "llama3", tmp_path / str(len(list(tmp_path.iterdir()))))
        for path in folder.glob("*.safetensors"):
            path.unlink()
        for name, content in contents.items():
            (folder / f"{name}.safetensors").write_bytes(content)
        return identity_of(folder).weights

    found = [made(a=b"xy", b=b"z"), made(a=b"x", b=b"yz"), made(a=b"z", b=b"xy"), made(a=b"xyz"), made(c=b"xyz")]
    assert len(set(found)) == 5


def test_orbax_folders_of_other_arrays_are_other_models_and_their_time_of_writing_is_not_read(tmp_path: Path):
    def saved(name: str, factor: float) -> Path:
        folder = tmp_path / name
        shutil.copytree(ROOT / "qwen2", folder, ignore=shutil.ignore_patterns("*.safetensors"))
        tensors = {
            key: value for path in (ROOT / "qwen2").glob("*.safetensors") for key, value in load_file(path).items()
        }
        save_orbax(folder, {key: (np.float32(factor) * value).astype(value.dtype) for key, value in tensors.items()})
        return folder

    first, second = (saved(name, factor) for name, factor in (("first", 1.0), ("second", 1.25)))
    one, other = (files_of(folder, None, "orbax").identity for folder in (first, second))
    assert one.weights != other.weights and (one.config, one.tokenizer) == (other.config, other.tokenizer)
    copy = shutil.copytree(first, tmp_path / "copy")
    (copy / "weights" / "_CHECKPOINT_METADATA").write_text('{"init_timestamp_nsecs": 1}')
    assert files_of(copy, None, "orbax").identity == one


def test_a_gguf_file_is_its_bytes(tmp_path: Path):
    path = QUANTISED["llama"].write(tmp_path / "tiny.gguf")
    before = identity_of(path)
    flip(path)
    after = identity_of(path)
    assert before.weights != after.weights and before.tokenizer != after.tokenizer


def test_random_weights_are_their_seed_and_their_configuration(model: Path):
    found = {files_of(model, None, "random", seed).identity.weights for seed in (0, 0, 1)}
    assert len(found) == 2
    change_weights(model)
    assert files_of(model, None, "random").identity.weights in found, "no file of weights is read"
    config = replace(read_model(model), rms_norm_eps=1e-3)
    assert ModelFiles(model, config, "random").identity.weights not in found


def test_updated_weights_are_another_model(model: Path):
    found = identity_of(model)
    updated = replace(found, weights_version=1)
    assert updated.fingerprint != found.fingerprint and "version 1" in updated.described("m")


def test_a_file_of_several_blocks_is_read_whole_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(identity, "BLOCK_BYTES", 4)
    found = []
    for content in (b"aaaabbbbcc", b"bbbbaaaacc", b"aaaabbbbcd", b"aaaabbbb", b"aaaabbbbcc"):
        path = tmp_path / "file"
        path.write_bytes(content)
        found.append(hash_files({path: len(content)})[path])
    assert len(set(found)) == 4 and found[0] == found[-1]


# ------------------------------------------------------------ the second start


@pytest.fixture
def settled(model: Path) -> Path:
    """The model, as if it had lain there for a while."""
    for path in model.rglob("*"):
        os.utime(path, ns=(OLD_NS, OLD_NS))
    return model


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read, in the order of their reading; ctimes count as old."""
    names, plain = list[str](), identity.hash_files

    def noted(sizes: dict[Path, int]) -> dict[Path, bytes]:
        names.extend(path.name for path in sizes)
        return plain(sizes)

    monkeypatch.setattr(identity, "hash_files", noted)
    monkeypatch.setattr(identity, "SETTLED_NS", -(1 << 62))
    return names


def test_a_second_start_reads_nothing(settled: Path, tmp_path: Path, hashed: list[str]):
    first = identity_of(settled, tmp_path / "cache")
    assert "model.safetensors" in hashed
    hashed.clear()
    assert identity_of(settled, tmp_path / "cache") == first and not hashed


@pytest.mark.parametrize("change", [change_weights, lambda folder: flip(folder / "model.safetensors")])
def test_a_file_that_was_written_since_is_read_again_even_with_its_old_mtime(
    change: Callable[[Path], None], settled: Path, tmp_path: Path, hashed: list[str]
):
    first = identity_of(settled, tmp_path / "cache")
    hashed.clear()
    change(settled)
    os.utime(settled / "model.safetensors", ns=(OLD_NS, OLD_NS))
    assert identity_of(settled, tmp_path / "cache").weights != first.weights and hashed == ["model.safetensors"]


def test_a_file_put_in_anothers_place_is_read_again(settled: Path, tmp_path: Path, hashed: list[str]):
    first = identity_of(settled, tmp_path / "cache")
    other = tmp_path / "other.safetensors"
    shutil.copy2(settled / "model.safetensors", other)
    flip(other)
    os.replace(other, settled / "model.safetensors")
    assert identity_of(settled, tmp_path / "cache").weights != first.weights


def test_a_file_written_just_now_is_not_trusted_to_stay(model: Path, tmp_path: Path):
    identity_of(model, tmp_path / "cache")
    text = (tmp_path / "cache" / identity.CACHE_FILE).read_text()
    assert "model.safetensors" not in text


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: '{"version": 1, "files": []}',
        lambda text: text.replace('"version": 1', '"version": 99'),
        lambda text: text.replace("[", "[[").replace("]", "]]"),
        lambda text: text.replace('"]', '00"]'),
    ],
)
def test_a_damaged_cache_is_computed_again_and_mended(
    damage: Callable[[str], str], settled: Path, tmp_path: Path, hashed: list[str]
):
    cache = tmp_path / "cache" / identity.CACHE_FILE
    first = identity_of(settled, cache.parent)
    cache.write_text(damage(cache.read_text()))
    hashed.clear()
    assert identity_of(settled, cache.parent) == first and "model.safetensors" in hashed
    hashed.clear()
    assert identity_of(settled, cache.parent) == first and not hashed


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(settled: Path, tmp_path: Path, hashed: list[str]):
    (tmp_path / "file").write_text("")
    found = [identity_of(settled, tmp_path / "file") for _ in range(2)]
    assert found[0] == found[1] == identity_of(settled) and hashed.count("model.safetensors") == 3


def test_entries_of_files_that_are_gone_are_dropped(settled: Path, tmp_path: Path, hashed: list[str]):
    copy, cache = shutil.copytree(settled, tmp_path / "copy"), tmp_path / "cache"
    identity_of(copy, cache)
    shutil.rmtree(copy)
    identity_of(settled, cache)
    text = (cache / identity.CACHE_FILE).read_text()
    assert str(settled) in text and str(copy) not in text


def test_a_file_that_changes_while_the_model_is_loaded_ends_the_start(model: Path):
    files = files_of(model)
    assert files.identity
    files.check_unchanged()
    change_weights(model)
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed while the model was loaded"):
        files.check_unchanged()


def test_a_slow_read_is_said_in_the_log(model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(identity, "SLOW_S", 0.0)
    with caplog.at_level(logging.WARNING):
        identity_of(model)
    assert f"the fingerprint of {model}: read" in caplog.text and "every start reads them" in caplog.text
