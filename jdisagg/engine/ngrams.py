"""N-gram drafts on the host: the tokens that followed the last earlier place with the same last tokens.

They are for rows whose tokens the host knows before the step; `drafting.guessed` drafts the same on the device for rows
whose tokens it does not know yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jdisagg.core.worker_config import MAX_NGRAM, MIN_NGRAM


def guess_after(tokens: Sequence[int], count: int) -> list[int]:
    """The tokens that followed the longest such end where it stood last; none where it never stood there before.

    A guess that runs into the present goes on with what it has guessed itself.
    """
    held = np.asarray(tokens, np.int64)
    alike = np.ones(len(held), np.bool_)
    found = -1
    for back in range(min(MAX_NGRAM, len(held))):
        alike[:back] = False
        alike[back:] &= held[: len(held) - back] == held[-1 - back]
        ends = alike[:-1].nonzero()[0]
        if back + 1 >= MIN_NGRAM and len(ends):
            found = int(ends[-1])
    if found < 0:
        return []
    period = len(held) - 1 - found
    return [int(held[found + 1 + each % period]) for each in range(count)]
