"""Writes the generated pages, and the generated tables within the others: `python -m docs.generate [--check]`.

With --check nothing is written: exit code 1 and the names of what is behind. A table stands between the lines
`<!-- table: NAME -->` and `<!-- table: end -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from benchmarks import tables as measured
from docs.generate import (
    alerts_table,
    api_page,
    dashboard,
    flags_page,
    handoff_table,
    metrics_page,
    published_page,
    sizes_table,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTE = "<!-- Made by `python -m docs.generate`: change what it is made of, not this page. -->\n\n"
PAGES: Mapping[str, Callable[[], str]] = {
    "api.md": api_page.text,
    "flags.md": flags_page.text,
    "metrics.md": metrics_page.text,
    "published_gates.md": published_page.text,
}
TABLES: Mapping[str, Callable[[], str]] = {
    "alerts": alerts_table.text,
    "handoff_states": handoff_table.text,
    "sizes": sizes_table.text,
    **measured.TABLES,
}
MARKED = re.compile(r"(<!-- table: (?!end)(\S+) -->\n).*?(<!-- table: end -->)", re.DOTALL)


def written() -> list[Path]:
    """Every page that people write, the README first."""
    return [ROOT / "README.md", *sorted(path for path in DOCS.glob("*.md") if path.name not in PAGES)]


@cache
def table(name: str) -> str:
    """Raises KeyError for a table that nothing makes."""
    return TABLES[name]().strip()


def renewed(text: str) -> str:
    """The page with its tables as they are made now."""
    return MARKED.sub(lambda found: f"{found[1]}\n{table(found[2])}\n\n{found[3]}", text)


def fresh() -> Iterator[tuple[Path, str]]:
    """(file, what it should hold) of all."""
    yield ROOT / "launch" / "grafana" / "jdisagg.json", dashboard.text()
    for name, make in PAGES.items():
        yield DOCS / name, NOTE + make().rstrip() + "\n"
    for path in written():
        yield path, renewed(path.read_text(encoding="utf-8"))


def behind() -> list[Path]:
    return [path for path, text in fresh() if not path.exists() or path.read_text(encoding="utf-8") != text]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page is behind")
    stale = behind()
    if parser.parse_args(argv).check:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        print(f"behind: {names}; run python -m docs.generate" if stale else "all pages are as they are made")
        return int(bool(stale))
    texts = dict(fresh())
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
