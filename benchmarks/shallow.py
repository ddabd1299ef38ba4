"""A model's configuration with fewer layers: they show what a layer compiles to as well as all of them."""

import json
from pathlib import Path


def shallow(model: Path, layers: int, folder: Path) -> Path:
    """`folder`, with a config.json of so many layers in it."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}), encoding="utf-8")
    return folder
