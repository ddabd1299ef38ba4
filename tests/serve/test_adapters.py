"""Adapters through the whole stack: asked for as models, loaded and unloaded meanwhile, each as its merged weights."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jdisagg
from jdisagg.core.errors import ConfigError, RequestError
from jdisagg.core.request import Adapter
from jdisagg.model.checkpoint import read_model
from jdisagg.model.lora import identified
from jdisagg.model.network import forward
from jdisagg.model.params import StageSpec, load_stage
from jdisagg.model.sources import HFSource, TensorSource
from jdisagg.serve.frontends.front_settings import FrontSettings
from jdisagg.serve.frontends.http.app import create_app
from tests.adapter_files import merged, write_adapter
from tests.fixtures import conformance
from tests.serve.live_http import serving

pytestmark = pytest.mark.slow
FAMILY = conformance.load("llama3")
MODEL = read_model(FAMILY.folder)
ADMIN = {"authorization": "Bearer the-key-of-the-admin"}
LONGEST, ANSWER = 96, 8
GREEDY = {"temperature": 0.0, "max_tokens": ANSWER, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    kinds = {"sql": {}, "tales": {"rank": 2}, "plain": {"targets": ("q_proj", "v_proj")}, "again": {"rank": 8}}
    return {name: write_adapter(root / name, MODEL, seed, **how) for seed, (name, how) in enumerate(kinds.items())}


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> Iterator[jdisagg.LLM]:
    named = ",".join(f"{name}={folders[name]}" for name in ("sql", "tales"))
    sizes = {"max_model_len": LONGEST, "max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 8}
    with jdisagg.LLM(
        model=str(FAMILY.folder), mesh="prefill:tp2,decode:pp2", lora=named, max_lora_rank=8, **sizes
    ) as running:
        yield running
        assert running.service.recompiles() == 0


@pytest.fixture(scope="module")
def client(llm: jdisagg.LLM) -> Iterator[httpx.Client]:
    settings = FrontSettings(admin_key="the-key-of-the-admin", adapters=llm.adapters, api_key="a-client")
    with serving(create_app(llm.service, settings, llm.service.metrics)) as url:
        yield httpx.Client(base_url=url, timeout=60, headers={"authorization": "Bearer a-client"})


def defined(source: TensorSource, prompt: Sequence[int]) -> list[int]:
    """The greedy answer, by the network's definition over these weights."""
    params = load_stage(
        source, StageSpec(MODEL, range(MODEL.num_layers), Mesh(np.array(jax.devices()[:1]), ("tp",)), jnp.float32)
    )
    run, row = jax.jit(lambda leaves, tokens: forward(params.merge(leaves), tokens)), list(prompt)
    for _ in range(ANSWER):
        padded = np.zeros((1, LONGEST), np.int32)
        padded[0, : len(row)] = row
        row.append(int(np.asarray(run(params.leaves, padded))[0, len(row) - 1].argmax()))
    return row[len(prompt) :]


def ask(client: httpx.Client, model: str, prompt: Sequence[int], **more: object) -> list[int]:
    body = {"model": model, "prompt": list(prompt), "return_token_ids": True, **GREEDY, **more}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_each_model_that_a_client_names_answers_as_its_merged_weights(client: httpx.Client, llm: jdisagg.LLM) -> None:
    base, prompt = HFSource(FAMILY.folder), FAMILY.prompts[0]
    found = {name: ask(client, name, prompt) for name in ("sql", llm.service.model_name, "tales", "sql")}
    for name, tokens in found.items():
        adapter = llm.adapters.find(name)
        assert tokens == defined(base if adapter is None else merged(base, adapter, MODEL), prompt)
    assert len({tuple(tokens) for tokens in found.values()}) == 3


def test_what_one_adapter_computed_is_no_prefix_of_anothers(client: httpx.Client, llm: jdisagg.LLM) -> None:
    prompt = [*FAMILY.prompts[1], *range(5, 45)]
    alone = {name: ask(client, name, prompt, cache_salt=name) for name in ("sql", "tales", "")}
    for _ in range(2):
        assert {name: ask(client, name, prompt) for name in ("sql", "tales", "")} == alone
    again = jdisagg.SamplingParams(max_tokens=1, adapter=llm.adapter("tales"))
    assert llm.generate(prompt, again).cached_tokens > 0


def test_answers_are_the_same_in_any_company(client: httpx.Client, llm: jdisagg.LLM) -> None:
    prompts, names = [[*prompt, 3] for prompt in FAMILY.prompts * 2], ["sql", "", "tales", "sql", "", "sql"]
    alone = [ask(client, name, prompt, cache_salt="1") for name, prompt in zip(names, prompts, strict=False)]
    samplings = [llm.adapters.find(name) for name in names]
    drawn: list[list[int]] = [[] for _ in samplings]

    def run(place: int, adapter: Adapter | None) -> None:
        how = jdisagg.SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, adapter=adapter)
        drawn[place] = list(llm.generate(prompts[place], how).token_ids)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(samplings)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert drawn[: len(alone)] == alone


def test_models_are_listed_with_their_parents(client: httpx.Client, llm: jdisagg.LLM) -> None:
    parents = {each["id"]: each["parent"] for each in client.get("/v1/models").json()["data"]}
    assert parents == {llm.service.model_name: None, "sql": llm.service.model_name, "tales": llm.service.model_name}
    assert client.get("/v1/models/sql").json()["root"] == llm.adapter("sql").folder


def test_adapters_come_and_go_while_the_stack_runs(client: httpx.Client, folders: dict[str, Path]) -> None:
    def post(what: str, **body: object) -> tuple[int, str]:
        answer = client.post(f"/v1/{what}_lora_adapter", json=body, headers=ADMIN)
        return answer.status_code, answer.text

    prompt = FAMILY.prompts[0]
    assert client.post("/v1/completions", json={"model": "more", "prompt": "x"}).status_code == 404
    assert post("load", lora_name="more", lora_path=str(folders["plain"]))[0] == 200
    first = ask(client, "more", prompt)
    assert post("load", lora_name="more", lora_path=str(folders["again"]))[0] == 400
    assert post("load", lora_name="more", lora_path=str(folders["again"]), load_inplace=True)[0] == 200
    second = ask(client, "more", prompt)
    source = HFSource(FAMILY.folder)
    expected = [merged(source, identified("x", str(folders[name])), MODEL) for name in ("plain", "again")]
    assert [first, second] == [defined(each, prompt) for each in expected]
    assert post("unload", lora_name="more") == (200, "Success: LoRA adapter 'more' removed successfully.")
    status, told = post("unload", lora_name="more")
    assert status == 404 and "sql, tales" in told
    assert client.post("/v1/completions", json={"model": "more", "prompt": "x"}).status_code == 404


def test_loading_needs_the_admins_key(client: httpx.Client, folders: dict[str, Path]) -> None:
    body = {"lora_name": "mine", "lora_path": str(folders["plain"])}
    assert client.post("/v1/load_lora_adapter", json=body).status_code == 401
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 401


def test_a_wrong_adapter_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODEL, 0, rank=8)
    with pytest.raises(ConfigError, match=r"--lora=big=.*rank 8, over --max_lora_rank=4"):
        jdisagg.LLM(model=str(FAMILY.folder), lora=f"big={folder}", max_lora_rank=4)


def test_a_name_that_was_not_loaded_is_told_with_those_that_were(llm: jdisagg.LLM) -> None:
    with pytest.raises(RequestError, match="no adapter 'slq' is loaded; there are: sql, tales"):
        llm.adapter("slq")
