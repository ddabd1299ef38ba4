"""The calculator names both units, the direction and the attention kind, and refuses a wrong flag in one line."""

from pathlib import Path

import pytest

from jdisagg.commands import calc
from jdisagg.model.checkpoint import read_model
from jdisagg.named_models import EMBEDDED_FOLDER
from jdisagg.sim.arithmetic import model


def test_a_long_prompts_kv_is_told_in_both_units(capsys: pytest.CaptureFixture[str]):
    assert calc.main(["calc", "--model=llama3-70b", "--tokens=131072"]) == 0
    printed = capsys.readouterr().out
    assert "42.95 GB = 40 GiB" in printed and "(GQA)" in printed and "one way" in printed


def test_only_what_no_other_command_prints_is_printed(capsys: pytest.CaptureFixture[str]):
    assert calc.main(["calc", "--model=llama3-70b", "--tokens=32768"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "of prefill on 8 x h100" in printed and "on links of at least 10.82 GB/s (86.6 Gbit/s), one way" in printed
    assert not [word for word in ("slots", "a step", "-token pages", " weights", "tokens/s") if word in printed]


def test_a_model_with_experts_names_the_weights_that_act_on_a_token(capsys: pytest.CaptureFixture[str]):
    assert calc.main(["calc", "--model=deepseek-v3", "--tokens=64"]) == 0
    printed = capsys.readouterr().out
    assert (
        " weights act on a token: 8 of 256 experts a layer" in printed and "a step of 1, 8, 64, 512 tokens" in printed
    )


def test_a_folder_gives_the_numbers_of_its_name(capsys: pytest.CaptureFixture[str]):
    folder = Path(__file__).parent / "fixtures" / "conformance" / "llama2"
    assert calc.main(["calc", f"--model={folder}", "--tokens=64"]) == 0
    assert "llama2 (" in capsys.readouterr().out


def test_a_folders_flops_are_those_of_its_matrices():
    folder = Path(__file__).parent.parent / "configs" / "llama3_70b"
    if not folder.exists():
        pytest.skip("configs/llama3_70b is not there")
    from_folder, named = calc.model_of(str(folder)), model("llama3-70b")
    assert from_folder.kv_bytes(1) == named.kv_bytes(1)
    assert from_folder.linear_flops(1) == 25.5 * 8192**2, "2 for each of (2 + 2/8 + 3 * 3.5) hidden_size**2 weights"
    assert from_folder.prefill_flops(8192) == named.prefill_flops(8192)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--model=gpt-9", "no model 'gpt-9'"),
        ("--tokens=0", "tokens"),
        ("--kv_dtype=int3", "int3"),
        ("8192", "not a flag"),
        ("--token=8", "did you mean --tokens?"),
    ],
)
def test_a_wrong_flag_costs_one_line(flag: str, words: str, capsys: pytest.CaptureFixture[str]):
    assert calc.main(["calc", flag]) == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1


def test_help_shows_the_law_and_every_flag(capsys: pytest.CaptureFixture[str]):
    assert calc.main(["calc", "-h"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Computes how large") and "--tokens=8192" in printed and "--hardware=h100" in printed


@pytest.mark.parametrize(("duration_s", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4e-6, "4 us")])
def test_a_duration_is_told_in_its_own_unit(duration_s: float, text: str):
    assert calc.seconds(duration_s) == text


def test_a_draft_model_and_a_head_take_room_beside_the_model(capsys: pytest.CaptureFixture[str]):
    config, name = read_model(EMBEDDED_FOLDER), str(EMBEDDED_FOLDER)
    draft, head = (calc.draft_size(said, name, config, "bfloat16", 1) for said in ("draft", "eagle"))
    small = read_model(EMBEDDED_FOLDER / "draft")
    norms = draft.weight_bytes - 2 * small.num_params()
    assert 0 <= norms < 10 * small.hidden_size and draft.token_bytes == small.kv_bytes(1)
    assert head.token_bytes == config.kv_bytes(1) / config.num_layers and head.weight_bytes > 0
    assert calc.draft_size("ngram:3", name, config, "bfloat16", 1) == calc.NO_DRAFT
    assert calc.main(["calc", f"--model={name}", "--devices=1", "--speculative=eagle"]) == 0
    assert f"{calc.decimal(head.weight_bytes)} of weights in bf16, " in capsys.readouterr().out
