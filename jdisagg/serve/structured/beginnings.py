"""What a grammar forces before anything is drawn: it is computed with the prompt, in the same chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jdisagg.core.errors import ConfigError
from jdisagg.core.request import Request
from jdisagg.model.grammars.grammars import open_grammars
from jdisagg.serve import offload
from jdisagg.serve.service import Service


async def with_beginning(request: Request, service: Service) -> Request:
    """The request with the tokens that its grammar leaves no choice about; where log-probabilities of them are wanted,
    they are drawn."""
    sampling = request.sampling
    if not sampling.grammar or sampling.logprobs is not None or sampling.whole_prompt:
        return request
    place, vocab_size = service.tokenizer.place, service.model_config.vocab_size
    return replace(request, forced=await offload.compiling(lambda: forced_first(sampling.grammar, place, vocab_size)))


def forced_first(grammar: str, place: Path, vocab_size: int) -> tuple[int, ...]:
    """None where there is nobody here who knows grammars."""
    try:
        grammars = open_grammars(place, vocab_size)
    except ConfigError:
        return ()
    return tuple(grammars.start(grammar).forced())
