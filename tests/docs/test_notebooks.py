"""The research scripts run as they stand."""

import subprocess
import sys

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.environment import quick

FOLDER = DOCS / "notebooks"


def run(name: str) -> str:
    """What the script prints."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / name)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env=quick(PYTHONPATH=str(ROOT)),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_cost_model_of_ones_own_prices_a_simulated_run():
    lines = run("cost_model.py").splitlines()
    assert [line.split()[0] for line in lines] == ["fitted", "roofline"]


@pytest.mark.slow
def test_a_routing_policy_of_ones_own_routes_in_the_simulator_and_live():
    lines = run("routing_policy.py").splitlines()
    assert [line.partition("  ")[0] for line in lines[:4]] == ["random", "round_robin", "least_loaded", "two choices"]
    assert all(line.endswith("1200 served") for line in lines[:4]) and len(lines) == 8


@pytest.mark.slow
def test_a_trace_of_ones_own_is_simulated_and_asked_of_a_live_stack():
    said = run("replay_trace.py")
    assert said.count("requests/s: ") == 3 and said.count("first token after") == 8


def test_every_script_is_named_in_its_page():
    page = (DOCS / "research.md").read_text(encoding="utf-8")
    assert not [path.name for path in FOLDER.glob("*.py") if f"python docs/notebooks/{path.name}" not in page]
