"""The page in a real browser, over toy workers: it is asked, answers, is stopped, left, attacked, locked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.browser.stacks import TEXT, Teller, told_stack
from tests.serve.chromium import NARROW, WIDE, Reader, reader
from tests.serve.live_http import eventually
from tests.serve.live_toy import ToyStack

pytestmark = pytest.mark.slow

LAST = "wait for their next token."
HOSTILE = (
    '<img src=x onerror="window.pwned=1"><script>window.pwned=2</script> <svg onload=window.pwned=3>'
    ' **<b onclick="pwned=4">bold</b>** `<i>code</i>`\n\n## <u>head</u>\n\n'
    '```html\n<iframe src="javascript:pwned=5">\n```\n'
    "[link](javascript:window.pwned=6) &lt;p&gt; </div></article>end"
)
PARTS = ("queue", "reserve", "prefill", "transfer", "first step", "decode")


@pytest.fixture(scope="module")
def told() -> Iterator[tuple[ToyStack, str]]:
    with told_stack() as told:
        yield told


@pytest.fixture
def stack(told: tuple[ToyStack, str]) -> Iterator[ToyStack]:
    """At rest before and after."""
    Teller.tell(TEXT)
    yield told[0]
    eventually(told[0].idle)


@pytest.fixture
def somebody(browser: Any, told: tuple[ToyStack, str], stack: ToyStack) -> Iterator[Reader]:
    with reader(browser, told[1]) as somebody:
        yield somebody


def count(somebody: Reader, selector: str) -> int:
    return somebody.page.locator(selector).count()


def test_an_answer_streams_and_ends_with_its_ledger(somebody: Reader) -> None:
    Teller.tell(TEXT, pause_s=0.01)
    somebody.ask("What is it?")
    somebody.page.get_by_text("travels between them").wait_for()  # before it ends
    assert somebody.page.is_visible("#stop") and not count(somebody, ".ledger")
    ledger = somebody.await_ledger()
    label = ledger.locator(".bar").get_attribute("aria-label")
    assert [each.rsplit(" ", 2)[0] for each in label.split(", ")] == list(PARTS)
    text = somebody.answer().inner_text()
    assert LAST in text and "tokens/s" in text and "reused of prompt" in text and "accepted drafts" not in text
    assert somebody.answer().locator("pre code").inner_text().startswith("def handoff(pages):")
    assert somebody.answer().locator("strong").inner_text() == "KV cache"
    assert not somebody.page.is_visible("#stop")
    assert "Answered with" in somebody.page.inner_text("#told")


def test_a_second_question_reuses_the_first_and_regenerate_answers_again(somebody: Reader) -> None:
    for index, question in enumerate(("One?", "Two?")):
        somebody.ask(question)
        somebody.await_ledger(index)
    facts = dict(
        zip(
            somebody.answer(1).locator("dt").all_inner_texts(),
            somebody.answer(1).locator("dd").all_inner_texts(),
            strict=True,
        )
    )
    reused, _, prompt, _, _ = facts["reused of prompt"].split()
    assert 0 < int(reused) < int(prompt)
    assert somebody.page.get_by_role("button", name="Regenerate").count() == 1
    Teller.tell("Another answer.")
    somebody.page.get_by_role("button", name="Regenerate").click()
    somebody.answer(1).get_by_text("Another answer.").wait_for()
    somebody.await_ledger(1)
    assert count(somebody, ".message") == 4


@pytest.mark.parametrize("way", ["button", "escape"])
def test_a_stopped_answer_keeps_its_beginning_and_gives_its_pages_back(
    way: str, somebody: Reader, stack: ToyStack
) -> None:
    Teller.tell(TEXT * 3, pause_s=0.02)
    somebody.ask("Go on and on")
    somebody.page.get_by_text("travels").wait_for()
    if way == "button":
        somebody.page.click("#stop")
    else:
        somebody.page.keyboard.press("Escape")
    somebody.answer().get_by_text("Stopped.").wait_for()
    eventually(stack.idle)
    somebody.await_ledger()  # the server remembers what it was doing
    assert "A prompt is computed" in somebody.answer().inner_text()
    assert stack.service.debug_state is not None
    assert stack.service.debug_state.records.summaries(1, 0.0)[0]["finish"] == "abort"


def test_a_page_reloaded_in_mid_stream_shows_what_came_and_can_ask_again(somebody: Reader, stack: ToyStack) -> None:
    Teller.tell(TEXT, pause_s=0.03)
    somebody.ask("Will this last?")
    somebody.page.get_by_text("travels").wait_for()
    somebody.page.reload()
    somebody.answer().get_by_text("Cut off when the page was left.").wait_for()
    assert "A prompt is computed" in somebody.answer().inner_text() and LAST not in somebody.answer().inner_text()
    eventually(stack.idle)
    Teller.tell(TEXT)
    somebody.page.fill("#max-tokens", "400")
    somebody.page.get_by_role("button", name="Regenerate").click()
    somebody.await_ledger()
    assert LAST in somebody.answer().inner_text() and count(somebody, ".message") == 2
    somebody.page.get_by_role("button", name="New chat").click()
    somebody.page.reload()
    somebody.page.locator(".log .empty").wait_for()


def test_what_a_model_writes_is_text_and_never_html(somebody: Reader) -> None:
    Teller.tell(HOSTILE)
    somebody.ask("<img src=y onerror=window.pwned=7>")
    somebody.await_ledger()
    assert not count(somebody, "#log :is(img, script, svg, iframe, b[onclick], u, a)")
    text = somebody.page.inner_text("#log")
    for piece in (
        '<img src=x onerror="window.pwned=1">',
        "<script>",
        "<svg onload",
        "&lt;p&gt; </div></article>end",
        "<iframe src",
        "<img src=y",
    ):
        assert piece in text
    assert somebody.page.evaluate("window.pwned") is None
    somebody.page.reload()
    somebody.answer().get_by_text("&lt;p&gt; </div></article>end").wait_for()  # what was kept, too
    assert somebody.page.evaluate("window.pwned") is None
    blocked = "try { document.body.innerHTML = '<b>x</b>'; 'done' } catch (error) { error.name }"
    assert somebody.page.evaluate(blocked) == "TypeError"
    somebody.wrong = [each for each in somebody.wrong if "TrustedHTML" not in each]


def test_errors_of_the_server_are_told_in_its_words(somebody: Reader) -> None:
    somebody.ask("x" * 5000)
    somebody.answer().locator(".wrong").wait_for()
    assert "tokens" in somebody.answer().inner_text()
    somebody.wrong = [each for each in somebody.wrong if "status of 400" not in each]


def test_a_locked_server_is_opened_with_its_key_which_stays_in_the_tab(browser: Any) -> None:
    with told_stack(api_key="sesame") as (stack, url), reader(browser, url) as somebody:
        page = somebody.page
        page.get_by_role("dialog", name="This server asks for a key").wait_for()
        page.fill("#key-input", "wrong")
        page.press("#key-input", "Enter")
        page.get_by_text("That key was refused.").wait_for()
        page.keyboard.press("Escape")
        page.fill("#key-input", "sesame")
        page.press("#key-input", "Enter")
        somebody.card("decode-0").wait_for()
        somebody.ask("Open?")
        somebody.await_ledger()
        assert page.evaluate("[sessionStorage.getItem('jdisagg.key'), localStorage.length, document.cookie]") == [
            "sesame",
            0,
            "",
        ]
        page.reload()
        somebody.card("decode-0").wait_for()
        assert not page.is_visible("#key")
        eventually(stack.idle)


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        pytest.param(WIDE, "light", id="wide-light"),
        pytest.param(NARROW, "dark", id="narrow-dark"),
        pytest.param({"width": 768, "height": 900}, "light", id="between-light"),
        pytest.param(WIDE, "dark", marks=pytest.mark.hostile, id="wide-dark"),
        pytest.param(NARROW, "light", marks=pytest.mark.hostile, id="narrow-light"),
        pytest.param({"width": 768, "height": 900}, "dark", marks=pytest.mark.hostile, id="between-dark"),
    ],
)
def test_everything_fits_and_has_a_name(
    browser: Any, told: tuple[ToyStack, str], stack: ToyStack, size: dict[str, int], scheme: str
) -> None:
    with reader(browser, told[1], size, scheme) as somebody:
        somebody.ask("Does a_very_long_word_" + "w" * 120 + " fit?")
        somebody.await_ledger()
        assert somebody.overflow() <= 0
        assert_named(somebody)
        if size is not WIDE:
            somebody.show("cluster")
        somebody.page.locator("#requests .row").first.wait_for()
        assert somebody.overflow() <= 0
        assert_named(somebody)
        somebody.page.locator("#requests .row").first.click()
        somebody.page.locator(".life").wait_for()
        assert somebody.overflow() <= 0
        ground = somebody.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(ground[4:].split(",")[0]) < 128) == (scheme == "dark")


def assert_named(somebody: Reader) -> None:
    """Whatever can be focused says to a screen reader what it is."""
    session = somebody.page.context.new_cdp_session(somebody.page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    focusable = [
        each
        for each in nodes
        if not each["ignored"]
        and any(prop["name"] == "focusable" and prop["value"]["value"] for prop in each.get("properties", ()))
    ]
    roles = {"button", "textbox", "spinbutton", "link", "log"}
    named = [each for each in focusable if each["role"]["value"] in roles]
    assert len(named) >= 4
    assert not [each["role"]["value"] for each in named if not each.get("name", {}).get("value", "").strip()]


def test_the_colours_can_be_chosen_and_stay(somebody: Reader) -> None:
    page = somebody.page
    for name in ("light", "dark"):
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == name
    page.reload()
    assert page.get_by_role("button", name="Colours: dark").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 21, 20)"
