"""A sampling parameter costs the files that CONTRIBUTING.md names: a copy of the package with one more serves it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUEST, ENGINE, TEST = "jdisagg/core/request.py", "jdisagg/engine/sampling.py", "tests/engine/test_sampling.py"
# top-n-sigma (Tang et al. 2024): only logits within n standard deviations of the largest are drawn from; 0: off.
PATCH = {
    REQUEST: [
        (
            "    min_p: Number = _float(0.0, 0.0, 1.0)\n",
            "    min_p: Number = _float(0.0, 0.0, 1.0)\n    top_n_sigma: Number = _float(0.0, 0.0, 100.0)\n",
        )
    ],
    ENGINE: [
        ('"frequency_penalty")\n', '"frequency_penalty", "top_n_sigma")\n'),
        ("PRESENCE, FREQUENCY = range", "PRESENCE, FREQUENCY, TOP_N_SIGMA = range"),
        (
            "    temperature = metadata.floats[:, TEMPERATURE]\n",
            "    logits = within_sigma(logits, metadata)\n    temperature = metadata.floats[:, TEMPERATURE]\n",
        ),
        (
            "def weights_of(",
            '''def within_sigma(logits: Array, metadata: SamplingMetadata) -> Array:
    """Masks the logits that are more than `top_n_sigma` standard deviations below the largest."""
    number = metadata.floats[:, TOP_N_SIGMA, None]
    least = jnp.max(logits, axis=1, keepdims=True) - number * jnp.std(logits, axis=1, keepdims=True)
    return jnp.where((number > 0.0) & (logits < least), NEVER, logits)


def weights_of(''',
        ),
    ],
    TEST: [
        (
            "def test_temperature_zero_is",
            """def test_top_n_sigma_leaves_what_is_near_the_largest():
    logits, metadata = logits_of(1), metadata_of(SamplingParams(top_n_sigma=1.0))
    kept = np.isfinite(np.asarray(engine_sampling.within_sigma(jnp.asarray(logits), metadata)))
    assert (kept == (logits >= logits.max() - logits.std())).all() and 0 < kept.sum() < kept.size


def test_temperature_zero_is""",
        ),
        (
            "from jdisagg.core.steps import History\n",
            "from jdisagg.core.steps import History\nfrom jdisagg.engine import sampling as engine_sampling\n",
        ),
    ],
}
ASK = """
import asyncio, importlib.util, json, httpx
import jdisagg
from jdisagg.serve.frontends.http.app import create_app
spec = importlib.util.spec_from_file_location("copied", "tests/engine/test_sampling.py")
copied = importlib.util.module_from_spec(spec)
spec.loader.exec_module(copied)
copied.test_top_n_sigma_leaves_what_is_near_the_largest()

async def ask(app):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://inside") as client:
        body = {"prompt": "def fib(n):", "max_tokens": 12, "seed": 7, "temperature": 4.0}
        greedy, plain, near, wrong = [
            await client.post("/v1/completions", json=body | more)
            for more in ({"temperature": 0}, {}, {"top_n_sigma": 1e-4}, {"top_n_sigma": -1})
        ]
        described = (await client.get("/openapi.json")).json()["components"]["schemas"]["ChatBody"]["properties"]
    texts = [each.json()["choices"][0]["text"] for each in (greedy, plain, near)]
    return texts, wrong.status_code, wrong.json()["error"], "top_n_sigma" in described

with jdisagg.LLM(model="embedded", mesh="prefill:tp1,decode:tp1", platform="cpu", max_model_len=64) as llm:
    here = llm.generate("def fib(n):", jdisagg.SamplingParams(max_tokens=12, temperature=4.0, seed=7, top_n_sigma=1e-4))
    print(json.dumps([jdisagg.__file__, *asyncio.run(ask(create_app(llm.service))), here.text]))
"""


def test_contributing_names_the_files_of_a_parameter():
    (line,) = [
        each for each in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if "**A sampling parameter**" in each
    ]
    assert set(re.findall(r"`(\w[\w/]*\.py)`", line)) == PATCH.keys()
    assert len(PATCH) == 3


@pytest.mark.slow
def test_a_parameter_added_by_the_book_changes_the_answer_over_http(tmp_path: Path):
    shutil.copytree(ROOT / "jdisagg", tmp_path / "jdisagg", ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in PATCH.items():
        text = (ROOT / name).read_text()
        for before, after in changes:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    where, (greedy, plain, near), status, error, is_described, in_python = json.loads(done.stdout.splitlines()[-1])
    assert where.startswith(str(tmp_path)), "the copy is what was served"
    assert near == greedy != plain and in_python == near
    assert status == 400 and error["message"] == "top_n_sigma is -1.0, must lie in [0.0, 100.0]"
    assert error["param"] == "top_n_sigma" and is_described
