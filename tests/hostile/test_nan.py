"""A model one of whose tokens is no number: who says it gets an error, and the others what they would have got."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.fixtures import conformance
from tests.hostile.bystander import TINY, Server, serving

POISON = 9


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """A model folder whose embedding of token 9 is NaN."""
    folder = tmp_path / "model"
    shutil.copytree(conformance.ROOT / "llama2", folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = np.nan
    save_file(weights, folder / "model.safetensors")
    return folder


def ask(server: Server, **body: Any) -> tuple[int, dict[str, Any]]:
    asked = json.dumps({"max_tokens": 20, "temperature": 0, "ignore_eos": True} | body).encode()
    headers = {"content-type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.url + "/v1/completions", asked, headers), timeout=60
        ) as answer:
            return 200, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.hostile
def test_logits_that_are_no_numbers_are_an_error_of_their_own_request(tmp_path: Path, poisoned: Path) -> None:
    with serving(tmp_path, model=(f"--model={poisoned}", *TINY[1:])) as server:
        _, alone = ask(server, prompt=[5, 6, 7])
        for sampling in ({}, {"temperature": 1.0, "seed": 3}, {"logprobs": 3}, {"echo": True, "logprobs": 1}):
            status, said = ask(server, prompt=[5, POISON, 6], **sampling)
            assert status == 500 and "no numbers" in said["error"]["message"], said
        status, said = ask(server, prompt=[5, 6], logit_bias={str(POISON): 100})  # drawn, and fed to the next step
        assert status == 500 and "no numbers" in said["error"]["message"], said
        for _ in range(3):
            assert ask(server, prompt=[5, 6, 7])[1]["choices"][0]["text"] == alone["choices"][0]["text"]
        counted = [line for line in server.get("/metrics").splitlines() if line.startswith("jdisagg_nan_logits_total")]
        assert sum(float(line.split()[-1]) for line in counted) == 5
        assert "Traceback" not in server.log()
