import json
from dataclasses import replace

import pytest

from jdisagg.core.errors import JournalError
from jdisagg.core.events import ROUTER, EmitTokens, SetTimer, Submit, TimerFired
from jdisagg.core.journal import Header, Journal, digest, read_lines
from jdisagg.core.messages import TokenDelta
from jdisagg.core.request import Attempt, RequestId, Sampled, WorkerId
from jdisagg.core.router_config import RouterConfig
from jdisagg.core.worker_config import Role, WorkerConfig
from tests.sim.cases import request, worker

HEADER = Header(RouterConfig(queue_limit=7), (worker("decode-0", Role.DECODE), worker("prefill-0", Role.PREFILL)))


def test_equal_decisions_have_equal_digests_and_others_do_not():
    first, second = SetTimer(1.0, "a"), SetTimer(1.5, "a")
    assert digest([first, second]) == digest([SetTimer(1.0, "a"), SetTimer(1.5, "a")])
    assert len({digest([]), digest([first]), digest([second]), digest([first, second]), digest([second, first])}) == 5


def test_the_ring_forgets_the_oldest_and_the_file_keeps_all():
    lines: list[str] = []
    journal = Journal(HEADER, limit=3, sink=lines.append)
    for number in range(10):
        journal.record(float(number), ROUTER, TimerFired(f"t{number}"), [])
    assert [entry.at_s for entry in journal.entries] == [7.0, 8.0, 9.0] and journal.num_recorded == 10
    header, entries = read_lines(lines)
    assert header == HEADER and [entry.event for entry in entries] == [TimerFired(f"t{number}") for number in range(10)]


def test_a_header_names_its_model_and_older_journals_name_none():
    header = replace(HEADER, model="name:with:colons:0123456789ab (weights 11, config 22)")
    found, _ = read_lines([header.to_line()])
    assert found == header and found.model_fingerprint == "0123456789ab"
    older = json.loads(HEADER.to_line())
    del older["model"]
    found, _ = read_lines([json.dumps(older)])
    assert found == HEADER and not found.model_fingerprint


def test_effects_shown_one_by_one_belong_to_the_event_before_them():
    lines: list[str] = []
    journal = Journal(HEADER, sink=lines.append)
    effects = [SetTimer(2.0, "x"), EmitTokens(TokenDelta(Attempt(RequestId("a"), 1), 0, (Sampled(1),)), WorkerId("w"))]
    journal.observe(ROUTER, Submit(request("a")), 1.0)
    for effect in effects:
        journal.observe(ROUTER, effect, 1.0)
    journal.observe(ROUTER, TimerFired("x"), 2.0)
    journal.close()
    _, entries = read_lines(lines)
    assert [entry.decided for entry in entries] == [digest(effects), digest([])]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "line 1 is not JSON"),
        (["{"], "line 1 is not JSON"),
        (["[1]"], "line 1 is no record"),
        (['{"version": 99}'], "version 99, this program reads 5"),
        ([HEADER.to_line(), '{"at_s": 1}'], "line 2 lacks actor, decided, event"),
        ([HEADER.to_line(), '{"at_s": 1, "actor": "a", "event": {"is": "Nothing"}, "decided": ""}'], "cannot read"),
        ([HEADER.to_line(), '{"at_s": 1, "actor": "a", "event": {"is": "Cancel"}, "decided": ""}'], "cannot read"),
    ],
)
def test_a_journal_that_cannot_be_read_says_where_and_why(lines, says):
    with pytest.raises(JournalError, match=says):
        list(read_lines(lines)[1])


def test_a_header_holds_the_sizes_of_every_worker():
    header, _ = read_lines([HEADER.to_line()])
    assert isinstance(header.workers[0], WorkerConfig) and header == HEADER
