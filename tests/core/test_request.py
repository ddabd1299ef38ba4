"""A request is checked once, wherever it came from: what passes, everybody behind can take."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jdisagg.core.codec import decode, encode
from jdisagg.core.errors import RequestError, TooLong
from jdisagg.core.request import BROKEN, Request, RequestId, Sampled, SamplingParams

HUGE = 10**5000  # Python has no text of it
GOOD = Request(RequestId("a"), (1, 2, 3), SamplingParams(max_tokens=4, seed=7))


def checked(**changed: Any) -> None:
    fields = set(SamplingParams.__struct_fields__)
    sampling = replace(GOOD.sampling, **{name: value for name, value in changed.items() if name in fields})
    others = {name: value for name, value in changed.items() if name not in fields}
    replace(GOOD, sampling=sampling, **others).check(100, 64)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", value) for value in (2.5, 2.0, "4", None, True, 0, -1, 2**31, math.nan, HUGE)],
        ("max_tokens", np.int64(4)),
        *[("min_tokens", value) for value in (0.5, None, -1, 5)],
        *[("top_k", value) for value in (2**31, 2**63, HUGE, -2, 1.0, None, "1")],
        *[("seed", value) for value in (None, 1.5, "x", 2**64, -(2**63) - 1, HUGE, True)],
        *[("temperature", value) for value in (None, "1", math.nan, math.inf, -0.1, 100.5, True, HUGE, [1])],
        *[("top_p", value) for value in (0.0, 1.1, math.nan, None)],
        *[("min_p", value) for value in (-0.1, "0", None)],
        *[("repetition_penalty", value) for value in (0, None, math.inf)],
        *[("presence_penalty", value) for value in (-2.1, {}, None)],
        *[("frequency_penalty", value) for value in (2.1, "", None)],
        *[("logprobs", value) for value in (21, -1, 1.5, True)],
        *[("prompt_logprobs", value) for value in (21, "1")],
        *[("stop_token_ids", value) for value in ([1], None, (1.5,), (100,), (-1,), ("1",), tuple(range(17)))],
        *[("logit_bias", value) for value in ({1: 2}, ((1,),), (1,), ((1, "x"),), ((1, 101.0),), ((100, 1.0),))],
        *[("prompt", value) for value in ((), [1], "abc", None, (1.0,), (True,), (100,), (-1,), (HUGE,))],
        *[("priority", value) for value in (0.5, None, 10**30)],
        *[("request_id", value) for value in ("", 7, "x" * 2000, "a\nb", "\ud800", None)],
        *[("queue_deadline_s", value) for value in (math.nan, "soon")],
        *[("arrival_s", value) for value in (math.nan, None)],
        ("logit_bias", ((HUGE,),)),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "value",
)  # fmt: skip
def test_a_field_of_the_wrong_kind_or_range_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as found:
        checked(**{field: value})
    assert (found.value.param or "").startswith(field) and len(str(found.value)) < 200 and "\n" not in str(found.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"top_k": 2**31 - 1},
        {"top_k": -1, "temperature": 0},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"temperature": 5e-324},
        {"stop_token_ids": (0, 99), "logit_bias": ((0, -100), (99, 100.0))},
        {"queue_deadline_s": math.inf, "priority": -5},
    ],
)
def test_what_passes_crosses_to_other_processes_as_it_is(changed: dict[str, Any]) -> None:
    checked(**changed)
    fields = {name: value for name, value in changed.items() if name in SamplingParams.__struct_fields__}
    others = {name: value for name, value in changed.items() if name not in SamplingParams.__struct_fields__}
    request = replace(GOOD, sampling=replace(GOOD.sampling, **fields), **others)
    assert decode(json.loads(json.dumps(encode(request)))) == request


def test_a_request_that_is_too_long_says_by_how_much() -> None:
    with pytest.raises(TooLong, match=r"prompt of 3 tokens \+ max_tokens 62 = 65, over the limit of 64"):
        checked(max_tokens=62)


def test_what_is_drawn_of_no_numbers_is_broken() -> None:
    assert Sampled(BROKEN).broken and Sampled(3, math.nan).broken and not Sampled(3, -math.inf).broken
