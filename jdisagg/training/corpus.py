"""What the embedded model reads: the running Python's own library as documents, split into training and held-out files.

The split depends on a file's relative name alone, so it never moves when other files come or go.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Tests repeat themselves; the last two are generated tables and manual pages: none shows how Python is written.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "lib-dynload", "__pycache__", "encodings", "pydoc_data"}
)
HELD_OUT_PER_THOUSAND = 30
LESSON_BYTES = range(80, 1500)  # functions short enough to be a whole answer in one training sequence


@dataclass(frozen=True, slots=True)
class Document:
    name: str  # path relative to the library's root, with forward slashes
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    training: tuple[Document, ...]
    held_out: tuple[Document, ...]


def is_held_out(name: str) -> bool:
    """About 3 % of all names, the same ones on every machine."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_THOUSAND


def read_corpus(root: Path | None = None) -> Corpus:
    """Reads every Python source below `root` (the standard library by default), sorted by name."""
    documents = list(_documents(root or Path(sysconfig.get_paths()["stdlib"])))
    return Corpus(
        training=tuple(document for document in documents if not is_held_out(document.name)),
        held_out=tuple(document for document in documents if is_held_out(document.name)),
    )


def _documents(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few old sources are in other encodings
        if text.strip():
            yield Document(relative.as_posix(), text)


@dataclass(frozen=True, slots=True)
class Lesson:
    """A wish and the function that grants it: what teaches the model the shape of a chat."""

    wish: str
    answer: str


def lessons(document: Document) -> list[Lesson]:
    """Every short documented function of a document, asked for by the first line of its docstring."""
    try:
        tree = ast.parse(document.text)
    except SyntaxError:
        return []  # lib2to3 keeps samples of Python 2
    found = [_lesson(node, document.text) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [lesson for lesson in found if lesson is not None]


def _lesson(node: ast.FunctionDef, text: str) -> Lesson | None:
    docstring = ast.get_docstring(node)
    if not docstring or not docstring.strip():
        return None
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    answer = "\n".join(line[node.col_offset :] for line in lines) + "\n"
    if len(answer) not in LESSON_BYTES:
        return None
    return Lesson(f"Write the function {node.name}: {docstring.strip().splitlines()[0]}", answer)
