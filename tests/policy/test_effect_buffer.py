"""What is said of an answer that ends: reasons that are no error need no words."""

from __future__ import annotations

import pytest

from jdisagg.core.events import Send
from jdisagg.core.messages import Ended
from jdisagg.core.request import Attempt, FinishReason, RequestId, SamplingParams
from jdisagg.policy.effect_buffer import EffectBuffer

FREE, HELD = SamplingParams(), SamplingParams(grammar="regex:a+")


@pytest.mark.parametrize(
    ("sampling", "reason", "says"),
    [
        (FREE, FinishReason.STOP, ()),
        (HELD, FinishReason.LENGTH, ()),
        (FREE, FinishReason.ERROR, ("logits were no numbers",)),
        (HELD, FinishReason.ERROR, ("the answer's grammar went over its limits", "logits were no numbers")),
    ],
)
def test_an_answer_of_which_nothing_could_be_drawn_says_why_that_may_be(
    sampling: SamplingParams, reason: FinishReason, says: tuple[str, ...]
) -> None:
    out = EffectBuffer()
    out.end(Attempt(RequestId("a"), 1), reason, 3, 0.0, sampling)
    (effect,) = out.drain()
    assert isinstance(effect, Send) and isinstance(effect.message, Ended)
    assert effect.message.num_output == 3
    assert all(each in effect.message.detail for each in says) and bool(effect.message.detail) == bool(says)
    assert ("grammar" in effect.message.detail) == (len(says) == 2)
