"""What the end of a step makes of a row that drew several tokens."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jdisagg.core.request import BROKEN, Sampled, SamplingParams
from jdisagg.policy.decode_sequence import end_of
from jdisagg.policy.step_results import StepResults

TOKENS = st.sampled_from([2, 3, 4, 5, BROKEN])
SCORES = st.sampled_from([None, -1.0, float("nan")])


class Answer:
    """As much of a sequence as its end depends on."""

    def __init__(self, sampling: SamplingParams, before: int) -> None:
        self.sampling, self.output = sampling, [9] * before


def one_by_one(answer: Answer, drawn: tuple[Sampled, ...]) -> Any:
    for count, sampled in enumerate(drawn, 1):
        if reason := end_of(answer.sampling, sampled, len(answer.output) + count):
            return drawn[: count - sampled.broken], reason
    return drawn, None


@given(
    st.lists(TOKENS, min_size=1, max_size=8),
    SCORES,
    st.lists(st.integers(2, 4), max_size=3, unique=True),
    st.integers(1, 12),
    st.integers(0, 6),
)
def test_a_row_of_several_tokens_ends_where_its_tokens_one_by_one_do(
    tokens: list[int], score: float | None, stops: list[int], max_tokens: int, before: int
) -> None:
    answer: Any = Answer(SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stops)), before)
    drawn = tuple(Sampled(token, score) for token in tokens)
    ends = StepResults._until_end(object.__new__(StepResults), answer, drawn)
    assert ends == one_by_one(answer, drawn)
