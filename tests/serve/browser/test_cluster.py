"""The live picture in a real browser, over toy workers: pages, transfers, lives, decisions, by mouse and keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.browser.stacks import PAGES, TEXT, Teller, told_stack
from tests.serve.chromium import NARROW, WIDE, Reader, reader
from tests.serve.live_http import eventually
from tests.serve.live_toy import ToyStack

pytestmark = pytest.mark.slow

QUESTIONS = ("What is disaggregated inference?", "And why would one do that?")


@pytest.fixture(scope="module")
def told() -> Iterator[tuple[ToyStack, str]]:
    with told_stack() as told:
        yield told


@pytest.fixture
def somebody(browser: Any, told: tuple[ToyStack, str]) -> Iterator[Reader]:
    Teller.tell(TEXT)
    with reader(browser, told[1]) as somebody:
        yield somebody
    eventually(told[0].idle)


def busy_card(somebody: Reader) -> Any:
    """Of the worker that decodes."""
    return somebody.page.locator("article.card.decode").filter(has_text="1 of 8")


def uses(card: Any) -> dict[str, int]:
    """Pages by use, as the card says."""
    words = [each.split(" ", 1) for each in card.locator(".uses").inner_text().split(" · ")]
    return {name: int(number) for number, name in words}


def test_workers_are_drawn_as_meshes_and_pages_fill_and_empty(somebody: Reader) -> None:
    somebody.card("decode-1").wait_for()
    assert somebody.card("prefill-0").locator(".stage").count() == 1
    assert somebody.card("decode-1").locator(".stage").all_inner_texts()[1].split() == ["→", "3–5"]
    Teller.tell(TEXT, pause_s=0.02)
    somebody.ask(QUESTIONS[0])
    card = busy_card(somebody)
    card.wait_for()
    filled = uses(card)
    assert filled["live"] > 0 and sum(filled.values()) == PAGES
    somebody.await_ledger()
    idle = somebody.page.locator("article.card.decode").filter(has_text="0 live")
    eventually(lambda: idle.count() == 2)
    words = somebody.page.locator(".links li").first.inner_text().split()
    assert words[0].startswith("prefill") and words[1].startswith("decode") and "GB/s" in words and words[-1] == "parts"
    assert somebody.page.locator("#arrows .arrow").count() >= 1
    assert "prefix hits" in somebody.page.inner_text("#totals")


def test_a_click_on_a_request_shows_its_life_and_escape_brings_the_focus_back(somebody: Reader) -> None:
    somebody.ask(QUESTIONS[0])
    somebody.await_ledger()
    row = somebody.page.locator("#requests .row").first
    eventually(lambda: "finished" in row.inner_text())
    row.focus()
    somebody.page.keyboard.press("Enter")
    life = somebody.page.get_by_role("dialog").locator(".life")
    life.wait_for()
    assert life.locator(".lane-name").all_inner_texts()[:3] == ["ledger", "chunks", "KV parts"]
    assert set(life.locator("tbody td:first-child").all_inner_texts()) >= {"queue", "prefill", "transfer", "decode"}
    life.locator("summary").click()
    assert "StartPrefill" in life.locator("details").inner_text()
    somebody.page.keyboard.press("Escape")
    eventually(lambda: somebody.page.evaluate("document.activeElement.className") == "row")


def test_a_click_on_a_decision_shows_who_was_weighed(somebody: Reader) -> None:
    somebody.ask(QUESTIONS[1])
    somebody.await_ledger()
    somebody.page.locator("#decisions .row").first.click()
    dialog = somebody.page.get_by_role("dialog")
    table = dialog.get_by_role("table", name="For the prompt")
    table.wait_for()
    assert sorted(table.locator("tbody th").all_inner_texts()) == ["prefill-0", "prefill-1"]
    assert table.locator("tr.taken td").last.inner_text() == "taken"
    assert "cache_aware" in dialog.inner_text()
    dialog.get_by_role("button", name="The request's life").click()
    dialog.locator(".life").wait_for()
    dialog.get_by_role("button", name="Close").click()
    assert not dialog.count()


def test_a_life_that_goes_on_is_followed_to_its_end(somebody: Reader) -> None:
    Teller.tell(TEXT, pause_s=0.03)
    somebody.ask(QUESTIONS[0])
    somebody.page.locator("#requests .phase.decoding").click()
    life = somebody.page.locator(".life")
    life.get_by_text("decoding").wait_for()
    life.get_by_text("finished (stop)").wait_for()
    assert not life.get_by_text("decoding", exact=True).count()


def test_nothing_is_asked_while_nobody_looks(somebody: Reader) -> None:
    """A tab in the background asks for nothing."""
    page, asked = somebody.page, list[str]()
    somebody.card("decode-0").wait_for()
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(700)
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(1500)
    assert not asked
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    eventually(lambda: bool(page.wait_for_timeout(50) or asked))


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        pytest.param(WIDE, "light", id="1600-light"),
        pytest.param(NARROW, "dark", id="360-dark"),
        pytest.param(WIDE, "dark", marks=pytest.mark.hostile, id="1600-dark"),
        pytest.param(NARROW, "light", marks=pytest.mark.hostile, id="360-light"),
    ],
)
def test_the_pictures_of_the_docs(
    browser: Any, told: tuple[ToyStack, str], size: dict[str, int], scheme: str, screenshots: str
) -> None:
    """Made with --screenshots=docs/images -m "hostile or not hostile", which makes all four."""
    name = f"page-{size['width']}-{scheme}"
    with reader(browser, told[1], size, scheme) as somebody:
        for index, question in enumerate(QUESTIONS):
            Teller.tell(TEXT, pause_s=0.004 + 0.02 * index)
            somebody.ask(question)
            if index == 0:
                somebody.await_ledger()
        if size is WIDE:
            busy_card(somebody).wait_for()
            somebody.page.wait_for_timeout(4000)  # half of the answer is there
            somebody.shoot(screenshots, name)
        else:
            somebody.await_ledger(1)
            somebody.shoot(screenshots, f"{name}-chat")
            somebody.show("cluster")
            somebody.page.locator("#requests .row").first.wait_for()
            somebody.shoot(screenshots, f"{name}-cluster")
        somebody.page.locator("#requests .row").first.click()
        somebody.page.locator(".life").wait_for()
        somebody.shoot(screenshots, f"{name}-life")
        somebody.page.keyboard.press("Escape")
        if size is WIDE:
            somebody.page.locator("#decisions .row").first.click()
            somebody.page.locator(".weighed").first.wait_for()
            somebody.shoot(screenshots, f"{name}-decision")
            somebody.page.keyboard.press("Escape")
        somebody.page.keyboard.press("Escape")
    eventually(told[0].idle)
