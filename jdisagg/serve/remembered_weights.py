"""What was once measured about a model's weights on this machine, kept beside the programs that were compiled for it.

A choice holds for as long as all of it is the same: the model and its files, the mesh, the settings it followed from,
the machine with its cores, the versions, and the code that measures. A file that is damaged is measured over.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jdisagg.core.settings import Settings
from jdisagg.core.weight_format import NAMES, WeightFormat
from jdisagg.model import calibration, product_times, products
from jdisagg.model.checkpoint import weight_files
from jdisagg.model.names import matrix_leaves
from jdisagg.parallel.machine_name import machine_name
from jdisagg.serve.deployment import Deployment, model_fingerprint

MEASURING = (calibration, product_times, products)  # what is measured, and how
PACKAGES = ("jdisagg", "jax", "jaxlib")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """What matrices hold, why in one line, and the day it was measured (ISO 8601)."""

    weights: WeightFormat
    why: str
    date: str


def choices_folder() -> Path | None:
    """The machine's folder of the compile cache; None where nothing is kept."""
    place = jax.config.values.get("jax_compilation_cache_dir")
    if not place or not jax.config.values.get("jax_enable_compilation_cache"):
        return None
    return Path(place) if Path(place).name == machine_name() else Path(place) / machine_name()


@dataclass(frozen=True)
class ChoiceMemory:
    """The one choice that is made of `key`, in a file of `folder` (None: nowhere)."""

    folder: Path | None
    key: dict[str, Any]
    matrices: frozenset[str]  # that the model can have

    @classmethod
    def of(cls, deployment: Deployment, settings: Settings, folder: Path | None) -> ChoiceMemory:
        return cls(folder, key_of(deployment, settings), frozenset(matrix_leaves(deployment.model)))

    def find(self) -> Choice | None:
        try:
            stored = json.loads(self._path().read_text(encoding="utf-8")) if self.folder is not None else {}
        except (OSError, ValueError):
            return None
        return self._choice(stored) if isinstance(stored, dict) and stored.get("key") == self.key else None

    def keep(self, choice: Choice) -> None:
        """A folder that cannot be written costs a warning, and the next start its time."""
        if self.folder is None:
            return
        weights = {"dtype": choice.weights.dtype, "full": sorted(choice.weights.full)}
        text = json.dumps({"key": self.key, **weights, "why": choice.why, "date": choice.date}, indent=1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False, encoding="utf-8") as file:
                file.write(text)
            os.replace(file.name, self._path())
        except OSError as error:
            log.warning("what was measured of the weights is not kept for the next start: %s", error.strerror or error)

    def _path(self) -> Path:
        assert self.folder is not None
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        return self.folder / f"weights-{digest}.json"

    def _choice(self, stored: dict[str, Any]) -> Choice | None:
        dtype, full, why, day = (stored.get(name) for name in ("dtype", "full", "why", "date"))
        if dtype not in NAMES or not isinstance(why, str) or not isinstance(day, str) or not isinstance(full, list):
            return None
        known = all(isinstance(each, str) and each in self.matrices for each in full)
        return Choice(WeightFormat(dtype, frozenset(full)), why, day) if known else None


def key_of(deployment: Deployment, settings: Settings) -> dict[str, Any]:
    """All that a choice follows from."""
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in MEASURING)
    place = deployment.model_folder.resolve()
    files = list(place.iterdir()) if place.is_dir() else weight_files(place)
    return {
        "model": model_fingerprint(deployment, settings),
        "place": str(place),
        "files": sorted(path.stat().st_mtime_ns for path in files),
        "tokenizer": settings.tokenizer,
        "mesh": str(deployment.mesh),
        "asked": deployment.weight_dtype,
        "dtype": deployment.dtype,
        "rows": deployment.sizes.max_num_seqs,
        "machine": machine_name(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in PACKAGES},
        "code": hashlib.sha256(code).hexdigest()[:16],
    }
