"""`python -m jdisagg top --url=http://127.0.0.1:8000`: shows a running cluster live in the terminal, until Ctrl-C.

It shows what the page at `/` shows, from the same document (`GET /debug/cluster`): workers with their meshes and
pages, transfers, queues, the latest requests with their ledgers, and the latest decisions. --once prints one picture
and ends.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jdisagg import command, flags
from jdisagg.core.errors import FlagError, JdisaggError
from jdisagg.core.ledger import PARTS

TIMEOUT_S = 10.0
MAX_DOCUMENT_BYTES = 16 << 20
STEADY_S = 1.2  # rates are over at least this time, since workers of other processes report each second
USES = {"live": "blue", "in_flight": "red", "cached": "cyan", "free": "bright_black"}
COLOURS = dict(zip(PARTS, ("bright_black", "yellow", "blue", "red", "magenta", "green"), strict=True))
WIDE = 120  # columns; narrower terminals show fewer details
REQUESTS, DECISIONS = 8, 5
Document = dict[str, Any]


class NoAnswerError(JdisaggError):
    """Raised when the server did not answer, or not with a document."""


def fetch(url: str, api_key: str) -> Document:
    """Returns the document of `GET /debug/cluster`. Raises NoAnswerError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    address = f"{url.rstrip('/')}/debug/cluster"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIMEOUT_S) as reply:
            document = json.loads(reply.read(MAX_DOCUMENT_BYTES))
    except urllib.error.HTTPError as error:
        reasons = {401: "the key is missing or wrong: --api_key", 404: "nothing is recorded there: --debug_keep=0"}
        raise NoAnswerError(f"{address}: {reasons.get(error.code, f'HTTP {error.code}')}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoAnswerError(f"{address}: {getattr(error, 'reason', None) or error}") from error
    if not isinstance(document, dict) or "workers" not in document:
        raise NoAnswerError(f"{address}: that is no jdisagg server")
    return document


class DocumentHistory:
    """The latest document and a slightly earlier one, between which rates are computed."""

    def __init__(self) -> None:
        self._documents = deque[Document](maxlen=256)

    def take(self, document: Document) -> None:
        documents = self._documents
        if documents and document["now_s"] < documents[-1]["now_s"]:
            documents.clear()  # another server
        documents.append(document)
        while len(documents) > 2 and document["now_s"] - documents[1]["now_s"] >= STEADY_S:
            documents.popleft()

    @property
    def last(self) -> Document:
        return self._documents[-1]

    @property
    def before(self) -> Document:
        return self._documents[0]

    def per_second(self, pick: Callable[[Document], float]) -> float:
        """Returns the growth per second of the number that `pick` reads from a document."""
        elapsed_s = self.last["now_s"] - self.before["now_s"]
        return max(0.0, pick(self.last) - pick(self.before)) / elapsed_s if elapsed_s > 0 else 0.0


def _row(document: Document, kind: str, **names: str) -> dict[str, Any]:
    """Returns the worker or link with these names; empty if it is not there."""
    return next((each for each in document[kind] if names.items() <= each.items()), {})


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s else "-"


def seconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e9:.2f} s" if nanoseconds >= 1e9 else f"{nanoseconds / 1e6:.1f} ms"


def cells(amounts: Mapping[str, float], colours: Mapping[str, str], width: int) -> Text:
    """Draws a bar: each amount gets its share of `width` cells, in its colour."""
    whole, filled, total = sum(amounts.values()), 0, 0.0
    bar = Text()
    for name, colour in colours.items():
        total += amounts.get(name, 0.0)
        end = round(width * total / whole) if whole else 0
        bar.append(("░" if name == "free" else "█") * (end - filled), colour)
        filled = end
    return bar


def picture(watch: DocumentHistory, width: int = WIDE) -> RenderableType:
    """Returns the tables for a terminal of `width` columns."""
    document, is_wide = watch.last, width >= WIDE
    tables = [_workers(watch, is_wide), _links(watch), _requests(document, is_wide), _decisions(document)]
    shown = [part for each in tables if each.row_count for part in (each, Text())]
    return Group(_head(watch), *shown)


def _table(*names: str, numbers: str = "", is_wide: bool = True) -> Table:
    """Returns an empty table; `numbers` names the right-aligned columns."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2 if is_wide else 1, 0, 0))
    for name in names:
        table.add_column(name, justify="right" if name in numbers.split(",") else "left", no_wrap=True)
    return table


def _head(watch: DocumentHistory) -> Text:
    document, totals = watch.last, watch.last["totals"]
    hits, queries = (sum(each[name] for each in document["workers"]) for name in ("prefix_hits", "prefix_queries"))
    pace = watch.per_second(lambda each: each["totals"]["output_tokens"])
    text = Text.assemble((f"{document['model']}", "bold"), f"  {document['state']}")
    text.append(f"   waiting {totals['waiting']:.0f}   running {totals['running']:.0f}   {pace:.1f} tokens/s")
    text.append(f"   prefix hits {share(hits, queries)}\n")
    for change in document["changes"][-1:]:
        text.append(f"{change['worker']} {change['what']} {document['now_s'] - change['at_s']:.0f} s ago\n", "dim")
    return text


def _workers(watch: DocumentHistory, is_wide: bool) -> Table:
    numbers = "live,in flight,cached,free,seqs,queue,tok/s,hits"
    table = _table("workers", "mesh", "pages", *numbers.split(","), numbers=numbers, is_wide=is_wide)
    for each in watch.last["workers"]:
        tokens = watch.per_second(lambda document, name=each["worker"]: _tokens(_row(document, "workers", worker=name)))
        pages = [str(each["pages"][use]) for use in USES]
        sequences = f"{each['sequences']['running']}/{each['num_slots']}" if each["num_slots"] else "-"
        name = Text(each["worker"], "dim" if each["leaving"] else "")
        queue, hits = f"{each['backlog_tokens']:.0f}", share(each["prefix_hits"], each["prefix_queries"])
        bar = cells(each["pages"], USES, 24 if is_wide else 8)
        table.add_row(name, _mesh(each), bar, *pages, sequences, queue, f"{tokens:.1f}", hits)
    return table


def _tokens(worker: dict[str, Any]) -> float:
    return worker.get("prefill_tokens", 0.0) + worker.get("decode_tokens", 0.0)


def _mesh(worker: dict[str, Any]) -> str:
    stages = worker["stages"]
    shards = stages[0]["shards"] if stages else 1
    return (f"pp{len(stages)} " if len(stages) > 1 else "") + f"tp{shards}"


def _links(watch: DocumentHistory) -> Table:
    table = _table("transfers", "speed", "moved", "parts", numbers="speed,moved,parts")
    for each in watch.last["links"]:
        before = _row(watch.before, "links", source=each["source"], destination=each["destination"])
        moved, took_s = (each[name] - before.get(name, 0.0) for name in ("bytes", "wire_s"))
        pace = moved / took_s if moved > 0 and took_s > 0 else each["bytes"] / each["wire_s"] if each["wire_s"] else 0.0
        way = Text(f"{each['source']} → {each['destination']}", "red" if moved > 0 else "")
        table.add_row(way, speed(pace), decimal(int(each["bytes"])), f"{each['parts']:.0f}")
    return table


def _requests(document: Document, is_wide: bool) -> Table:
    names = "requests,phase,workers,in,out,ledger,took"
    table = _table(*names.split(","), numbers="in,out,took", is_wide=is_wide)
    for each in document["requests"][:REQUESTS]:
        name = Text(each["request_id"][: 28 if is_wide else 14])
        phase = f"{each['phase']} ({each['finish']})" if is_wide and each["finish"] else each["phase"]
        bar, took = cells(each["parts_ns"], COLOURS, 20 if is_wide else 8), seconds(sum(each["parts_ns"].values()))
        sizes = str(each["prompt_tokens"]), str(each["tokens"])
        table.add_row(name, phase, Text(_pair(each["workers"])), *sizes, bar, took)
    return table


def _decisions(document: Document) -> Table:
    table = _table("decisions", "", "")
    table.expand, table.columns[2].ratio, table.columns[2].overflow = True, 1, "ellipsis"
    for each in document["decisions"][:DECISIONS]:
        way = _pair(each["taken"]) if each["taken"] else each["decision"]
        ago = f"{document['now_s'] - each['at_s']:.0f} s ago"
        table.add_row(Text(way), Text(ago), Text(each["reason"]))
    return table


def _pair(workers: dict[str, str | None] | None) -> str:
    names = list(dict.fromkeys(each for each in (workers or {}).values() if each))
    return " → ".join(names) or "-"


def pictures(
    fetch_document: Callable[[], Document], every_s: float, width: Callable[[], int]
) -> Iterator[RenderableType]:
    """Yields a picture every `every_s` seconds, for ever; the error if the server does not answer."""
    watch = DocumentHistory()
    while True:
        try:
            watch.take(fetch_document())
            yield picture(watch, width())
        except NoAnswerError as error:
            yield Text(f"{error}; trying again", "red")
        time.sleep(every_s)


def declare() -> flags.FlagValues:
    values = flags.own()
    flags.define(values, api_key="")
    absl_flags.DEFINE_string("url", "http://127.0.0.1:8000", "the server's, as http://HOST:PORT", flag_values=values)
    absl_flags.DEFINE_float("every_s", 0.5, "between two pictures", 0.1, 3600.0, flag_values=values)
    absl_flags.DEFINE_bool("once", False, "print one picture and end", flag_values=values)
    return values


def body(values: flags.FlagValues) -> int:
    if not values.url.startswith(("http://", "https://")):
        raise FlagError(f"--url is {values.url!r}, must begin with http:// or https://")
    console = Console()
    if values.once:
        watch = DocumentHistory()
        watch.take(fetch(values.url, values.api_key))
        console.print(picture(watch, console.width))
        return 0
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        for each in pictures(lambda: fetch(values.url, values.api_key), values.every_s, lambda: console.width):
            live.update(each, refresh=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, 2 with one line for an error, or 130 after Ctrl-C."""
    return command.run("jdisagg top", __doc__, declare(), argv, body, positional="url")


if __name__ == "__main__":
    sys.exit(main())
