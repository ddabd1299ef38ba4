"""`jdisagg COMMAND ...` or `python -m jdisagg COMMAND ...`: runs a command by its name; --help lists all.

A command is a module of `jdisagg.commands`, or of this package if it can also run as `python -m jdisagg.COMMAND`.
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
    """Returns the purpose of each command by its name, read from the sources without importing them."""
    return {name: purpose(path) for name, path in sorted(command_files().items())}


def command_files() -> dict[str, Path]:
    """Returns the source file of each command by its name."""
    paths = [*HERE.glob("*.py"), *HERE.glob("commands/*.py")]
    return {path.stem: path for path in paths if path != Path(__file__) and RUN in path.read_text(encoding="utf-8")}


def module_of(name: str) -> str:
    """Returns the dotted name of a command's module."""
    return f"jdisagg.{name}" if command_files()[name].parent == HERE else f"jdisagg.commands.{name}"


def purpose(path: Path) -> str:
    """Returns the first sentence of a file's docstring, without the command line that it may begin with."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = docstring.partition("\n\n")[0].replace("\n", " ")
    first = first.rpartition("`: ")[2].partition(". ")[0].rstrip(".")
    return first[:1].upper() + first[1:]


def help_text() -> str:
    lines = [f"  {name.ljust(9)} {description}" for name, description in commands().items()]
    return "\n".join(
        [
            f"jdisagg {version('jdisagg')}: disaggregated LLM inference for JAX",
            "",
            "jdisagg COMMAND [--flag=value ...], or python -m jdisagg COMMAND; jdisagg COMMAND --help for its flags",
            "",
            *lines,
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; 2 with one line for an unknown command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        try:
            print(help_text(), flush=True)
        except BrokenPipeError:
            return pipe_closed()
        return 0
    if arguments[0] == "--version":
        print(version("jdisagg"))
        return 0
    name, known = arguments[0], command_files()
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"commands are {', '.join(sorted(known))}"
        print(f"jdisagg: unknown command {name!r}; {hint}", file=sys.stderr)
        return BAD_USE
    sys.argv = [f"jdisagg {name}", *arguments[1:]]
    runpy.run_module(module_of(name), run_name="__main__", alter_sys=True)  # ends by SystemExit
    return 0


if __name__ == "__main__":
    sys.exit(main())
