"""The laws of the house, read from the source: who may import whom, what is pure, and how long things may be."""

from __future__ import annotations

import ast
import importlib
import io
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest

ROOT = Path(__file__).parent.parent
ENTRY = 6
FLOORS = {
    "core": 0,
    "policy": 1,
    "cluster": 1,
    "parallel": 2,
    "model": 3,
    "kv": 3,  # the bytes of a network and the network know nothing of each other
    "engine": 4,
    "training": 4,
    "serve": 5,
    "sim": 5,
    "profiling": 5.5,  # times the programs of a stack that serve builds
}
WITHOUT_JAX = ("core", "policy", "cluster", "sim")
PURE = ("core", "policy")
STDLIB_ONLY = (*PURE, "cluster")
IMPURE_MODULES = {"time", "threading", "asyncio", "logging", "random", "numpy", "os", "socket", "subprocess"}
BANNED_WORDS = {"manager", "helper", "helpers", "util", "utils", "misc", "common", "base", "handler", "context"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 50


def sources(*folders: str) -> list[Path]:
    """Python files of our own, generated ones apart."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "_pb2" not in path.name]


OURS = sources("jdisagg", "pallas_kernels")
EVERYTHING = [*OURS, *sources("tests", "benchmarks")]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported; `from a import b` gives a.b."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def room_of(path: Path) -> str:
    """Returns the package under jdisagg, or "" for an entry file."""
    parts = path.relative_to(ROOT / "jdisagg").parts
    return parts[0] if len(parts) > 1 and parts[0] != "commands" else ""


def in_rooms(*rooms: str) -> list[Path]:
    return [path for path in OURS if path.is_relative_to(ROOT / "jdisagg") and room_of(path) in rooms]


def is_entry(path: Path) -> bool:
    return path.parent in (ROOT / "jdisagg", ROOT / "jdisagg" / "commands") or path.name == "__main__.py"


def wrong_imports(path: Path, allowed: set[str]) -> list[str]:
    """Imports of rooms of jdisagg that are not `allowed`; entry files count as the room ""."""
    wrong = []
    for line, dotted in imports(path):
        parts = dotted.split(".")
        if dotted in ("jdisagg", "jdisagg.__version__"):
            wrong += [each for each in uses_of_the_package(path) if not each.endswith("jdisagg.__version__")]
        elif parts[0] == "jdisagg":
            room = parts[1] if len(parts) > 1 and parts[1] in FLOORS else ""
            if room not in allowed:
                wrong.append(f"{name_of(path)}:{line} imports {dotted}")
    return wrong


def uses_of_the_package(path: Path) -> list[str]:
    """`jdisagg.x` as written in expressions: whoever wants more than the version imports it by name."""
    attributes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)]
    found = [node for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "jdisagg"]
    return [f"{name_of(path)}:{node.lineno} uses {ast.unparse(node)}" for node in found]


@pytest.mark.parametrize("room", FLOORS)
def test_imports_go_down_only(room):
    below = {other for other, floor in FLOORS.items() if floor < FLOORS[room]} | {room}
    paths = in_rooms(room)
    assert paths, f"no file in {room}"
    assert not [wrong for path in paths for wrong in wrong_imports(path, below | {""} if is_entry(path) else below)]


def test_engines_and_bytes_do_not_know_the_decisions():
    assert not [
        f"{name_of(path)}:{line}"
        for path in in_rooms("engine", "kv", "model", "parallel")
        for line, dotted in imports(path)
        if dotted.startswith("jdisagg.policy.")
    ]


def test_the_cellar_knows_nothing_of_the_house():
    paths = sources("pallas_kernels")
    assert paths and not [wrong for path in paths for wrong in wrong_imports(path, set())]


@pytest.mark.parametrize("room", WITHOUT_JAX)
def test_decisions_and_simulation_are_free_of_jax(room):
    roots = {(name_of(path), dotted.split(".")[0]) for path in in_rooms(room) for _, dotted in imports(path)}
    assert not [each for each in roots if each[1] in ("jax", "jaxlib", "flax", "optax", "orbax")]


@pytest.mark.parametrize("room", PURE)
def test_decisions_read_no_clock_and_draw_no_lots(room):
    roots = {(name_of(path), dotted.split(".")[0]) for path in in_rooms(room) for _, dotted in imports(path)}
    assert not [each for each in roots if each[1] in IMPURE_MODULES]


def test_tables_of_the_decisions_are_read_only():
    modules = [
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in in_rooms("policy")
    ]
    assert any(isinstance(each, MappingProxyType) for module in modules for each in vars(module).values())
    assert not [
        f"{module.__name__}.{name}"
        for module in modules
        for name, each in vars(module).items()
        if name.isupper() and isinstance(each, (dict, list, set))
    ]


def test_tests_patch_a_copy_of_a_table_and_never_the_table():
    """Deleting a row and putting it back moves the row to the end, so that the table's documentation changes."""
    found = [
        f"{name_of(path)}:{node.lineno} {ast.unparse(node)}"
        for path in sources("tests")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("monkeypatch.setitem", "monkeypatch.delitem")
    ]
    assert not [each for each in found if "(sys.modules, " not in each and "(os.environ, " not in each]


def test_the_packages_below_jax_import_the_standard_library_and_msgspec_only():
    """Records of core are msgspec structs. msgspec is C without dependencies, and reads no clock, file or network."""
    ours = {"jdisagg", *sys.stdlib_module_names}
    found = {(name_of(path), dotted.split(".")[0]) for path in in_rooms(*STDLIB_ONLY) for _, dotted in imports(path)}
    assert {(path, name) for path, name in found if name not in ours} == {
        (name, "msgspec") for name, root in found if root == "msgspec" and name.startswith("jdisagg/core/")
    }


@cache
def kinds_of_effects() -> set[str]:
    """Names in `Effect = Send | RunStep | ...`."""
    tree = tree_of(ROOT / "jdisagg" / "core" / "events.py")
    unions = [node.value for node in tree.body if isinstance(node, ast.Assign) and names_of(node.targets) == {"Effect"}]
    return names_of(unions)


def names_of(nodes: list[ast.expr]) -> set[str]:
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def effects_told_apart(node: ast.Match) -> set[str]:
    """Kinds of effects that have a case."""
    classes = [each.cls for case in node.cases for each in ast.walk(case.pattern) if isinstance(each, ast.MatchClass)]
    return {
        each.attr if isinstance(each, ast.Attribute) else ast.unparse(each) for each in classes
    } & kinds_of_effects()


def test_effects_are_told_apart_in_one_place():
    """Drivers, real and simulated, implement `Effects`; what clients are told (three kinds) is none."""
    matches = [(path, node) for path in EVERYTHING for node in ast.walk(tree_of(path)) if isinstance(node, ast.Match)]
    found = {name_of(path) for path, node in matches if len(effects_told_apart(node)) > 3}
    assert len(kinds_of_effects()) >= 10 and found == {"jdisagg/core/interpreter.py"}


def test_flags_and_the_environment_are_read_in_entry_files_only():
    wrong = []
    for path in (each for each in OURS if not is_entry(each)):
        wrong += [f"{name_of(path)}:{line}" for line, dotted in imports(path) if dotted.startswith("absl")]
        wrong += [f"{name_of(path)}:{line}" for line, dotted in imports(path) if dotted in ("os.environ", "os.getenv")]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
                wrong.append(f"{name_of(path)}:{node.lineno}")
    assert not wrong


def test_imports_stand_at_the_top_of_a_file_and_are_never_only_for_types():
    wrong = []
    for path in OURS:
        top = {id(node) for node in tree_of(path).body}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top:
                wrong.append(f"{name_of(path)}:{node.lineno}")
            if isinstance(node, ast.Name | ast.Attribute) and "TYPE_CHECKING" in ast.unparse(node):
                wrong.append(f"{name_of(path)}:{node.lineno}")
    assert not wrong


def words_of(name: str) -> set[str]:
    spaced = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return set(spaced.split("_"))


def test_no_file_class_or_function_has_a_name_that_says_nothing():
    wrong = []
    for path in OURS:
        names = [(1, path.stem)] + [
            (node.lineno, node.name)
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        wrong += [f"{name_of(path)}:{line} {name}" for line, name in names if words_of(name) & BANNED_WORDS]
    assert not wrong


def test_files_and_functions_are_short():
    """Kernels may be longer."""
    wrong = [f"{name_of(path)} has {count} lines" for path in OURS if (count := length_of(path)) > MAX_FILE_LINES]
    for path in in_rooms(*FLOORS, ""):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of(node) > MAX_FUNCTION_LINES:
                wrong.append(f"{name_of(path)}:{node.lineno} {node.name} has {lines_of(node)} lines")
    assert not wrong


def lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_the_tests_of_the_decisions_are_at_least_as_long_as_these():
    """In lines that hold code, the explorer's included."""
    tests = sources("tests/core", "tests/policy", "tests/explore")
    ours, of_tests = (sum(map(code_lines, paths)) for paths in (in_rooms("core", "policy"), tests))
    assert of_tests >= ours


NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    """Lines of a file that are neither blank nor comment nor docstring."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def length_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_every_file_says_first_what_lives_in_it():
    assert not [name_of(path) for path in OURS if length_of(path) and not ast.get_docstring(tree_of(path))]


def test_nothing_is_caught_barely_and_nothing_left_for_later():
    later = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    wrong = []
    for path in EVERYTHING:
        text = path.read_text(encoding="utf-8")
        wrong += [f"{name_of(path)} has {word}" for word in later if word in text]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                wrong.append(f"{name_of(path)}:{node.lineno} catches everything")
            if isinstance(node, ast.FunctionDef) and [type(each) for each in node.body] == [ast.Pass]:
                wrong.append(f"{name_of(path)}:{node.lineno} {node.name} is empty")
    assert not wrong
