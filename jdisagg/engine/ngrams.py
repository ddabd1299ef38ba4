"""What may follow a sequence's end, guessed from what followed where it stood before: on the host.

For rows whose tokens the host knows before the step. `drafting.guessed` is the same of rows whose tokens it does not,
and `policy/shadow_drafts.py` of rows that are not guessed at all, to see what guesses would have come to.
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
