"""Where the published files lie that are too large for the repository: under `--data_dir`, by their own names."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDERS = (".", "traces", "profiles")  # of --data_dir: one folder for all, or one for each kind


def full_file(request: pytest.FixtureRequest, name: str) -> Path:
    """The file or folder `name`; skips the test where --data_dir has none."""
    given = str(request.config.getoption("--data_dir"))
    found = [path for folder in FOLDERS if (path := Path(given) / folder / name).exists()]
    if not given or not found:
        pytest.skip(f"no {name} in --data_dir")
    return found[0]
