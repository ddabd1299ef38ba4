"""Whether a stack has structured output, by --structured_output and what is installed."""

from __future__ import annotations

import logging
from pathlib import Path

from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import Settings
from jdisagg.model.grammars.grammars import CompiledGrammars, grammars_installed, open_grammars

log = logging.getLogger(__name__)


def why_no_grammars(settings: Settings) -> str:
    """Why requests may not ask for structured output; "" where they may."""
    if settings.structured_output == "off":
        return "this server runs with --structured_output=off"
    if not grammars_installed():
        return "this server has no llguidance; pip install llguidance gives it"
    return ""


def grammars_of(settings: Settings, model_folder: Path, vocab_size: int) -> CompiledGrammars | None:
    """What machines hold answers to their grammars by; None where there is nothing, which the log then says."""
    if why_no_grammars(settings):
        return None
    try:
        return open_grammars(Path(settings.tokenizer or model_folder), vocab_size)
    except ConfigError as error:
        log.warning("%s", error)
        return None
