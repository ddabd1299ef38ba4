"""Draft heads for tests: one that is always right, and one that knows nothing."""

from dataclasses import replace

import numpy as np

from jdisagg.core.model_config import ModelConfig
from jdisagg.model.draft_head import EMBED, FC, INPUT_NORM, NORM, TOKENS, HeadConfig, HeadModel
from jdisagg.model.sources import RandomSource
from tests.engine.stacks import CONFIG, SOURCE

SHALLOW = replace(CONFIG, num_layers=2)


class Arrays:
    """Tensors by name, some of them other sources'."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    @property
    def place(self) -> str:
        return "memory"

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.arrays[name].shape if name in self.arrays else None

    def dtype(self, name: str) -> str:
        return str(self.arrays[name].dtype)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self.arrays[name][index]


def whole(source: RandomSource, name: str) -> np.ndarray:
    shape = source.shape(name)
    assert shape is not None, name
    return source.read(name, tuple(slice(0, size) for size in shape)).astype(np.float32)


def layer_names(config: ModelConfig, source: RandomSource, layer: int) -> list[str]:
    parts = [f"self_attn.{each}_proj" for each in "qkvo"] + [f"mlp.{each}_proj" for each in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    return [f"model.layers.{layer}.{part}.weight" for part in parts]


def shallow_model() -> Arrays:
    """Of two layers, the second of which adds nothing: the first alone says what is drawn."""
    source = RandomSource(SHALLOW, seed=3)
    names = [EMBED, "model.norm.weight", "lm_head.weight"]
    names += [name for layer in range(2) for name in layer_names(SHALLOW, source, layer)]
    arrays = {name: whole(source, name) for name in names}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        arrays[f"model.layers.1.{name}.weight"][:] = 0
    return Arrays(arrays)


def knowing_head(windows: tuple[int, ...] = ()) -> tuple[Arrays, HeadModel]:
    """The shallow model, and a head that is that first layer: of what it is given it takes the embedding alone."""
    model = shallow_model()
    layer = replace(SHALLOW, num_layers=1, layer_windows=windows[:1])
    size, config = SHALLOW.hidden_size, HeadConfig(layer, norm=True)
    arrays = {name.removeprefix("model."): model.arrays[name] for name in model.arrays if ".layers.0." in name}
    fc = np.concatenate([np.eye(size), np.zeros((size, size))], axis=1).astype(np.float32)
    head = Arrays({**arrays, FC: fc, NORM: model.arrays["model.norm.weight"]})
    return model, HeadModel(head, config, model)


def ignorant_arrays(tokens: tuple[int, ...] | None = None) -> dict[str, np.ndarray]:
    """Of a head of CONFIG's model that guesses anything, among these tokens."""
    source, size = RandomSource(replace(CONFIG, num_layers=1), seed=8), CONFIG.hidden_size
    names = layer_names(CONFIG, source, 0)
    arrays = {name.removeprefix("model."): whole(source, name) for name in names}
    del arrays[INPUT_NORM]
    arrays[FC] = np.random.default_rng(1).normal(0, size**-0.5, (size, 2 * size)).astype(np.float32)
    if tokens is not None:
        arrays[TOKENS] = np.array(tokens) - np.arange(len(tokens))
    return arrays


def ignorant_head(tokens: tuple[int, ...] | None = None) -> HeadModel:
    config = HeadConfig(replace(CONFIG, num_layers=1), input_norm=False, tokens=tokens)
    return HeadModel(Arrays(ignorant_arrays(tokens)), config, SOURCE)
