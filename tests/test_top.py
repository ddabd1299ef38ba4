"""`python -m jdisagg top`: the cluster as tables, from the same document as the page."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from jdisagg.commands.top import COLOURS, USES, DocumentHistory, NoAnswerError, cells, fetch, main, picture, pictures
from jdisagg.core.ledger import PARTS
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from tests.ports import free_port
from tests.serve.live_http import eventually, serving
from tests.serve.live_toy import toy_stack
from tests.serve.scripted import ScriptedService

KEY = {"authorization": "Bearer k"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A stack that answered once."""
    with toy_stack() as stack:
        app = create_app(stack.service, FrontSettings(api_key="k"), stack.metrics, stack.service.debug_state)
        with serving(app) as url:
            body = {"prompt": list(range(5, 45)), "max_tokens": 6, "ignore_eos": True}
            assert httpx.post(f"{url}/v1/completions", json=body, headers=KEY).status_code == 200
            eventually(stack.idle)
            yield url


def drawn(what: Any, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


def test_one_picture_shows_workers_transfers_requests_and_decisions(url: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["top", f"--url={url}", "--api_key=k", "--once"]) == 0
    said = capsys.readouterr().out
    for words in ("toy", "ready", "prefill-0", "decode-0", "0/8", "prefill-0 → decode-0", "GB/s", "finished (length)"):
        assert words in said
    assert "least_loaded: prefill-0 costs work 0" in said


def test_a_server_that_cannot_be_read_is_one_line_and_exit_code_2(url: str, capsys: Any) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    with serving(create_app(ScriptedService())) as bare:
        places = ((nobody, "refused"), (url, "--api_key"), (bare, "--debug_keep=0"), ("ftp://x", "http://"))
        for place, why in places:
            assert main(["top", place, "--once"]) == 2
            said = capsys.readouterr().err
            assert why in said and len(said.splitlines()) == 1


def test_it_goes_on_when_the_server_comes_back(url: str) -> None:
    answers = itertools.chain([NoAnswerError("http://x: gone")], itertools.repeat(fetch(url, "k")))

    def ask() -> Any:
        answer = next(answers)
        if isinstance(answer, NoAnswerError):
            raise answer
        return answer

    first, second = itertools.islice(pictures(ask, 0.0, lambda: 200), 2)
    assert "gone; trying again" in drawn(first) and "decode-0" in drawn(second)


def test_paces_are_of_the_last_second_or_so_and_never_of_another_server(url: str) -> None:
    document, watch = fetch(url, "k"), DocumentHistory()
    for number in range(10):
        totals = document["totals"] | {"output_tokens": 100.0 + 30 * number}
        watch.take(document | {"now_s": 50 + 0.5 * number, "totals": totals})
    assert watch.per_second(lambda each: each["totals"]["output_tokens"]) == pytest.approx(60)
    assert 1.2 <= watch.last["now_s"] - watch.before["now_s"] <= 2.0 and "60.0 tokens/s" in drawn(picture(watch))
    watch.take(document | {"now_s": 1.0})
    assert watch.before is watch.last and watch.per_second(lambda each: each["totals"]["output_tokens"]) == 0


def test_a_bar_is_as_long_as_its_cells_and_each_part_has_its_share():
    bar = cells({"live": 1, "in_flight": 1, "cached": 2, "free": 4}, USES, 16)
    assert bar.plain == "█" * 8 + "░" * 8
    assert [(span.end - span.start) for span in bar.spans] == [2, 2, 4, 8]
    assert set(COLOURS) == set(PARTS) and cells({}, USES, 16).plain == ""


def test_on_eighty_columns_nothing_that_counts_is_cut(url: str) -> None:
    watch = DocumentHistory()
    watch.take(fetch(url, "k"))
    said = drawn(picture(watch, 80), 80)
    for words in (
        "prefill-0 ",
        "in flight",
        "hits",
        "0/8",
        "finished ",
        "prefill-0 → decode-0",
        " ms",
        " s ago  least_loaded",
    ):
        assert words in said
    assert max(map(len, said.splitlines())) <= 80 and "…" not in said.partition("decisions")[0]


def test_what_a_server_says_is_no_markup(url: str) -> None:
    document, watch = fetch(url, "k"), DocumentHistory()
    document["decisions"][0]["reason"] = document["requests"][0]["request_id"] = "[red]no[/red]"
    watch.take(document)
    assert drawn(picture(watch)).count("[red]no[/red]") == 2
