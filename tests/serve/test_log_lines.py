"""What others say cannot pass for a line of the log."""

from __future__ import annotations

import io
import logging

from jdisagg.serve.log_lines import OneLine


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
