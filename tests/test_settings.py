from dataclasses import fields, replace

import pytest

from jdisagg import flags
from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.core.settings import Settings


def resolved(*arguments, **environment):
    return flags.resolve(["launch", *arguments], {f"JDISAGG_{k.upper()}": v for k, v in environment.items()})[0]


def test_flags_win_over_environment_which_wins_over_the_file_which_wins_over_defaults(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[sizes]\npage_size = 32\nmax_num_seqs = 3\nmax_chunk_seqs = 5\n")
    got = resolved(f"--config={file}", "--page_size=64", page_size="16", max_num_seqs="4")
    assert (got.page_size, got.max_num_seqs, got.max_chunk_seqs, got.steps_in_flight) == (
        64,
        4,
        5,
        Settings().steps_in_flight,
    )


def test_printed_settings_read_back_are_the_same(tmp_path):
    settings = replace(Settings(), mesh="colocated:2xtp1", temperature=0.5, model='a "quoted" folder', drain_s=3.0)
    file = tmp_path / "c.toml"
    file.write_text(flags.as_toml(settings))
    assert resolved(f"--config={file}") == settings


def test_every_setting_is_a_flag_and_stands_in_the_help():
    text = flags.help_text(full=True)
    for each in fields(Settings):
        assert f"--{each.name}=" in text
        assert each.metadata["group"] in flags.GROUPS
        assert getattr(resolved(f"--{each.name}={each.default}"), each.name) == each.default


def test_dashes_are_taken_for_underscores():
    assert resolved("--max-model-len=77").max_model_len == 77


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max_modl_len=7"], "unknown flag --max_modl_len; did you mean --max_model_len?"),
        (["--page_size=abc"], "page_size=abc"),
        (["--page_size=-1"], "--page_size is -1, must not be negative"),
        (["--load_format=zip"], "--load_format is 'zip', must be one of hf, orbax, random"),
        (["serve"], "'serve' is not a flag"),
        (["--prompts=a.jsonl"], "give both or neither"),
        (["--config=/nowhere.toml"], "/nowhere.toml"),
        (["--config=/"], "--config=/: Is a directory"),
        (["--queue_limit=-1"], "--queue_limit is -1, must be at least 1"),
        (["--queue_timeout_s=nan"], "--queue_timeout_s is nan, must not be negative"),
        (["--handoff_timeout_s=-1"], "--handoff_timeout_s is -1.0, must not be negative"),
        (["--max_tokens=0"], "--max_tokens is 0, must be at least 1"),
        (["--http_port=70000"], "--http_port is 70000"),
        (["--hbm_fraction=1.5"], "--hbm_fraction is 1.5"),
    ],
)
def test_a_wrong_setting_is_one_line_with_the_value_in_it(arguments, says):
    with pytest.raises(ConfigError) as error:
        resolved(*arguments)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_wrong_key_in_the_file_names_the_nearest_one(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("page_sise = 32\n")
    with pytest.raises(FlagError, match=r"'page_sise'; did you mean 'page_size'"):
        resolved(f"--config={file}")


def test_a_file_that_is_no_text_is_one_line(tmp_path):
    file = tmp_path / "c.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="invalid start byte"):
        resolved(f"--config={file}")


def test_a_value_of_the_wrong_kind_in_the_file_is_refused(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('page_size = "big"\n')
    with pytest.raises(FlagError, match=r"page_size is 'big', must be of type int"):
        resolved(f"--config={file}")


@pytest.mark.parametrize("key", ["schlüssel", "a\nb", " a", "a ", "\x7f"])
def test_a_key_that_no_header_can_hold_is_refused_at_the_start(key):
    with pytest.raises(ConfigError, match="--api_key must be printable ASCII"):
        replace(Settings(), api_key=key).check()
    replace(Settings(), api_key="open sesame!").check()


def test_help_explains_what_is_for_every_day_and_names_the_rest():
    short, full = flags.help_text(), flags.help_text(full=True)
    everyday = {each.name for each in fields(Settings) if each.metadata["everyday"]}
    assert {"model", "mesh", "role", "router", "secret_file", "http_port"} <= everyday
    for each in fields(Settings):
        assert (f"  --{each.name}=" in short) == (each.name in everyday) and f"  --{each.name}=" in full
        assert f"--{each.name}" in short
    assert short.count("(--helpfull explains)") == sum(
        any(e.metadata["group"] == group and e.name not in everyday for e in fields(Settings)) for group in flags.GROUPS
    )
    assert "also:" not in full
