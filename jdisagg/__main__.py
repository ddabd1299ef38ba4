"""`python -m jdisagg COMMAND ...`, or `jdisagg COMMAND ...`: every command by its name, and --help of all.

A command is a module of this package that is run by `python -m jdisagg.COMMAND` as well, with the same flags.
"""

from __future__ import annotations

import ast
import difflib
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from jdisagg.command import BAD_USE, pipe_closed

HERE = Path(__file__).parent
RUN = "if __name__ =="


def commands() -> dict[str, str]:
    """Names, with what each is for; nothing is imported for it."""
    paths = [*HERE.glob("*.py"), *HERE.glob("*/__main__.py")]
    found = {}
    for path in paths:
        source = path.read_text(encoding="utf-8")
        if path != Path(__file__) and RUN in source:
            name = path.parent.name if path.stem == "__main__" else path.stem
            found[name] = purpose(ast.get_docstring(ast.parse(source)) or "")
    return dict(sorted(found.items()))


def purpose(law: str) -> str:
    """The first sentence, without the command line that it may begin with."""
    first = law.partition("\n\n")[0].replace("\n", " ")
    first = first.rpartition("`: ")[2].partition(". ")[0].rstrip(".")
    return first[:1].upper() + first[1:]


def help_text() -> str:
    lines = [f"  {name.ljust(9)} {law}" for name, law in commands().items()]
    return "\n".join(
        [
            f"jdisagg {version('jdisagg')}: disaggregated LLM inference for JAX",
            "",
            "jdisagg COMMAND [--flag=value ...], or python -m jdisagg.COMMAND; jdisagg COMMAND --help for its flags",
            "",
            *lines,
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command; 2 with one line for one that there is not."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("--help", "-h", "help"):
        try:
            print(help_text(), flush=True)
        except BrokenPipeError:
            return pipe_closed()
        return 0
    if words[0] == "--version":
        print(version("jdisagg"))
        return 0
    name, known = words[0], commands()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(known)}"
        print(f"jdisagg: unknown command {name!r}; {hint}", file=sys.stderr)
        return BAD_USE
    sys.argv = [f"jdisagg {name}", *words[1:]]
    runpy.run_module(f"jdisagg.{name}", run_name="__main__", alter_sys=True)  # it ends by SystemExit
    return 0


if __name__ == "__main__":
    sys.exit(main())
