"""What drafts gain is told beside the same engine without."""

import json

from benchmarks.peers.contestants import vllm, vllm_ngrams
from benchmarks.peers.speculation import Row, rows_of


def test_an_engine_with_drafts_is_told_beside_itself_without() -> None:
    measured = {
        ("ours", "off", "new", 4): [10.0, 30.0, 20.0],
        ("ours", "ngram:3", "new", 4): [30.0],
        ("theirs", "off", "new", 4): [100.0],
        ("theirs", "ngram:3", "new", 4): [50.0],
    }
    assert rows_of(measured)[1::2] == [
        Row("ours", "ngram:3", "new", 4, 30.0, 1.5),
        Row("theirs", "ngram:3", "new", 4, 50.0, 0.5),
    ]


def test_an_engine_that_failed_without_drafts_has_no_row() -> None:
    assert rows_of({("theirs", "ngram:3", "new", 4): [50.0]}) == []


def test_ngrams_of_vllm_guess_as_many_as_are_asked_for() -> None:
    (command,) = vllm("python", "folder", "float32", "cache", eager=False, more=vllm_ngrams(5)).commands
    drafts = json.loads(command.argv[command.argv.index("--speculative-config") + 1])
    assert (drafts["method"], drafts["num_speculative_tokens"]) == ("ngram", 5)
