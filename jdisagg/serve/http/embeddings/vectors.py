"""Pooled states as vectors, and vectors as answers."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from jdisagg.core.request import POOLED_ONE
from jdisagg.serve.http.jobs import Choice


def vector(pooled: tuple[int, ...], choice: Choice, dimensions: int | None, *, normalize: bool) -> np.ndarray:
    """f32: the last token's state or the mean of all, its first `dimensions` numbers, of length 1 where `normalize`."""
    count = len(choice.prompt.ids) if choice.request.sampling.pooling == "mean" else 1
    found = np.array(pooled, np.float64)[:dimensions] / (POOLED_ONE * count)
    length = np.linalg.norm(found)
    return (found / length if normalize and length > 0 else found).astype(np.float32)


def written(found: np.ndarray, encoding: str | None) -> Any:
    """As OpenAI's clients read it: numbers, or the bytes of little-endian floats."""
    return base64.b64encode(found.astype("<f4").tobytes()).decode() if encoding == "base64" else found.tolist()
