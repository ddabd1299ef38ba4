"""Every command speaks one vocabulary and is run by one runner: a flag means one thing, --config as well, and mistakes
cost one line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from jdisagg import command, flags, launch, llm
from jdisagg.commands import aot, calc, convert, plan, profile, replay, train
from jdisagg.commands import sim as sim
from jdisagg.core.errors import FlagError
from jdisagg.core.settings import Settings
from jdisagg.llm import LLM

COMMANDS = {
    "launch": launch,
    "sim": sim,
    "plan": plan,
    "profile": profile,
    "aot": aot,
    "calc": calc,
    "replay": replay,
    "train": train,
    "convert": convert,
}
SYNONYMS = {  # what a name would be taken for -> the one name that it has
    "slots": "max_num_seqs",
    "num_slots": "max_num_seqs",
    "chunk_size": "max_num_batched_tokens",
    "page_size_prefill": "prefill_page_size",
    "checkpoint_dir": "model",
    "trace_file": "trace",
}


def declared(program: str) -> flags.FlagValues:
    return COMMANDS[program].declare()


def meaning(values: flags.FlagValues, name: str) -> tuple[type, str]:
    """Kind of value and help, the choices that absl writes before it apart."""
    return flags.kind_of(values, name), re.sub(r"^<[^>]*>: ", "", values[name].help or "")


def test_a_flag_of_several_commands_means_the_same_in_each():
    meanings: dict[str, dict[tuple[type, str], list[str]]] = {}
    for program in COMMANDS:
        values = declared(program)
        for name in values:
            meanings.setdefault(name, {}).setdefault(meaning(values, name), []).append(program)
    assert not {flag: found for flag, found in meanings.items() if len(found) > 1}


def test_what_a_setting_is_called_it_is_called_in_every_command():
    for program in COMMANDS:
        assert not SYNONYMS.keys() & set(declared(program)), program
    names = {"max_num_seqs", "page_size", "reserve_tokens", "model", "max_model_len", "seed", "config"}
    for program in ("launch", "sim", "plan", "profile", "aot"):
        assert names <= set(declared(program)), program


@pytest.mark.parametrize("program", COMMANDS)
def test_every_command_is_started_by_the_one_runner(program: str):
    """No command reads flags, tells an error or counts an exit code by itself."""
    source = Path(COMMANDS[program].__file__ or "").read_text(encoding="utf-8")
    (main,) = (each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef) and each.name == "main")
    assert "command.run(" in ast.unparse(main.body[-1]) and not [n for n in ast.walk(main) if isinstance(n, ast.Try)]
    assert "argparse" not in source and "app.run" not in source


@pytest.mark.parametrize("program", COMMANDS)
def test_help_a_mistake_and_a_file_that_is_not_there_are_told_alike(program: str, capsys: pytest.CaptureFixture[str]):
    main = COMMANDS[program].main
    assert main([program, "--help"]) == 0
    assert "--config=" in capsys.readouterr().out
    for wrong, said in (("--confog=x", "did you mean --config?"), ("--config=/nowhere.toml", "/nowhere.toml")):
        assert main([program, wrong]) == 2
        told = capsys.readouterr().err
        assert said in told and told.startswith("jdisagg") and told.count("\n") == 1


def test_a_file_gives_any_command_its_flags_and_one_file_does_for_several(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "llama3-8b"\nmesh = "prefill:tp2,decode:tp1"\nrate = 3\n[sizes]\nmax_num_seqs = 12\npage_size = 64\n'
        "attainment = 0.8\n[server]\nhttp_port = 0\n"
    )
    for program in COMMANDS:
        values = declared(program)
        flags.read(values, [program, f"--config={file}", "--page_size=16"][: 3 if "page_size" in values else 2])
        flags.fill(values, {"JDISAGG_MAX_NUM_SEQS": "9"})
        expected = {"model": "llama3-8b", "rate": 3.0, "max_num_seqs": 9, "page_size": 16, "attainment": 0.8}
        for name in expected.keys() & set(values):
            assert values[name].value == expected[name], (program, name)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("tokenz = 3", "unknown key 'tokenz'; did you mean 'tokens'"),
        ('tokens = "many"', "tokens is 'many', must be of type int"),
        ("tokens = 0", "tokens is 0: 0 is not a positive integer"),
        ("config = 'other.toml'", "unknown key 'config'"),
    ],
)
def test_a_wrong_line_of_a_file_is_one_line_of_any_command(tmp_path: Path, line: str, says: str):
    file = tmp_path / "c.toml"
    file.write_text(line)
    values = declared("calc")
    flags.read(values, ["calc", f"--config={file}"])
    with pytest.raises(FlagError) as error:
        flags.fill(values, {})
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_wrong_variable_names_itself():
    values = declared("sim")
    with pytest.raises(FlagError, match="JDISAGG_PAGE_SIZE is 'big'"):
        flags.fill(values, {"JDISAGG_PAGE_SIZE": "big"})


def test_ctrl_c_ends_any_command_with_a_line_and_130(capsys: pytest.CaptureFixture[str]):
    def stopped(_: flags.FlagValues) -> int:
        raise KeyboardInterrupt

    assert command.run("jdisagg calc", "", declared("calc"), ["calc"], stopped) == 130
    assert capsys.readouterr().err == "jdisagg calc: interrupted\n"


def test_a_removed_flag_names_its_replacement_wherever_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in (flags, flags, llm):
        monkeypatch.setattr(module, "REMOVED", {"old_name": "was removed; use --new_name"})
    values, file = declared("launch"), tmp_path / "c.toml"
    file.write_text("old_name = 3")
    with pytest.raises(FlagError, match=r"^--old_name was removed; use --new_name$"):
        flags.read(values, ["launch", "--old_name=3"])
    with pytest.raises(FlagError, match=r"^JDISAGG_OLD_NAME was removed; use --new_name$"):
        flags.fill(values, {"JDISAGG_OLD_NAME": "3"})
    flags.read(values, ["launch", f"--config={file}"])
    with pytest.raises(FlagError, match=r"'old_name' was removed; use --new_name$"):
        flags.fill(values, {})
    with pytest.raises(FlagError, match=r"^old_name was removed; use --new_name$"):
        LLM(old_name=3)


@pytest.mark.parametrize("value", ["predicted", "pair_affinity"])
@pytest.mark.parametrize("command", ["launch", "sim"])
def test_a_removed_routing_names_its_replacement_wherever_it_is_given(command: str, value: str, tmp_path: Path):
    removed, file = "was removed; use --routing=cache_aware", tmp_path / "c.toml"
    file.write_text(f'routing = "{value}"')

    def resolve(arguments: list[str], environment: dict[str, str]) -> None:
        values = declared(command)
        flags.read(values, [command, *arguments])
        flags.fill(values, environment)
        Settings(routing=str(values["routing"].value)).check()

    for arguments, environment in (
        ([f"--routing={value}"], {}),
        ([], {"JDISAGG_ROUTING": value}),
        ([f"--config={file}"], {}),
    ):
        with pytest.raises(FlagError, match=removed) as raised:
            resolve(arguments, environment)
        assert "\n" not in str(raised.value) and value in str(raised.value)
    with pytest.raises(FlagError, match=removed):
        LLM(routing=value)
