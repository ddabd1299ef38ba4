"""The three places weights come from, behind one name: `--load_format=hf|orbax|random`."""

from pathlib import Path

from jdisagg.core.errors import FlagError
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.orbax_source import WEIGHTS, OrbaxSource
from jdisagg.model.sources import HFSource, RandomSource, Source

LOAD_FORMATS = ("hf", "orbax", "random")


def open_source(folder: str | Path, load_format: str, config: ModelConfig, seed: int = 0) -> Source:
    """Weights of the model in `folder`. "random" reads nothing: they follow from `seed` and `config` alone."""
    if load_format == "hf":
        return HFSource(folder)
    if load_format == "orbax":
        return OrbaxSource(folder)
    if load_format == "random":
        return RandomSource(config, seed)
    raise FlagError(f"load_format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")


def stored_source(folder: str | Path) -> HFSource | OrbaxSource:
    """The weights that lie in `folder`, whichever of the two kinds it is."""
    return OrbaxSource(folder) if (Path(folder) / WEIGHTS).is_dir() else HFSource(folder)
