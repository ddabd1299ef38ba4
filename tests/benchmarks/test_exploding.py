"""What the benchmark asks for explodes, and is a new thing each time."""

import json
import time

from benchmarks.exploding import exploding, percentile
from jdisagg.model.checkpoint import read_model
from jdisagg.model.grammars.grammars import WhitespaceFormat, open_grammars
from jdisagg.serve.deploy.deployment import EMBEDDED_MODEL


def test_each_schema_is_refused_and_another_one():
    grammars = open_grammars(EMBEDDED_MODEL, read_model(EMBEDDED_MODEL).vocab_size)
    one, other = exploding(1)["json"], exploding(2)["json"]
    grammar = grammars.of_schema(one, WhitespaceFormat(""))
    began_s = time.thread_time()
    assert json.dumps(one) != json.dumps(other)
    assert "too large" in grammars.why_not(grammar) and time.thread_time() - began_s < 20


def test_a_percentile_is_one_of_the_gaps_in_milliseconds():
    gaps = [0.001 * number for number in range(100)]
    assert [round(percentile(gaps, share)) for share in (0.5, 0.99, 1.0)] == [50, 99, 99]
