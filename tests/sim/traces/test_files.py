"""Public trace files are read as they are, and a wrong one is refused with its name and what was wrong."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.sim.traces import read_azure, read_lengths, read_mooncake, read_servegen_rates

FIXTURES = Path(__file__).parents[2] / "fixtures" / "traces"


def test_an_azure_trace_keeps_its_tenths_of_microseconds():
    trace = read_azure(FIXTURES / "azure_conv_first_400.csv")
    assert len(trace) == 400 and trace.arrival_s[0] == 0.0
    assert (trace.input_tokens[0], trace.output_tokens[0]) == (374, 44)
    second = (FIXTURES / "azure_conv_first_400.csv").read_text().splitlines()[2].split(",")[0]
    assert trace.arrival_s[1] == pytest.approx(float(second[-10:]) - 46.68059, abs=1e-6)


def test_a_mooncake_trace_has_one_name_for_every_512_tokens():
    trace = read_mooncake(FIXTURES / "mooncake_conversation_first_300.jsonl.gz")
    assert len(trace) == 300 and trace.block_tokens == 512
    assert all(
        len(path) == -(-tokens // 512) for path, tokens in zip(trace.block_hashes, trace.input_tokens, strict=True)
    )


def test_length_files_give_lengths_and_no_times():
    trace = read_lengths(FIXTURES / "sharegpt_8k_first_300.csv")
    assert len(trace) == 300 and (trace.input_tokens[0], trace.output_tokens[0]) == (74, 918)
    assert not trace.arrival_s.any()


def test_servegen_rates_are_one_a_window():
    rates = read_servegen_rates(FIXTURES / "servegen_m_small_first_day.csv", "language_m-small")
    assert rates.shape == (144,) and rates[0] == pytest.approx(809.7617)


def test_rates_of_a_model_that_is_not_there_are_refused_by_name():
    with pytest.raises(ConfigError, match="no rates of 'language_m-huge'"):
        read_servegen_rates(FIXTURES / "servegen_m_small_first_day.csv", "language_m-huge")


def test_a_gzip_file_reads_as_the_plain_one(tmp_path: Path):
    plain = FIXTURES / "azure_conv_first_400.csv"
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert np.array_equal(read_azure(packed).arrival_s, read_azure(plain).arrival_s)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "'noon' is no time"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_azure(path)


def test_a_broken_line_is_refused_with_its_number(tmp_path: Path):
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match="line 2 is no request"):
        read_mooncake(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.csv: cannot be read"):
        read_azure(tmp_path / "nowhere.csv")
