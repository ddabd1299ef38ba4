"""The measured quality of each wire, and what is said and assumed because of it."""

import json
from pathlib import Path

from benchmarks.compression import Quality, table, texts_of
from jdisagg.core.settings import Settings
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.serve.deploy.deployment import EMBEDDED_MODEL, TYPICAL_ERROR, compression_warnings

ROOT = Path(__file__).parent.parent.parent
RESULTS = json.loads((ROOT / "benchmarks/results/compression.json").read_text())
BY_WIRE = {row["wire"]: Quality(**row) for row in RESULTS["wires"]}


def test_the_default_bound_lets_eight_bits_pass_twice_over_and_stops_four():
    bound = Settings().transfer_error_bound
    assert BY_WIRE["int8"].worst_error < BY_WIRE["fp8"].worst_error < bound / 2
    assert BY_WIRE["int4"].worst_error > bound


def test_typical_errors_are_those_that_were_measured():
    for wire, error in TYPICAL_ERROR.items():
        assert abs(BY_WIRE[wire].worst_error - error) < 0.15 * error


def test_a_wire_that_the_bound_would_stop_is_warned_of():
    assert compression_warnings(Settings(transfer_compress="int4"))
    for fine in (Settings(), Settings(transfer_compress="fp8"), Settings(transfer_compress="auto")):
        assert not compression_warnings(fine)
    assert not compression_warnings(Settings(transfer_compress="int4", transfer_error_bound=0.2))


def test_the_page_says_what_was_measured():
    page = (ROOT / "docs" / "handoff.md").read_text()
    for wire in ("int8", "fp8", "int4"):
        row = BY_WIRE[wire]
        said = next(line for line in page.splitlines() if line.strip().startswith(f"| {wire} |"))
        for figure in (f"{row.saved:.0%}", f"{row.worst_error:.1%}", f"{row.agreement:.1%}"):
            assert figure.replace("%", " %") in said or figure in said, (figure, said)
        assert f"{row.kl_mean:.1e}".replace("e-0", "e-") in said


def test_texts_are_all_as_long_as_asked_for():
    texts = texts_of(Tokenizer(EMBEDDED_MODEL), 200)
    assert len(texts) == 8 and {len(text) for text in texts} == {200}
    assert table([BY_WIRE["int8"]]).row_count == 1
