"""What the README says is run here, as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import as_users

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_python_of_the_readme_runs_as_it_stands():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    done = subprocess.run(
        [sys.executable, "-c", code[1]], capture_output=True, text=True, timeout=280, env=as_users(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 40


def test_every_path_the_readme_names_is_there():
    named = re.findall(r"`((?:jdisagg|pallas_kernels|launch|configs|tests|benchmarks)/[\w./]*)`", README)
    missing = [path for path in named if not (ROOT / path).exists()]
    assert named and not missing
