"""Pages are as they are made, lead where they say, and name what there is."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.entry import BAD_USE
from docs.generate.__main__ import MARKED, PAGES, TABLES, behind, written
from docs.generate.flags_page import declared
from jdisagg import flags
from jdisagg.__main__ import commands as all_commands
from tests.docs.pages import DOCS, ROOT, anchors, commands, links, name_of, pages
from tests.environment import as_users

README = (ROOT / "README.md").read_text(encoding="utf-8")
PATHS = re.compile(r"`((?:jdisagg|pallas_kernels|launch|configs|tests|benchmarks|docs)/[\w./]*)`")
OURS = [(page, command) for page in pages() for command in commands(page.read_text(encoding="utf-8"))]
RUNNABLE = {"jdisagg calc", "jdisagg plan", "tests.explore"}
FUNCTIONS = re.compile(r"`([\w/]+\.py):([\w.]+)`")
PRIVATE = ("/work/", "issue 12", "brief")


def test_generated_pages_are_as_they_are_made_now():
    assert not [name_of(path) for path in behind()], "run python -m docs.generate"


def test_a_page_that_was_changed_by_hand_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in PAGES:
        (tmp_path / name).write_text("by hand", encoding="utf-8")
    monkeypatch.setattr("docs.generate.__main__.DOCS", tmp_path)
    assert {path.name for path in behind()} >= PAGES.keys()


def test_every_table_stands_in_a_page():
    named = {name for page in written() for _, name, _ in MARKED.findall(page.read_text(encoding="utf-8"))}
    assert named == TABLES.keys()


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_link_leads_somewhere(page: Path):
    wrong = []
    for link in links(page.read_text(encoding="utf-8")):
        place, _, anchor = link.partition("#")
        if not place.startswith(("http:", "https:", "mailto:")):
            target = (page.parent / place).resolve() if place else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_path_a_page_names_is_there(page: Path):
    text = page.read_text(encoding="utf-8")
    assert not [path for path in PATHS.findall(text) if not (ROOT / path).exists()]
    assert not [word for word in PRIVATE if word in text]


def definitions(path: Path) -> Iterator[str]:
    """Yields the functions and classes that a file defines, a method as "Class.method"."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            yield from (f"{node.name}.{each.name}" for each in methods)


def test_every_function_that_a_page_names_is_defined():
    named = [(page, *each) for page in pages() for each in FUNCTIONS.findall(page.read_text(encoding="utf-8"))]
    assert len(named) > 20, "docs/architecture.md names the functions on the way of a request"
    defined = {file: {*definitions(ROOT / "jdisagg" / file)} for _, file, _ in named}
    assert not [f"{page.name}: {file}:{name}" for page, file, name in named if name not in defined[file]]


def test_a_function_that_is_not_there_is_noticed():
    router = ROOT / "jdisagg" / "policy" / "router" / "router.py"
    found = {*definitions(router)}
    assert {"Router", "Router.handle"} <= found and "Router.handel" not in found
    assert not [*definitions(router.with_name("none.py"))]


def test_every_page_of_docs_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [page.name for page in DOCS.glob("*.md") if f": {page.name}\n" not in nav]


def test_the_readme_is_short():
    assert len(README.splitlines()) < 150


def told(each: Path | list[str]) -> str:
    return name_of(each) if isinstance(each, Path) else " ".join(each)


def flags_of(module: str) -> flags.FlagValues:
    """Returns the flags of "jdisagg COMMAND", "jdisagg.launch" or a benchmark's module."""
    if module.startswith("jdisagg"):
        return declared(module.replace(".", " ").partition(" ")[2])
    return importlib.import_module(module).FLAGS


@pytest.mark.parametrize(("page", "command"), OURS, ids=told)
def test_the_flags_of_every_command_in_a_page_are_there(page: Path, command: list[str]):
    if command[0] == "bash":
        assert (ROOT / command[1]).exists()
        values = declared("launch") if command[1] in ("launch/demo.sh", "launch/cluster.sh") else None
        words = command[2:]
    else:
        ours = command[2].startswith("jdisagg")
        assert ours or importlib.util.find_spec(command[2])
        values = flags_of(command[2]) if ours else None
        words = command[3:]
    if values is None:
        return
    words = [word for word in words if word.startswith("--") and "..." not in word]
    flags.read(values, ["page", *words])


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), [each for each in OURS if RUNNABLE & {*each[1]}], ids=told)
def test_what_can_run_runs(page: Path, command: list[str], tmp_path: Path):
    """FILE stands for a trace of the reader's, plan.toml for a plan that was made; a search is made small."""
    trace = ROOT / "tests" / "fixtures" / "traces" / "azure_conv_first_400.csv"
    words = [word.replace("FILE", str(trace)) for word in command[3:] if not word.startswith("--output")]
    if any(word.startswith("--emit") for word in words):
        words = [word.replace("plan.toml", "configs/pod_70b.toml") for word in words] + [f"--job_folder={tmp_path}"]
    elif command[2] == "jdisagg plan":
        words = [*(word for word in words if "--devices" not in word), "--devices=2", "--quick", "--rate=2"]
        words = [word.replace("llama3-70b", "llama3-8b") for word in [*words, "--nosensitivity"]]
    if command[2] == "tests.explore":
        words = [re.sub(r"walks=\d+", "walks=5", word) for word in words]
        words = [word.replace("requests=2", "requests=1") for word in words]
    done = subprocess.run(
        [sys.executable, "-m", *command[2].split(), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", all_commands())
def test_every_command_tells_its_flags(name: str):
    done = subprocess.run(
        [sys.executable, "-m", "jdisagg", name, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and "--config" in done.stdout and not done.stderr


@pytest.mark.slow
def test_the_python_of_the_readme_runs_as_it_stands():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    done = subprocess.run(
        [sys.executable, "-c", code[1]], capture_output=True, text=True, timeout=280, env=as_users(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 40


def test_a_command_that_is_not_there_is_refused_with_the_nearest():
    done = subprocess.run(
        [sys.executable, "-m", "jdisagg", "lanch"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == BAD_USE and done.stderr == "jdisagg: unknown command 'lanch'; did you mean launch?\n"


def test_help_lists_every_command_in_a_line_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "jdisagg", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert done.returncode == 0 and listed == all_commands().keys() >= {"launch", "sim", "plan", "calc"}
