"""One answer and a conversation in the terminal: what is printed, what is sent, and what Ctrl-C and Ctrl-D do."""

import asyncio
import io
import os
import re
import signal

import pytest
from rich.console import Console

from jdisagg.core.errors import RequestError
from jdisagg.core.request import FinishReason
from jdisagg.core.settings import Settings
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.terminal import complete_one, converse
from tests.fixtures.conformance import ROOT
from tests.serve.scripted import ScriptedService, tokens


def saying(*answers):
    """A service that gives one of these texts after the other."""
    waiting = list(answers)

    def script(request):
        ids = service.tokenizer.encode(waiting.pop(0), add_special_tokens=False)
        return tokens(request, ids)

    service = ScriptedService(script)
    return service


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=1000)


def talk(service, console, *lines, **settings):
    code = asyncio.run(converse(service, Settings(chat=True, **settings), console, io.StringIO("\n".join(lines))))
    return code, console.file.getvalue()


def sent(service, index=0):
    return service.tokenizer.decode(service.seen[index].prompt, skip_special_tokens=False)


def test_a_prompt_goes_by_the_chat_template_and_the_answer_alone_is_printed(console, capsys):
    service = saying("x")
    assert asyncio.run(complete_one(service, Settings(prompt="hello"), console)) == 0
    assert sent(service) == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    assert capsys.readouterr().out == "x\n"
    assert "prefill" in console.file.getvalue() and "whole" in console.file.getvalue()


def test_a_raw_prompt_and_a_model_without_a_template_are_completed(console, capsys):
    service, plain = saying("x"), saying("x")
    plain.tokenizer = Tokenizer(ROOT / "qwen3")
    for each, raw in ((service, True), (plain, False)):
        assert asyncio.run(complete_one(each, Settings(prompt="hello", raw_prompt=raw), console)) == 0
        assert sent(each) == "<|bos|>hello"
        assert capsys.readouterr().out == "hellox\n"


def test_an_answer_is_no_longer_than_the_model_has_room(console):
    for raw in (True, False):
        service = saying("x")
        asyncio.run(complete_one(service, Settings(prompt="hello", raw_prompt=raw, max_tokens=9999), console))
        (request,) = service.seen
        assert request.sampling.max_tokens == service.max_model_len - len(request.prompt)


def test_a_conversation_sends_all_that_was_said_and_tells_of_each_turn(console, capsys):
    service = saying("one", "two")
    code, told = talk(service, console, "first", "", "second")
    assert code == 0
    assert sent(service) == "<|start|>user\nfirst<|end|>\n<|start|>assistant\n"
    assert sent(service, 1) == (
        "<|start|>user\nfirst<|end|>\n<|start|>assistant\none<|end|>\n<|start|>user\nsecond<|end|>\n<|start|>assistant\n"
    )
    assert capsys.readouterr().out == "> first\none\n> \n> second\ntwo\n> \n"
    line = r"first token after \d+ ms, \d+ tokens at [\d,.]+ tokens/s, 0 of \d+ prompt tokens reused, no handoff"
    assert len(re.findall(line, told)) == 2, told


def test_a_conversation_that_is_too_long_begins_anew(console):
    service = saying("one", "two")
    code, told = talk(service, console, "a" * 5000, "short")
    assert code == 0 and "what was said is forgotten" in told
    assert sent(service) == "<|start|>user\nshort<|end|>\n<|start|>assistant\n"


def test_an_answer_that_ends_as_an_error_ends_the_conversation(console, capsys):
    service = ScriptedService(lambda request: tokens(request, [5], FinishReason.ERROR))
    assert talk(service, console, "first", "second")[0] == 1
    assert capsys.readouterr().err.startswith("jdisagg: the answer ended early: ")


def test_a_model_without_a_template_cannot_talk(console):
    service = saying("x")
    service.tokenizer = Tokenizer(ROOT / "qwen3")
    with pytest.raises(RequestError, match="tiny has no chat template"):
        talk(service, console, "first")


def test_an_interrupt_stops_the_answer_and_not_the_conversation(console, capsys):
    def script(request):
        if len(service.seen) > 1:
            yield from tokens(request, service.tokenizer.encode("two", add_special_tokens=False))
            return
        yield from list(tokens(request, service.tokenizer.encode("on", add_special_tokens=False)))[:-1]
        os.kill(os.getpid(), signal.SIGINT)
        yield 60.0

    service = ScriptedService(script)
    code, told = talk(service, console, "first", "second")
    assert code == 0 and not service.running, "the stopped request was not given up"
    assert "assistant\non<|end|>\n<|start|>user\nsecond" in sent(service, 1)
    assert "tokens at" in told and ", stopped\n" in told
    assert capsys.readouterr().out.startswith("> first\non\n> second\ntwo\n")
