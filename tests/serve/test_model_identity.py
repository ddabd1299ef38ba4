"""A model is its bytes: KV of one checkpoint never answers for another of the same config, names and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import jdisagg
from jdisagg.core.errors import ConfigError
from tests.fixtures.other_weights import EMBEDDED, change_weights, copied, with_other_weights
from tests.kv.tiers.valkey import Valkey
from tests.serve.test_tiers import checked_at_rest

GREEDY = jdisagg.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SIZES: dict[str, Any] = {
    "mesh": "colocated:tp1",
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "page_size": 16,
    "kv_tokens": 256,
    "weight_dtype": "dtype",
}
PROMPTS = [
    f"def fold_{name}(items, start):\n    total = start\n    for each in items:\n        total = " * 2
    for name in ("left", "right", "map", "zip", "scan", "tree")
]


def started(model: Path, **settings: Any) -> jdisagg.LLM:
    return jdisagg.LLM(model=str(model), **{**SIZES, **settings})


def asked(llm: jdisagg.LLM) -> tuple[list[list[int]], int]:
    """Returns the answers to the prompts, and how many prompt tokens were found in a tier."""
    found = [llm.generate(prompt, GREEDY) for prompt in PROMPTS]
    return [list(each.token_ids) for each in found], sum(each.cached_tokens for each in found)


def filled(model: Path, **settings: Any) -> None:
    """Answers the prompts until their pages lie in the tier below HBM."""
    with started(model, **settings) as llm:
        for _ in range(3):
            asked(llm)
        checked_at_rest(llm)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with other numbers."""
    return with_other_weights(EMBEDDED, tmp_path_factory.mktemp("second") / "embedded")


@pytest.fixture(scope="module")
def answers(second: Path) -> list[list[int]]:
    """The answers of the second model, without tiers."""
    with started(second) as llm:
        return asked(llm)[0]


def test_a_disk_that_the_first_model_filled_is_refused_to_the_second_with_both_fingerprints(second, tmp_path):
    settings = {"disk_path": str(tmp_path), "disk_tokens": 1024}
    filled(EMBEDDED, **settings)
    with pytest.raises(ConfigError) as told, started(second, **settings) as llm:
        asked(llm)
    with started(second) as llm, started(EMBEDDED) as first:
        assert llm.deployment.identity.short in str(told.value)
        assert first.deployment.identity.short in str(told.value)


def test_a_pool_that_the_first_model_filled_gives_the_second_nothing(second, answers, tmp_path):
    settings = {"pool": f"file://{tmp_path}/pool"}
    filled(EMBEDDED, **settings)
    with started(second, **settings) as llm:
        assert asked(llm) == (answers, 0)


@pytest.mark.slow
def test_two_models_share_one_valkey_and_each_answers_as_alone(second, answers):
    with Valkey() as server:
        filled(EMBEDDED, pool=server.url)
        filled(second, pool=server.url)
        with started(second, pool=server.url) as llm:
            found, cached = asked(llm)
            assert found == answers and cached > 0, "its own pages are found"


@pytest.mark.slow
def test_a_disk_filled_with_another_head_is_refused(tmp_path):
    model = copied(EMBEDDED, tmp_path / "embedded")
    settings = {"disk_path": str(tmp_path / "disk"), "disk_tokens": 1024, "speculative": "eagle"}
    filled(model, **settings)
    change_weights(model / "eagle")
    with pytest.raises(ConfigError, match="holds KV of the fingerprint"):
        started(model, **settings).close()
