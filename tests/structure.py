"""Measures of the code's structure, and the list of places that break a rule today.

`python -m tests.structure` prints the measures and rewrites `structure_exceptions.json` with what is left of each
list. A list only shrinks: an entry that is not on it is an error of `tests/test_structure.py`, never a new entry.
`python -m tests.structure --start` makes the lists anew; use it only in the commit that changes a rule.
"""

from __future__ import annotations

import ast
import collections
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXCEPTIONS = Path(__file__).with_name("structure_exceptions.json")
GLOSSARY = ROOT / "docs" / "glossary.md"
FIRST_WORDS = re.compile(r"^(Of|Those|So|It|Its|What|Whether|Where|Who|As|That)\b")
PEOPLE = re.compile(r"\b(nobody|somebody|anybody|whoever|everybody)\b", re.IGNORECASE)
BOOLEAN = re.compile(r"^_?_?(is|has|can|should)_")
MAX_HOLDERS = 4

# Lines per package, generated code aside. The sum is the size of the whole: a package that needs more takes it from
# another, or the commit that raises one says why. The largest number of files is in MAX_FILES.
LINE_BUDGETS = {
    "": 1_900,
    "cluster": 1_000,
    "commands": 2_200,
    "core": 4_900,
    "engine": 6_400,
    "kv": 4_000,
    "model": 8_000,
    "parallel": 600,
    "policy": 8_600,
    "profiling": 600,
    "serve": 15_300,
    "sim": 5_500,
    "training": 1_700,
    "pallas_kernels": 5_300,
}
MAX_FILES = 380

# Why a module that one other module alone imports is a module of its own: the first pattern that matches its name.
SINGLE_IMPORTER_REASONS = {
    r"jdisagg\.model\.families\.\w+": "a model family is one file and one row of the table that imports it",
    r"jdisagg\.model\.identity": "the only module that hashes files; read apart from how a deployment is chosen",
    r"jdisagg\.kv\.transport\.\w+": "a transport is one file; choose.py opens the one that both ends share",
    r"jdisagg\.cluster\.\w+": "a job system is one file of text, without any other import of it",
    r"jdisagg\.serve\.frontends\..*": "a protocol is one file, added to the app or the server in one line",
    r"jdisagg\.serve\.cluster\.\w+": "a kind of process is one file, which the entry of that kind imports",
    r"jdisagg\.serve\.cluster\.group\.leader": "a worker group's leader and members are two programs",
    r"jdisagg\.serve\.deploy\.(dry_run|servers)": "the launcher prints a plan or starts servers, never both",
    r"jdisagg\.sim\.(expected|failing|rerun|scaled|summary)": "a study is one file, which its command imports",
    r"jdisagg\.sim\.planner\.recommendation": "the planner's entry, which the command `plan` imports",
    r"jdisagg\.profiling\.profiler": "the profiler's entry, which the command `profile` imports",
    r"jdisagg\.training\.heads": "the training of draft heads, which the command `train` imports",
    r"jdisagg\.commands\.aot_report": "the report of `aot`, apart from the compiling; together they are over 600 lines",
    r"jdisagg\.(groups|supervise)": "a mode of the launcher, which imports it after the flags are read",
    r"pallas_kernels\..*\.(tpu|gpu|hopper|xla|reference)": "the body for one platform, which the operation chooses",
    r"pallas_kernels\.tune_\w+": "the tuning of one family of operations, apart so that each stays readable",
}


def sources() -> list[Path]:
    """Returns our Python files of `jdisagg` and `pallas_kernels`, generated ones aside."""
    found = [path for folder in ("jdisagg", "pallas_kernels") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "_pb2" not in path.name]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def package_of(path: Path) -> str:
    """Returns "core", "policy", ...; "" for the files at the top of `jdisagg`; "pallas_kernels" for the kernels."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "jdisagg":
        return parts[0]
    return parts[1] if len(parts) > 2 else ""


def package_lines() -> dict[str, int]:
    counted = collections.Counter[str]()
    for path in sources():
        counted[package_of(path)] += lines_of(path)
    return dict(counted)


def importers() -> dict[str, set[str]]:
    """Returns for each of our modules the modules that import it."""
    modules = {module_of(path): path for path in sources()}
    found: dict[str, set[str]] = {name: set() for name, path in modules.items() if path.name != "__init__.py"}
    for name, path in modules.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                for target in {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}:
                    if target in found and target != name:
                        found[target].add(name)
    return found


def single_importers() -> set[str]:
    """Returns the modules that exactly one other module imports, those with a reason aside."""
    found = {name for name, users in importers().items() if len(users) == 1}
    return {name for name in found if not any(re.fullmatch(each, name) for each in SINGLE_IMPORTER_REASONS)}


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in sources():
        yield from ((path, node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef))


def class_places() -> dict[str, list[str]]:
    """Returns the files in which each class name of `jdisagg` is defined."""
    found: dict[str, list[str]] = {}
    for path, node in classes():
        if name_of(path).startswith("jdisagg/"):
            found.setdefault(node.name, []).append(name_of(path))
    return found


def words_of(name: str) -> list[str]:
    """Returns the words of a CamelCase name: "KVPagePool" gives KV, Page, Pool."""
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+", name)


@cache
def glossary_nouns() -> frozenset[str]:
    """Returns the nouns in which class names may end: the list under "Class names" in `docs/glossary.md`."""
    section = (
        GLOSSARY.read_text(encoding="utf-8").partition("## Class names")[2].partition("\n\n")[2].partition("\n\n")[2]
    )
    return frozenset(re.findall(r"`(\w+)`", section))


def ends_in_a_noun(name: str) -> bool:
    """Returns True if the last word of a class name is in the glossary, in the singular or the plural."""
    last = words_of(name)[-1]
    singular = {last, last.removesuffix("s"), last.removesuffix("es"), last.removesuffix("ies") + "y"}
    return bool(singular & glossary_nouns())


def misnamed_classes() -> set[str]:
    """Returns "FILE CLASS" of each class whose last word is not in the glossary."""
    return {f"{name_of(path)} {node.name}" for path, node in classes() if not ends_in_a_noun(node.name)}


def repeated_classes() -> set[str]:
    """Returns the class names that two places of `jdisagg` define."""
    return {name for name, places in class_places().items() if len(places) > 1}


def is_bad_docstring(text: str) -> bool:
    """Returns True for a docstring that starts as a fragment, has fewer than four words or speaks of people."""
    return bool(FIRST_WORDS.match(text) or PEOPLE.search(text)) or len(text.split()) < 4


def bad_docstrings() -> dict[str, int]:
    """Returns for each file the number of docstrings that break the rules of CONTRIBUTING.md."""
    counted = collections.Counter[str]()
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and is_bad_docstring(text):
                    counted[name_of(path)] += 1
    return dict(counted)


def misnamed_booleans() -> dict[str, int]:
    """Returns for each file the number of boolean properties and fields without is_, has_, can_ or should_."""
    counted = collections.Counter[str]()
    for path, node in classes():
        for each in node.body:
            name = boolean_name(each)
            if name and not BOOLEAN.match(name):
                counted[name_of(path)] += 1
    return dict(counted)


def boolean_name(node: ast.stmt) -> str:
    """Returns the name of a boolean property or field; "" for any other statement of a class."""
    if isinstance(node, ast.FunctionDef) and node.returns and ast.unparse(node.returns) == "bool":
        is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
        return node.name if is_property else ""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id if ast.unparse(node.annotation) == "bool" else ""
    return ""


def is_frozen(node: ast.ClassDef) -> bool:
    decorated = any("frozen=True" in ast.unparse(each) for each in node.decorator_list)
    bases = {ast.unparse(each) for each in node.bases}
    return decorated or any(each.endswith(("Enum", "Protocol", "Exception", "Error")) for each in bases)


def holders() -> dict[str, set[str]]:
    """Returns for each mutable class of `policy` the classes of `policy` that keep a reference to one of its objects.

    A reference is a constructor's parameter of that class that is stored on `self`, or a field of that class.
    """
    policy = [(path, node) for path, node in classes() if package_of(path) == "policy"]
    mutable = {node.name for _, node in policy if not is_frozen(node)}
    found: dict[str, set[str]] = {}
    for _, node in policy:
        annotated = [each.annotation for each in node.body if isinstance(each, ast.AnnAssign)]
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                stored = {n.id for n in ast.walk(each) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
                annotated += [arg.annotation for arg in each.args.args if arg.annotation and arg.arg in stored]
        for annotation in annotated:
            for name in {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)} & mutable - {node.name}:
                found.setdefault(name, set()).add(node.name)
    return found


def crowded_siblings() -> dict[str, int]:
    """Returns the mutable classes of `policy` that more than four classes hold, with how many do."""
    return {name: len(each) for name, each in holders().items() if len(each) > MAX_HOLDERS}


def over_line_budget() -> dict[str, int]:
    """Returns the packages that have more lines than their budget, with their lines."""
    return {name: count for name, count in package_lines().items() if count > LINE_BUDGETS[name]}


def found_now() -> dict[str, dict[str, int] | list[str]]:
    """Returns every list of exceptions as the code is now."""
    files = len(sources())
    return {
        "over_line_budget": over_line_budget(),
        "over_file_budget": {"files": files} if files > MAX_FILES else {},
        "single_importers": sorted(single_importers()),
        "crowded_siblings": crowded_siblings(),
        "misnamed_classes": sorted(misnamed_classes()),
        "repeated_classes": sorted(repeated_classes()),
        "bad_docstrings": bad_docstrings(),
        "misnamed_booleans": misnamed_booleans(),
    }


def allowed() -> dict[str, dict[str, int] | list[str]]:
    return json.loads(EXCEPTIONS.read_text(encoding="utf-8"))


def shrunk(old: dict[str, int] | list[str], new: dict[str, int] | list[str]) -> dict[str, int] | list[str]:
    """Returns what `old` and `new` share: the smaller count of each entry."""
    if isinstance(old, dict):
        assert isinstance(new, dict)
        return {name: min(count, old[name]) for name, count in sorted(new.items()) if name in old}
    return sorted({*old} & {*new})


def main() -> int:
    now = found_now()
    kept = now if "--start" in sys.argv else {name: shrunk(old, now[name]) for name, old in allowed().items()}
    kept = {name: dict(sorted(each.items())) if isinstance(each, dict) else each for name, each in kept.items()}
    EXCEPTIONS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    modules = importers()
    names = class_places()
    one_word = sum(len(words_of(name)) == 1 for name in names)
    policy_files = sum(package_of(path) == "policy" for path in sources())
    print(f"{sum(package_lines().values()):,} lines in {len(sources())} files, {policy_files} of them in policy")
    alone = sum(len(users) == 1 for users in modules.values())
    print(f"{alone / len(modules):.0%} of modules have one importer; {len(single_importers())} of them have no reason")
    print(f"{one_word / len(names):.0%} of class names are one word; {len(repeated_classes())} are used twice")
    for name, count in sorted(package_lines().items()):
        print(f"  {count:6,} of {LINE_BUDGETS[name]:6,}  {name or 'jdisagg'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
