"""Converts a model between Hugging Face safetensors and a sharded Orbax checkpoint, either way, or from GGUF to these.

    python -m jdisagg convert --input=FOLDER|FILE.gguf --output=DIR --format=orbax|hf [--dtype=bfloat16|float32|float16]

The input may be any of the kinds; the output is a new or empty folder. Without --dtype, numbers keep their dtype,
and quantised ones become float32. Config, tokenizer and chat template files are copied, so the output folder can be
served: `--load_format=orbax` restores each shard's slice directly onto its device. Writing Orbax holds the whole
model in host memory once; writing safetensors holds one file of it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from absl import flags as absl_flags
from rich.console import Console
from rich.progress import track

from jdisagg import command, flags
from jdisagg.core.errors import CheckpointError, FlagError
from jdisagg.core.settings import Settings
from jdisagg.model.checkpoint import Stored, read_model, save_orbax, stored_source
from jdisagg.model.export import copy_companions, save_hf
from jdisagg.model.files import first_line
from jdisagg.model.gguf.file import is_gguf
from jdisagg.model.gguf.source import write_companions
from jdisagg.model.params import check_tensors
from jdisagg.model.quantized.source import QuantizedSource
from jdisagg.named_models import located

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}


def declare() -> flags.FlagValues:
    values = flags.own()
    absl_flags.DEFINE_string("input", None, "model folder, Hugging Face or Orbax, or GGUF file", flag_values=values)
    absl_flags.DEFINE_enum("format", "orbax", ["orbax", "hf"], "what to write", flag_values=values)
    flags.define(values, {"dtype": list(DTYPES)}, output="", dtype=None)
    return values


def convert(place: Path, target: Path, fmt: str, dtype: str | None) -> None:
    """Writes the model at `place` to `target` as "orbax" or "hf", or nothing. Raises `CheckpointError`."""
    target = target.resolve()
    _refuse_occupied(target)
    source = stored_source(place)
    check_tensors(source, read_model(place))
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        if fmt == "orbax":
            save_orbax(partial, dict(_tensors(source, dtype)))
        else:
            save_hf(partial, _tensors(source, dtype))
        if is_gguf(place):
            write_companions(place, partial, dtype or "float32")
        else:
            copy_companions(place, partial, dtype or ("float32" if isinstance(source, QuantizedSource) else None))
        partial.replace(target)
    except CheckpointError:
        raise
    except Exception as error:  # safetensors and orbax raise their own errors for a full disk
        raise CheckpointError(f"cannot write {target}: {first_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_occupied(target: Path) -> None:
    try:
        if target.exists() and any(target.iterdir()):
            raise CheckpointError(f"output {target} is not empty")
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror}") from error


def _tensors(source: Stored, dtype: str | None) -> Iterator[tuple[str, np.ndarray]]:
    for name in track(source.names, description="tensors"):
        shape = source.shape(name)
        assert shape is not None, name
        tensor = source.read(name, tuple(slice(0, size) for size in shape))
        yield name, tensor if dtype is None else tensor.astype(DTYPES[dtype])


def run(values: flags.FlagValues) -> int:
    if not values.input or not values.output:
        raise FlagError(f"needed: --input=FOLDER|FILE.gguf --output=DIR; found: {values.input!r} and {values.output!r}")
    place = located(Settings(model=values.input), Console(stderr=True)).model
    convert(Path(place), Path(values.output), values.format, values.dtype)
    print(f"wrote {values.output} ({values.format})")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 2 with one line on the error."""
    return command.run("jdisagg convert", __doc__, declare(), argv, run)


if __name__ == "__main__":
    sys.exit(main())
