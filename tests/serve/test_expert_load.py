"""Expert load as /metrics tells it: every token of every layer counted once for each expert that it is sent to."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jdisagg
from jdisagg.core.model_config import Experts
from jdisagg.engine.expert_load import MOST, ExpertLoad, tokens_sent
from jdisagg.serve.observability.metrics import Metrics
from tests.fixtures import conformance
from tests.serve.test_metrics import read

SIZES: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 16}
GREEDY = jdisagg.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
TOKENIZER = str(conformance.load("qwen2").folder)  # texts are nobody's business here
EXPERTS = Experts(4, 2, 8)


def loads(found: dict[tuple[str, str], float], name: str) -> dict[tuple[str, int], float]:
    """By worker and layer."""
    pairs = {}
    for (sample, labels), value in found.items():
        if sample == f"jdisagg_expert_load_{name}":
            layer, worker = (label.partition("=")[2] for label in labels.split(","))
            pairs[worker, int(layer)] = value
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3_moe", {"mesh": "prefill:tp2,decode:pp2"}),
        ("deepseek3", {"mesh": "prefill:tp1,decode:tp2"}),
        ("mixtral", {"mesh": "colocated:tp1", "mixed_steps": "on"}),
    ],
)
def test_the_totals_are_the_tokens_times_the_experts_of_each(family: str, more: dict[str, Any]):
    fixture = conformance.load(family)
    with jdisagg.LLM(model=str(fixture.folder), tokenizer=TOKENIZER, **SIZES, **more) as llm:
        answers = llm.generate_all(fixture.prompts, GREEDY)
        found, recompiles = read(llm.service.metrics), llm.service.recompiles()
        config = llm.deployment.model
    assert recompiles == 0 and config.experts is not None
    decoded = sum(len(answer.token_ids) - 1 for answer in answers)  # the last token is fed to nobody
    rows = {
        labels.removeprefix("worker="): value
        for (name, labels), value in found.items()
        if name == "jdisagg_prefill_tokens_total"
    }
    decoder = next(worker for worker in rows | {"decode-0": 0.0} if not worker.startswith("prefill"))
    rows[decoder] = rows.get(decoder, 0.0) + decoded
    sparse = [layer for layer in range(config.num_layers) if config.is_sparse(layer)]
    expected = {(worker, layer): config.experts.per_token * rows[worker] for worker in rows for layer in sparse}
    assert loads(found, "tokens_total") == expected
    busiest, imbalance = loads(found, "busiest_tokens_total"), loads(found, "imbalance_ratio")
    for place, tokens in expected.items():
        assert tokens / config.experts.number <= busiest[place] <= tokens
        assert imbalance[place] == pytest.approx(busiest[place] * config.experts.number / tokens)


def test_rows_that_do_not_count_are_not_counted():
    live = jnp.asarray([True, False, True])
    found = [
        tokens_sent(EXPERTS, jnp.asarray(chosen), live)
        for chosen in ([[0, 1], [0, 1], [0, 3]], [[2, 1], [2, 3], [1, 2]])
    ]
    np.testing.assert_array_equal(found, [[2, 1, 0, 1], [0, 2, 2, 0]])


def test_what_nobody_reads_does_not_pile_up_and_is_counted_all_the_same():
    load, times = ExpertLoad([3], EXPERTS), 2 * MOST
    for _ in range(times):
        load.leaves([jnp.asarray([[5, 0, 1, 2]], jnp.int32)])
    left = load.taken()
    assert len(left) == MOST
    load.read(left)
    tokens, busiest = load.totals()
    assert tokens.tolist() == [[5 * times, 0, times, 2 * times]] and busiest.tolist() == [5 * times]


def test_a_process_without_workers_still_names_the_families_that_others_send_samples_of():
    metrics = Metrics("m")
    metrics.watch_experts(dict)
    assert "jdisagg_expert_load_tokens" in metrics.render().decode()
    assert "expert_load" not in Metrics("m").render().decode()
