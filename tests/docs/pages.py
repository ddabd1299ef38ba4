"""What pages hold: links, anchors, commands in fenced blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!`)\]\(([^)\s]+)\)")
PYTHON = re.compile(r"python -m (jdisagg [a-z]+|(?:jdisagg|benchmarks|tests|docs|pallas_kernels)[\w.]*)(.*)")
SCRIPT = re.compile(r"bash (launch/\w+\.sh)(.*)")
HASH = re.compile(r"\s+#.*$")


def pages() -> list[Path]:
    """Every page: at the root, and in docs."""
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def links(text: str) -> list[str]:
    """Targets of links and pictures, those in code apart."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text)))


def anchors(path: Path) -> set[str]:
    """Of the page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


def commands(text: str) -> Iterator[list[str]]:
    """Words of each command of ours in fenced blocks: ["python", "-m", MODULE, ...] or ["bash", FILE, ...]."""
    for kind, block in FENCE.findall(text):
        if kind not in ("python", "json", "protobuf"):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                yield from command_of(line)


def command_of(line: str) -> Iterator[list[str]]:
    """None or one: what stands before a comment, a pipe, or an ampersand."""
    plain = HASH.sub("", line).rstrip(" &")
    found = PYTHON.search(plain)
    if found:
        yield ["python", "-m", found[1], *shlex.split(found[2])]
    elif script := SCRIPT.search(plain):
        yield ["bash", script[1], *shlex.split(script[2])]
