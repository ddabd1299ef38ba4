"""`import jdisagg`: the Python way in, as the README shows it."""

import asyncio
import json
import subprocess
import sys
import time

import openai
import pytest

import jdisagg
from jdisagg.core.errors import RequestError
from jdisagg.serve.deploy import servers
from jdisagg.serve.frontends.http.app import create_app
from tests.environment import as_users
from tests.fixtures import conformance
from tests.hostile.model_folders import change, copy
from tests.serve.live_http import serving

FAMILY = conformance.load("llama3")


# What the model says of sampling where nobody else does; the tiny one draws from nearly all of its tokens.
DEFAULTS = {"do_sample": True, "temperature": 0.9, "top_p": 0.8, "top_k": 40, "repetition_penalty": 1.2}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f(x):"}]
SEEDS = (0, 1, 2, 7, 12345, 2**31 - 1, 2**40 + 1, -3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = change(copy(tmp_path_factory.mktemp("model") / "tiny"), "generation_config.json", **DEFAULTS)
    with jdisagg.LLM(
        model=str(folder),
        mesh="prefill:tp2,decode:pp2",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    ) as running:
        yield running


def greedy(max_tokens):
    return jdisagg.SamplingParams(
        max_tokens=max_tokens, temperature=0.0, repetition_penalty=1.0, stop_token_ids=(0,), ignore_eos=True
    )


def test_importing_the_package_imports_neither_jax_nor_a_server():
    code = "import sys, jdisagg; sys.exit(bool({'jax', 'flax', 'fastapi', 'grpc'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_greedy_answers_are_those_of_transformers(llm):
    answers = llm.generate_all(FAMILY.prompts, greedy(24))
    assert [list(answer.token_ids) for answer in answers] == FAMILY.greedy


ELSEWHERE = """
import json, sys, jdisagg
sizes = {"mesh": "prefill:tp1,decode:tp1", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
greedy = jdisagg.SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(0,), ignore_eos=True)
with jdisagg.LLM(model=sys.argv[1], **sizes) as llm:
    print(json.dumps([answer.token_ids for answer in llm.generate_all(json.load(sys.stdin), greedy)]))
"""


@pytest.mark.slow
def test_programs_compiled_as_for_a_user_answer_as_transformers_does():
    """All else here is compiled quickly (see tests/environment.py)."""
    command, asked = [sys.executable, "-c", ELSEWHERE, str(FAMILY.folder)], json.dumps(FAMILY.prompts)
    done = subprocess.run(
        command, input=asked, capture_output=True, text=True, timeout=280, env=as_users(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == FAMILY.greedy


def test_an_answer_knows_where_its_time_went(llm):
    answer = llm.generate("def f():", greedy(5))
    assert answer.finish_reason in ("length", "stop") and len(answer.token_ids) <= 5
    assert answer.ledger is not None
    assert sum(answer.ledger.parts_ns().values()) == answer.ledger.total_ns > 0


def test_a_stream_closed_early_frees_everything_it_held(llm):
    async def first_piece():
        async for piece in llm.stream(FAMILY.prompts[0], greedy(80)):
            return piece
        return None

    assert asyncio.run(first_piece()) is not None
    pages = [actor.shared for name, actor in llm.service.driver.actors.items() if name != "router"]
    for _ in range(1200):
        if all(each.available == each.pool.num_pages for each in pages):
            break
        time.sleep(0.05)
    assert all(each.available == each.pool.num_pages for each in pages)
    assert llm.service.running == 0


def test_a_prompt_over_the_limit_is_refused_with_both_numbers(llm):
    with pytest.raises(Exception, match=r"prompt of 120 tokens \+ max_tokens 24 = 144, over the limit of 128"):
        llm.generate([1] * 120, greedy(24))


def test_the_next_turn_of_a_conversation_is_finished_where_its_answer_lies_and_is_the_same(llm):
    said = [(7 * index) % 101 + 3 for index in range(40)]
    answered = llm.generate(said, jdisagg.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    again = [*said, *answered.token_ids, 5, 6, 7]
    last = jdisagg.SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    here = llm.generate(again, last)
    assert here.cached_tokens == 64, "two pages of 32, of which its prefill worker had one"
    decision = llm.service.debug_state.records.decisions(1)[0]
    assert decision["taken"] == {"prefill": "decode-0", "decode": "decode-0"}, decision
    alone = decision["candidates"]["decode_alone"][0]
    assert 0.0 < alone["parts"]["prefill"] < sum(alone["parts"].values()), "seconds of 19 tokens, besides the decoding"
    with jdisagg.LLM(model=llm.settings.model, mesh="colocated:tp1", max_model_len=128, prefix_caching="off") as other:
        assert other.generate(again, last).token_ids == here.token_ids
    assert other._loop.is_closed(), "closing leaves no loop open"


def test_nothing_is_compiled_after_the_stack_is_ready(llm):
    llm.generate_all([[1, 2, 3], [5] * 70, "for x in"], jdisagg.SamplingParams(max_tokens=20, seed=3, top_p=0.9))
    assert llm.service.recompiles() == 0


# ---------------------------------------------------------------- the same over HTTP


@pytest.fixture(scope="module")
def client(llm):
    app = create_app(llm.service, servers.front_settings(llm.service, llm.settings))
    with serving(app) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    "said",
    [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 1.0}, {"extra": {"top_k": 0, "min_p": 0.01}}],
    ids=["silent", "temperature alone", "two", "more"],
)
def test_a_seed_draws_the_same_in_python_and_over_http(llm, client, said):
    said = dict(said)
    extra, differing = said.pop("extra", {}), set()
    for seed in SEEDS:
        more = {**extra, "return_token_ids": True}
        told = client.completions.create(
            model="tiny", prompt="def f(", max_tokens=16, seed=seed, extra_body=more, **said
        )
        here = llm.generate("def f(", jdisagg.SamplingParams(max_tokens=16, seed=seed, **said, **extra))
        assert here.text == told.choices[0].text and here.finish_reason == told.choices[0].finish_reason
        assert list(here.token_ids) == told.choices[0].model_extra["token_ids"]
        differing.add(here.token_ids)
    assert len(differing) >= len(SEEDS) - 1, "nothing was drawn at all"


def test_choices_stop_strings_and_logprobs_are_those_of_http(llm, client):
    for seed in SEEDS[:3]:
        plain = llm.generate("x = ", jdisagg.SamplingParams(max_tokens=24, seed=seed, n=3, logprobs=2))
        assert len({choice.token_ids for choice in plain.choices}) == 3
        stop = next(char for char in plain.choices[1].text[3:] if char.isprintable())
        told = client.completions.create(
            model="tiny", prompt="x = ", max_tokens=24, seed=seed, n=3, stop=[stop], logprobs=2
        )
        here = llm.generate("x = ", jdisagg.SamplingParams(max_tokens=24, seed=seed, n=3, stop=stop, logprobs=2))
        assert [each.text for each in here.choices] == [each.text for each in told.choices]
        assert [each.finish_reason for each in here.choices] == [each.finish_reason for each in told.choices]
        assert here.choices[1].stop_reason == stop and stop not in here.choices[1].text
        assert here.logprobs is not None and here.logprobs == here.choices[0].logprobs
        known = [token.logprob for token in here.logprobs]
        assert known == pytest.approx(told.choices[0].logprobs.token_logprobs) and len(here.logprobs[0].top) == 2
        assert told.usage.prompt_tokens == here.num_prompt_tokens
        assert told.usage.prompt_tokens_details.cached_tokens == here.cached_tokens == 0
    assert llm.generate("x", greedy(2)).logprobs is None


def test_a_conversation_is_answered_as_over_http(llm, client):
    for seed in SEEDS[:4]:
        told = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=seed, max_tokens=12)
        here = llm.chat(MESSAGES, jdisagg.SamplingParams(seed=seed, max_tokens=12))
        assert here.text == told.choices[0].message.content
        assert here.num_prompt_tokens == told.usage.prompt_tokens
    whole = llm.chat(MESSAGES, jdisagg.SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(whole.token_ids) == 128 - whole.num_prompt_tokens and whole.finish_reason == "length"
    with pytest.raises(RequestError, match="tool"):
        llm.chat([{"role": "tool", "content": "4", "tool_call_id": "x"}])


def test_the_models_end_token_ends_unless_it_is_ignored(llm):
    (end,) = llm.service.tokenizer.eos_ids
    bias = {end: 100.0}
    ended = llm.generate("a", jdisagg.SamplingParams(max_tokens=60, seed=1, logit_bias=bias, min_tokens=3))
    assert ended.finish_reason == "stop" and len(ended.token_ids) == 4 and ended.choices[0].stop_reason is None
    on = llm.generate("a", jdisagg.SamplingParams(max_tokens=60, seed=1, logit_bias=bias, ignore_eos=True))
    assert on.finish_reason == "length" and end in on.token_ids


def test_a_stream_of_several_answers_says_of_which_each_piece_is(llm):
    sampling = jdisagg.SamplingParams(max_tokens=10, seed=5, n=3)

    async def all_pieces():
        return [piece async for piece in llm.stream("def ", sampling)]

    pieces = asyncio.run(all_pieces())
    texts = ["".join(piece.text for piece in pieces if piece.choice == choice) for choice in range(3)]
    assert texts == [choice.text for choice in llm.generate("def ", sampling).choices]


def test_no_seed_draws_anew_each_time(llm):
    sampling = jdisagg.SamplingParams(max_tokens=24)
    assert len({llm.generate("def f", sampling).token_ids for _ in range(4)}) > 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"top_k": 2**31}, "top_k is 2147483648"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"seed": "1"}, "seed is '1'"),
        ({"n": 0}, "n is 0"),
        ({"n": None}, "n is None"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
        ({"stop": [5]}, r"stop is \[5\]"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids is"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named_and_nobody_else_hears_of_it(llm, wrong, says):
    with pytest.raises(RequestError, match=says):
        llm.generate("x", jdisagg.SamplingParams(**wrong))
    assert llm.generate("x", greedy(2)).finish_reason == "length"
