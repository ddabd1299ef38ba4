"""The file of answers: whole lines of its own, taken up where it stopped; whatever else is there stays as it is."""

import json
import os
from pathlib import Path

import pytest

from jdisagg.core.errors import OutputError
from jdisagg.serve.frontends.batch import AnswerFile
from tests.hostile.disks import full_after


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"x{i}"}) + "\n" for i in range(5)))
    return path


def row(line: int, text: str = "fine") -> dict:
    return {"line": line, "text": text, "finish_reason": "length"}


def opened(path: Path, prompts: Path) -> AnswerFile:
    return AnswerFile(path, range(5), prompts)


def test_a_run_takes_up_what_the_last_one_left(tmp_path: Path, prompts: Path):
    output = tmp_path / "out.jsonl"
    with opened(output, prompts) as answers:
        assert answers.done == set()
        answers.write(row(3, "line\u2028separator"))
        answers.write({"line": 1, "error": "too long"})
    before = output.read_bytes()
    with opened(output, prompts) as answers:
        assert answers.done == {1, 3}
        answers.write(row(0))
    assert output.read_bytes().startswith(before) and output.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("cut", [1, 5, 9, 20, 50])
def test_a_line_that_a_crash_cut_off_is_dropped_and_asked_for_again(tmp_path: Path, prompts: Path, cut: int):
    output = tmp_path / "out.jsonl"
    whole, half = json.dumps(row(2)).encode() + b"\n", json.dumps(row(4)).encode()[:cut]
    output.write_bytes(whole + half)
    with opened(output, prompts) as answers:
        assert answers.done == {2}
        answers.write(row(4))
    assert [json.loads(line)["line"] for line in output.read_bytes().splitlines()] == [2, 4]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"dear diary\n", "line 1 is not an answer"),
        (b"dear diary", "line 1 is not an answer"),
        (b'{"line": 0, "text": "a"}\nmine\n{"line": 1, "text": "b"}\n', "line 2 is not an answer"),
        (b'{"line": 0, "text": "a"}\n\n', "line 2 is not an answer"),
        (b'{"line": 0, "text": "a"}\n{"prompt": "x"', "line 2 is not an answer"),
        (b'{"line": 0, "te\n{"line": 1, "text": "b"}\n', "line 1 is not an answer"),
        (b'{"line": true, "text": "a"}\n', "line 1 is not an answer"),
        (b'{"line": 0}\n', "line 1 is not an answer"),
        (b"[0]\n", "line 1 is not an answer"),
        (b"\x00\xff\xfe binary", "line 1 is not an answer"),
        (b'{"line": 7, "text": "a"}\n', "line 1 answers line 8 of other prompts"),
    ],
)
def test_a_file_with_other_lines_is_refused_and_stays_as_it_is(
    tmp_path: Path, prompts: Path, content: bytes, says: str
):
    output = tmp_path / "precious.txt"
    output.write_bytes(content)
    with pytest.raises(OutputError, match=f"--output={output}: {says}"):
        opened(output, prompts)
    assert output.read_bytes() == content and sorted(os.listdir(tmp_path)) == ["in.jsonl", "precious.txt"]


def test_the_prompts_are_not_written_over_by_any_of_their_names(tmp_path: Path, prompts: Path):
    (tmp_path / "sub").mkdir()
    os.link(prompts, tmp_path / "other name")
    before = prompts.read_bytes()
    for name in (prompts, tmp_path / "other name", tmp_path / "sub" / ".." / "in.jsonl"):
        with pytest.raises(OutputError, match="is the file of --prompts"):
            opened(name, prompts)
    assert prompts.read_bytes() == before


def test_links_pipes_devices_and_folders_are_refused_and_stay(tmp_path: Path, prompts: Path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling"):
        with pytest.raises(OutputError, match="is a link to"):
            opened(tmp_path / name, prompts)
        assert (tmp_path / name).is_symlink()
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null"), Path("/dev/full")):
        with pytest.raises(OutputError, match="not a regular file"):
            opened(path, prompts)
    assert (tmp_path / "target").read_text() == "mine" and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("path", ["/nowhere/out.jsonl", "/proc/out.jsonl", "/dev/null/out", "/tmp/" + "a" * 300])
def test_a_place_that_cannot_be_written_is_named(prompts: Path, path: str):
    with pytest.raises(OutputError, match=f"--output={path}: .+"):
        opened(Path(path), prompts)


def test_two_runs_do_not_write_one_file(tmp_path: Path, prompts: Path):
    with opened(tmp_path / "out.jsonl", prompts) as first:
        with pytest.raises(OutputError, match="another process writes it"):
            opened(tmp_path / "out.jsonl", prompts)
        first.write(row(0))
    assert opened(tmp_path / "out.jsonl", prompts).done == {0}


def test_a_full_disk_leaves_whole_lines_and_the_next_run_goes_on(tmp_path: Path, prompts: Path):
    output = tmp_path / "out.jsonl"
    with opened(output, prompts) as answers, full_after(2000):
        answers.write(row(0, "a" * 1000))
        with pytest.raises(OutputError, match="File too large; what it has is whole"):
            answers.write(row(1, "b" * 1000))
    assert [json.loads(line)["line"] for line in output.read_text().splitlines()] == [0]
    with opened(output, prompts) as answers:
        assert answers.done == {0}
        answers.write(row(1))
    assert len(output.read_text().splitlines()) == 2


def test_a_file_that_got_no_answer_is_not_left_behind(tmp_path: Path, prompts: Path):
    with opened(tmp_path / "out.jsonl", prompts):
        assert (tmp_path / "out.jsonl").exists()
    assert not (tmp_path / "out.jsonl").exists()
    (tmp_path / "empty").touch()
    opened(tmp_path / "empty", prompts).close()
    assert (tmp_path / "empty").exists(), "it was there before"
