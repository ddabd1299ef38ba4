"""Model folders that somebody else wrote: the tiny Llama's, with one thing wrong."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jdisagg.core.errors import CheckpointError
from jdisagg.model.checkpoint import open_source
from jdisagg.model.hf_config import read_config, read_generation_config
from jdisagg.model.params import check_tensors
from jdisagg.model.sources import HFSource
from jdisagg.model.tokenizer import Tokenizer
from tests.fixtures import conformance

GOOD = conformance.ROOT / "llama3"
INDEX = "model.safetensors.index.json"
READ = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
OPENED = (*READ, "chat_template.jinja", INDEX, "model.safetensors")  # all that a start opens


def copy(folder: Path) -> Path:
    """A good one, to be changed."""
    folder.mkdir(exist_ok=True)
    for path in GOOD.iterdir():
        if path.suffix in (".json", ".jinja", ".safetensors"):
            shutil.copyfile(path, folder / path.name)
    return folder


def change(folder: Path, name: str, **fields: Any) -> Path:
    """Fields of one of its JSON files are others, or new."""
    path = folder / name
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(found | fields))
    return folder


def pipe(folder: Path, name: str) -> Path:
    """One of its files is a pipe that nobody writes to."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    return folder


def safetensors(path: Path, header: Mapping[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """A file whose header may lie, about its own length as well."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def read_all(folder: Path) -> None:
    """Everything of a model folder that a start reads, weights apart: of those the headers."""
    config = read_config(folder)
    read_generation_config(folder)
    tokenizer = Tokenizer(folder)
    tokenizer.decode(tokenizer.encode("def f(x): return 'é'"))
    if tokenizer.has_chat_template:
        tokenizer.chat([{"role": "user", "content": "hello"}])
    source = open_source(folder, "hf", config)
    assert isinstance(source, HFSource)
    check_tensors(source, config)


def why_refused(folder: Path) -> str:
    """The one line that a folder costs; empty where it is taken."""
    try:
        read_all(folder)
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000, error
        return str(error)
    return ""
