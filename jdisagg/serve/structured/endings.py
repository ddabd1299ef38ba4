"""Whether an answer that ended as an error did so by its grammar: where it stands is a function of its tokens, so that
it can be asked again. A worker sees tokens, and cannot tell a grammar that allows none from logits that are no numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jdisagg.core.errors import ConfigError
from jdisagg.core.request import FinishReason
from jdisagg.model.grammars.grammars import open_grammars
from jdisagg.serve import offload
from jdisagg.serve.service import Service
from jdisagg.serve.text import Piece


async def explain(piece: Piece, grammar: str, tokens: Sequence[int], service: Service) -> None:
    """Says so in the last piece of an answer of these tokens."""
    if piece.finish is None or piece.finish.reason is not FinishReason.ERROR:
        return
    place, vocab_size = service.tokenizer.place, service.model_config.vocab_size
    if await offload.compiling(lambda: nothing_follows(grammar, tokens, place, vocab_size)):
        said = f"the answer's grammar went over its limits after {len(tokens)} tokens: it is too ambiguous or too large"
        piece.finish, piece.by_grammar = replace(piece.finish, detail=f"{said} to be followed"), True


def nothing_follows(grammar: str, tokens: Sequence[int], place: Path, vocab_size: int) -> bool:
    """Whether it allows no token behind these; False where there is nobody here who knows grammars."""
    try:
        grammars = open_grammars(place, vocab_size)
    except ConfigError:
        return False
    matcher, mask = grammars.start(grammar), np.zeros(grammars.words, np.uint32)
    matcher.take(tokens)
    matcher.fill(mask)
    return not mask.any()
