"""Answers whose forced tokens go as one chunk are those of tokens drawn one by one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from jdisagg import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"customer_name": {"type": "string", "maxLength": 8}, "is_active": {"type": "boolean"}},
    "required": ["customer_name", "is_active"],
    "additionalProperties": False,
}
FORM = {"json": SCHEMA, "disable_any_whitespace": True}
HELD = SamplingParams(max_tokens=60, temperature=0.0, structured_outputs=FORM, logprobs=2)
ASKED = [
    HELD,
    SamplingParams(max_tokens=60, temperature=0.9, seed=4, structured_outputs=FORM),
    SamplingParams(max_tokens=60, temperature=0.7, seed=5, structured_outputs=FORM, frequency_penalty=0.4, logprobs=0),
    SamplingParams(max_tokens=9, temperature=0.7, seed=6, structured_outputs=FORM),
    SamplingParams(max_tokens=60, temperature=0.7, seed=7, structured_outputs=FORM, stop=["is_a"]),
    SamplingParams(max_tokens=50, temperature=0.8, seed=8, ignore_eos=True),
]
SIZES = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "prefill_buckets": "64"}
FEW = {"page_size": 8, "kv_tokens": 256, "reserve_tokens": 4, "table_buckets": "128"}  # preempted now and then


@pytest.mark.slow
def test_tokens_texts_usage_ends_and_log_probabilities_are_those_of_tokens_drawn_one_by_one():
    """Which they are where a request wants none drawn ahead."""
    with LLM(mesh="prefill:tp1,decode:tp2", **SIZES, **FEW) as llm, ThreadPoolExecutor() as pool:
        rounds = [
            [pool.submit(llm.generate, f"# {number}\ncustomer = ", each) for number, each in enumerate(asked)]
            for asked in ([replace(each, speculative=False) for each in ASKED], ASKED)
        ]
        plain, chunked = ([each.result() for each in answers] for answers in rounds)
        assert llm.service.recompiles() == 0 and llm.service.metrics is not None
        told = [line.split(" ") for line in llm.service.metrics.render().decode().splitlines()]
    assert sum(float(line[1]) for line in told if line[0].startswith("jdisagg_spec_decode_accepted_tokens_total")) > 20
    for mine, other in zip(chunked, plain, strict=True):
        assert (mine.token_ids, mine.text, mine.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert (mine.logprobs is None) == (other.logprobs is None)
        for one, same in zip(mine.logprobs or (), other.logprobs or (), strict=True):
            assert one.logprob == pytest.approx(same.logprob, abs=1e-4)
    assert {each.finish_reason for each in plain} == {"stop", "length"}
