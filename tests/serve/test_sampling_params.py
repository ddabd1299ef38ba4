"""What a caller of the library asks for becomes what a client of HTTP would have asked for."""

from __future__ import annotations

import asyncio

import pytest

from jdisagg.core import request as core
from jdisagg.core.request import SamplingParams
from jdisagg.engine.sampling import SEED_HIGH, SEED_LOW, SamplingRows
from jdisagg.serve.frontends import offline
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.jobs import completion_job
from jdisagg.serve.frontends.http.schema import CompletionBody
from tests.serve.live_toy import toy_stack

DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20.0}


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**40, 2**63 - 1, -1, -(2**63)])
def test_a_seed_is_the_same_number_in_python_and_over_http(seed: int) -> None:
    with toy_stack() as stack:
        job = asyncio.run(
            completion_job(
                CompletionBody.model_validate({"prompt": [1, 2], "seed": seed, "n": 3}),
                stack.service,
                FrontSettings(),
                "x",
            )
        )
        order = offline.order_of(stack.service, [1, 2], SamplingParams(seed=seed, n=3))
    seeds = [choice.request.sampling.seed for choice in job.choices]
    assert seeds == [request.sampling.seed for request in order.requests] and len(set(seeds)) == 3
    assert knob_seed(seed) == knob_seed(seeds[0]), "and the device draws by all of it"


def knob_seed(seed: int) -> list[int]:
    rows = SamplingRows(1)
    rows.set(0, core.SamplingParams(seed=seed), 0)
    return rows.ints[0, [SEED_LOW, SEED_HIGH]].tolist()


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"temperature": 1.0},
        {"max_tokens": 3, "min_tokens": 1, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"stop": "a"},
        {"stop": ["a", "", "b", "a"], "include_stop_str_in_output": True, "skip_special_tokens": False},
        {"stop_token_ids": [5, 6, 5], "ignore_eos": True},
        {"stop_token_ids": [7]},
        {"logprobs": 3, "prompt_logprobs": 1},
    ],
)
def test_every_field_means_what_it_means_over_http(said: dict) -> None:
    with toy_stack() as stack:
        stack.service.sampling_defaults.update(DEFAULTS)
        settings = FrontSettings(sampling_defaults=stack.service.sampling_defaults)
        body = CompletionBody.model_validate({"prompt": [1, 2], "seed": 3, **said})
        job = asyncio.run(completion_job(body, stack.service, settings, "x"))
        order = offline.order_of(stack.service, [1, 2], SamplingParams(seed=3, **said))
    assert order.requests[0].sampling == job.choices[0].request.sampling
    assert order.options == job.options
