"""`import pallas_kernels` needs jax and numpy alone, and so does its tuner."""

import runpy
import subprocess
import sys

import jax.numpy as jnp
import pytest

from pallas_kernels import tune, tuning
from pallas_kernels.arguments import PagedAttentionArgs
from pallas_kernels.paged_attention import tpu

BLOCKED = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jdisagg", "flax", "absl", "google", "orbax", "optax", "rich"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Wall())
import jax.numpy as jnp
import pallas_kernels
q, pool = jnp.ones((1, 2, 64)), jnp.ones((3, 2, 2, 16, 64))
table, lengths = jnp.ones((1, 2), jnp.int32), jnp.full(1, 20, jnp.int32)
print(float(pallas_kernels.paged_attention(q, pool, table, lengths).sum()))
"""


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=250, check=False)


def test_it_runs_with_everything_else_of_the_house_out_of_reach():
    done = run("-c", BLOCKED)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 128


def test_tuning_where_there_is_nothing_to_tune_ends_in_one_line():
    done = run("-m", "pallas_kernels.tune")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("no TPU or GPU here: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_tuning_tried_on_the_cpu_writes_a_table_that_is_read_back(tmp_path, capsys):
    path = tmp_path / "tuned.py"
    tune.main(["--platform=cpu", f"--out={path}"])
    printed = capsys.readouterr().out
    assert printed.count("the rule") == 2, "an operation was not measured"
    assert {key[0] for key in runpy.run_path(str(path))["TUNED"]} <= {"paged_attention", "prefill_attention"}


def test_a_dry_run_measures_nothing(capsys):
    tune.main(["--dry_run", "--shapes=small", "--rows=8,64", "--dtypes=bfloat16/int8"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("paged_attention 64 4 2 32 bfloat16 int8 8 4096")


def test_a_measured_choice_is_taken_for_its_key_alone(monkeypatch):
    q, pool = jnp.ones((3, 4, 64)), jnp.ones((3, 2, 2, 16, 64))
    key = tuning.key_of("paged_attention", q, pool)
    assert key.rows == 4
    monkeypatch.setattr(tuning, "TUNED", {tuple(key): {"block_pages": 1}})
    assert tuning.tuned("paged_attention", q, pool) == {"block_pages": 1}
    assert not tuning.tuned("paged_attention", q[:2], pool)
    assert not tuning.tuned("prefill_attention", q, pool)
    assert tpu.pages_of_block(pool) > 1
    table, lengths = jnp.ones((3, 2), jnp.int32), jnp.full(3, 20, jnp.int32)
    with pytest.raises(TypeError):  # what the table holds is what the kernel takes
        monkeypatch.setattr(tuning, "TUNED", {tuple(key): {"block_pages": "two"}})
        tpu.paged_attention(PagedAttentionArgs(q, pool, table, lengths, scale=1.0), interpret=True)
