"""What others say cannot pass for a line of the log."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import httpx
import pytest

from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from jdisagg.serve.observability.log_lines import JSONLine, OneLine
from tests.serve.live_http import serving
from tests.serve.scripted import ScriptedService, told


def test_a_message_stays_one_line_and_a_traceback_keeps_its_lines() -> None:
    out = io.StringIO()
    lines = logging.StreamHandler(out)
    lines.setFormatter(OneLine("%(levelname)s %(message)s"))
    log = logging.Logger("test")
    log.addHandler(lines)
    log.warning("a peer says %s", "x\nERROR forged\r\x1b[2J\u2028\u0085 naïve 世界")
    try:
        raise KeyError("why")
    except KeyError:
        log.exception("it failed")
    told = out.getvalue()
    assert told.startswith(r"WARNING a peer says x\nERROR forged\r\x1b[2J\u2028\x85 naïve 世界" + "\n")
    assert told.count("\n") > 3 and "\nKeyError: 'why'\n" in told


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What all of us log at info and above, as JSON."""
    out, log = io.StringIO(), logging.getLogger("jdisagg")
    handler, level = logging.StreamHandler(out), log.level
    handler.setFormatter(JSONLine())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield out
    log.removeHandler(handler)
    log.setLevel(level)


def test_a_json_line_is_one_object_whatever_the_message_holds(lines: io.StringIO) -> None:
    log = logging.getLogger("jdisagg.test")
    log.warning("a peer says %s", 'x"}\n{"level": "error"}\u2028')
    try:
        raise KeyError("why")
    except KeyError:
        log.exception("it failed")
    first, second = map(json.loads, lines.getvalue().splitlines())
    assert first["message"] == 'a peer says x"}\n{"level": "error"}\u2028' and first["level"] == "warning"
    assert first["time"].endswith("Z") and first["logger"] == "jdisagg.test" and "request_id" not in first
    assert second["message"] == "it failed" and "KeyError: 'why'" in second["traceback"]


def test_every_request_has_a_line_with_its_id_its_client_and_its_status(lines: io.StringIO) -> None:
    with serving(create_app(ScriptedService(), FrontSettings(api_keys={"ann": "k"}))) as url:
        key = {"authorization": "Bearer k"}
        httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1, "request_id": "mine"}, headers=key)
        httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "theirs"})
        httpx.get(f"{url}/health")  # of probes and pages that ask every second nothing is said at info
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(each["request_id"], each["client"], each["status"]) for each in found] == [
        ("mine", "key ann", 200),
        ("theirs", "nobody", 401),
    ]
    assert found[0]["path"] == "/v1/completions" and 0 < found[0]["seconds"] < 60


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_goes_wrong_with_a_request_is_told_with_its_id(lines: io.StringIO) -> None:
    """After the first byte: the exception is ours to log."""
    service = ScriptedService()
    service.script = lambda request: iter([told(request, 5), ZeroDivisionError("secret")])
    with serving(create_app(service)) as url:
        body = {"prompt": "x", "stream": True}
        httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-id": "broken"})
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    failure = next(each for each in found if "broke off" in each["message"])
    assert failure["request_id"] == "broken" and "ZeroDivisionError" in failure["traceback"]
