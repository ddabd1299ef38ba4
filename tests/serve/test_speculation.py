"""A stack that guesses tokens answers what one without answers, with too few pages for all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg import LLM, SamplingParams
from jdisagg.core.default_sizes import Devices
from jdisagg.core.errors import CheckpointError, ConfigError, FlagError
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.mesh_spec import MeshSpec
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.settings import Settings
from jdisagg.core.worker_config import Speculation, kv_sizes
from jdisagg.groups import for_several
from jdisagg.model.checkpoint import read_model
from jdisagg.model.draft_head import HeadConfig
from jdisagg.serve.deploy.deployment import EMBEDDED_MODEL
from jdisagg.serve.deploy.speculation import (
    DRAFT_TOKENS,
    check_head,
    kept_draft,
    own_head,
    read_draft,
    read_speculation,
)
from tests.fixtures import conformance

CPUS = Devices("cpu", None, None)
PROMPTS = [[5, 6, 7, 8] * 3, [9, 3, 9, 3, 9, 3], list(range(20, 30)), [7] * 12]
SAMPLING = [
    SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.7, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.0, repetition_penalty=1.2, ignore_eos=True),
]


def answers(speculative: str) -> tuple[list[list[int]], dict[str, float]]:
    """Tokens of all, asked for together, and what is counted meanwhile."""
    sizes = {"max_model_len": 64, "max_num_batched_tokens": 64, "page_size": 8, "max_num_seqs": 4}
    few = {"kv_tokens": 128, "reserve_tokens": 4}  # 16 pages, of which four whole answers want 28
    folder = str(conformance.load("llama3").folder)
    with LLM(model=folder, mesh="prefill:tp1,decode:pp2", speculative=speculative, **sizes, **few) as llm:
        found = [each.token_ids for sampling in SAMPLING for each in llm.generate_all(PROMPTS, sampling)]
        assert llm.service.recompiles() == 0 and llm.service.metrics is not None
        told = [line.split(" ") for line in llm.service.metrics.render().decode().splitlines()]
    counted = {line[0].split("{")[0]: float(line[1]) for line in told if 'kind="' in line[0]}
    return [[*each] for each in found], counted


@pytest.mark.slow
def test_tokens_are_those_of_a_stack_that_guesses_none_where_pages_do_not_do_for_all():
    """The model guesses for itself as well, and is right before and behind handoffs and preemptions."""
    plain, _ = answers("off")
    guessed, counted = answers(f"draft:{conformance.load('llama3').folder}")
    drafted, accepted = (counted[f"jdisagg_spec_decode_{name}_tokens_total"] for name in ("draft", "accepted"))
    assert guessed == plain and drafted > 100 and accepted > 0.85 * drafted
    guessed, counted = answers("auto")
    assert guessed == plain
    assert {len(each) for each in plain} == {40, 30}


@pytest.mark.slow
def test_a_draft_whose_pages_go_with_the_models_is_as_right_after_handoffs_preemptions_and_prefixes_that_were_there():
    """The model guesses for itself: undisturbed every guess is right. Four answers want more pages than there are, and
    what is asked for again is found."""
    folder = str(conformance.load("llama3").folder)
    sizes = {"max_model_len": 64, "max_num_batched_tokens": 64, "page_size": 8, "max_num_seqs": 4}
    few = {"kv_tokens": 128, "reserve_tokens": 4, "dram_tokens": 128, "prefill_buckets": "64", "table_buckets": "64"}
    speculative = {"speculative": f"draft:{folder}:2", "draft_kv": "ship"}
    sampling = [replace(each, max_tokens=20) for each in SAMPLING[:2]]
    with LLM(model=folder, mesh="prefill:tp1,decode:tp1", **speculative, **sizes, **few) as llm:
        found = [[each.token_ids for each in llm.generate_all(PROMPTS, which)] for which in sampling for _ in range(2)]
        assert llm.service.recompiles() == 0 and llm.service.metrics is not None
        told = [line.split(" ") for line in llm.service.metrics.render().decode().splitlines()]
    assert found[0] == found[1] and found[2] == found[3]
    counted = {line[0].split("{")[0]: float(line[1]) for line in told if 'kind="' in line[0]}
    drafted, accepted = (counted[f"jdisagg_spec_decode_{name}_tokens_total"] for name in ("draft", "accepted"))
    assert accepted == drafted > 100


@pytest.mark.parametrize("said", ["ngram:0", "ngram:x", "grammar:-1", "guess", "ngram:", "draft:0", ""])
def test_what_drafts_nothing_is_refused_with_what_may_be_said(said: str):
    with pytest.raises(
        FlagError, match=f"--speculative={said}: say off, ngram, auto, grammar, draft, eagle, draft:MODEL"
    ):
        read_speculation(said)


def test_a_model_that_guesses_is_named_or_lies_with_the_model():
    said = {each: read_speculation(each).draft for each in ("draft", "draft:5", "draft:/a/b", "draft:c:\\d:7", "auto")}
    assert said == {"draft": "draft", "draft:5": "draft", "draft:/a/b": "/a/b", "draft:c:\\d:7": "c:\\d", "auto": ""}
    assert read_speculation("auto:draft:2") == Speculation(2, auto=True, draft="draft")


def test_the_embedded_model_has_a_small_draft_of_its_own():
    found = read_draft("draft", EMBEDDED_MODEL, read_model(EMBEDDED_MODEL))
    assert found is not None and found[0] == EMBEDDED_MODEL / "draft"
    assert isinstance(found[1], ModelConfig) and found[1].num_layers == 1
    assert sum(path.stat().st_size for path in found[0].iterdir()) < 10_000_000


def test_the_embedded_model_has_a_head_of_its_own():
    found = read_draft("eagle", EMBEDDED_MODEL, read_model(EMBEDDED_MODEL))
    assert found is not None and found[0] == EMBEDDED_MODEL / "eagle"
    assert isinstance(found[1], HeadConfig) and found[1].norm and found[1].tokens is None
    assert sum(path.stat().st_size for path in found[0].iterdir()) < 10_000_000


def test_a_draft_with_another_vocabulary_is_refused_with_both_numbers():
    small = conformance.load("llama3")
    with pytest.raises(ConfigError, match=r"vocabulary of \d+ tokens and .* one of 4096"):
        read_draft(f"draft:{small.folder}", Path("anywhere"), replace(read_model(small.folder), vocab_size=4096))


def test_a_model_without_a_draft_says_where_it_looked(tmp_path: Path):
    with pytest.raises(CheckpointError, match=f"--speculative=draft: {tmp_path}/draft"):
        read_draft("draft", tmp_path, read_model(conformance.load("llama3").folder))


def test_drafts_come_of_any_rows_tokens_or_of_grammars_alone():
    assert [read_speculation(each) for each in ("ngram:5", "grammar", "auto:7")] == [
        Speculation(5, guesses=True),
        Speculation(DRAFT_TOKENS, guesses=False),
        Speculation(7, auto=True),
    ]


def test_a_head_is_named_or_lies_with_its_model():
    said = {
        each: read_speculation(each) for each in ("eagle", "eagle:5", "eagle:/a/b:2", "auto:eagle", "auto:eagle:/a")
    }
    assert [(each.draft, each.tokens, each.auto) for each in said.values()] == [
        ("eagle", 3, False),
        ("eagle", 5, False),
        ("/a/b", 2, False),
        ("eagle", 3, True),
        ("/a", 3, True),
    ]
    assert all(each.head for each in said.values()) and not read_speculation("auto:draft").head


def test_a_model_that_lies_elsewhere_has_the_head_that_its_name_begins_as(tmp_path: Path):
    (tmp_path / "heads" / "Model-1B").mkdir(parents=True)
    found = own_head("eagle", tmp_path / "model-1b.Q4_1.gguf", tmp_path / "heads")
    assert found == tmp_path / "heads" / "Model-1B"
    with pytest.raises(CheckpointError, match=f"no head in {tmp_path}/other/eagle nor for other in {tmp_path}/heads"):
        own_head("eagle", tmp_path / "other", tmp_path / "heads")


def test_a_drafts_pages_lie_behind_the_models_and_go_with_the_last_layers():
    draft = read_draft("draft", EMBEDDED_MODEL, read_model(EMBEDDED_MODEL))
    mesh, kv = MeshSpec.parse("prefill:tp1,decode:tp1"), KVLayout.of(read_model(EMBEDDED_MODEL), 16)
    settings = Settings(speculative="draft", draft_kv="ship")
    found = kept_draft(draft, settings, mesh, (kv, kv), "small", CPUS)
    assert found is not None and found.layers == range(6, 7) and found.layout.num_kv_heads == 4
    how = kv_sizes((range(3), range(3, 6)), kv, found)
    assert how["layer_groups"] == ((0, 3), (3, 7)) and how["draft_layers"] == 1
    assert how["kv_token_bytes"] == kv.bytes_per_token + found.layout.bytes_per_token
    assert kept_draft(draft, replace(settings, draft_kv="rebuild"), mesh, (kv, kv), "small", CPUS) is None
    assert kept_draft(None, settings, mesh, (kv, kv), "small", CPUS) is None
    auto = replace(settings, draft_kv="auto")
    assert kept_draft(draft, auto, mesh, (kv, kv), "small", CPUS) == found, "it is cheaper to send than to read again"
    seldom = replace(auto, speculative="auto:draft")
    for other in (replace(auto, prefix_caching="off"), for_several(auto), seldom):
        assert kept_draft(draft, other, mesh, (kv, kv), "small", CPUS) is None
    assert kept_draft(draft, replace(seldom, draft_kv="ship"), mesh, (kv, kv), "small", CPUS) == found
    assert for_several(settings) == settings, "what somebody said stands"


@pytest.mark.parametrize(
    ("mesh", "dtype", "why"),
    [("prefill:tp1,decode:ring2tp1", "float32", "a ring"), ("prefill:tp1,decode:tp1", "int8", "quantised")],
)
def test_where_a_drafts_pages_cannot_be_kept_it_is_said_with_what_to_do(mesh: str, dtype: str, why: str):
    draft = read_draft("draft", EMBEDDED_MODEL, read_model(EMBEDDED_MODEL))
    kv = KVLayout.of(read_model(EMBEDDED_MODEL), 16, dtype)
    given = MeshSpec.parse(mesh), (kv, kv), "small", CPUS
    with pytest.raises(FlagError, match=f"--draft_kv=ship and --speculative=draft: .*{why}.*say --draft_kv=rebuild"):
        kept_draft(draft, Settings(speculative="draft", draft_kv="ship"), *given)
    assert kept_draft(draft, Settings(speculative="draft"), *given) is None, "auto makes it again there"


def test_a_ring_has_no_head():
    with pytest.raises(FlagError, match="--speculative=eagle: a ring runs no head; --mesh=prefill:tp1,decode:ring2"):
        check_head(Settings(speculative="eagle"), MeshSpec.parse("prefill:tp1,decode:ring2tp1"))
