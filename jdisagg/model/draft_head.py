"""An EAGLE draft head: one layer that predicts the target model's next hidden state (Li et al. 2024, arXiv 2401.15077).

At position t the head takes the model's hidden state of position t - 1 and the token of t, and predicts the state of t.
The model's own LM head turns that state into logits. The head's keys and values form one more layer of the model's KV:
they are a function of the tokens up to t, so their pages are written, cached, shipped and reused with the model's. If
the previous state is not available (a chunk starts, or the sequence came from another worker), zeros are used. This
lowers the quality of one draft entry and never changes a generated token.

A head may attend to a limited window (`sliding_window` in its folder), because a head trained on short texts drafts
worse with longer contexts. A head may also draft from a subset of frequent tokens (Zhao et al. 2025, arXiv 2502.14856):
`d2t` in the folder holds each token's id minus its index.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jdisagg.core.errors import CheckpointError, ConfigError
from jdisagg.core.layout.kv_layout import DTYPE_BYTES
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.checkpoint import why_no_model
from jdisagg.model.files import read_json
from jdisagg.model.hf_config import parse_config
from jdisagg.model.names import Index, LeafSpec, TensorSlice, layer_leaves
from jdisagg.model.network import Attend, Layer, scored
from jdisagg.model.norms import RMSNorm, normed
from jdisagg.model.params import (
    AXIS,
    StageSpec,
    StageTree,
    check_leaves,
    dotted,
    load_leaf,
    placed_leaves,
    weight_forms,
)
from jdisagg.model.products import MatrixFormat, layout_of
from jdisagg.model.rope import RotaryTable, inverse_frequencies, rotations
from jdisagg.model.sources import HFSource, TensorSource
from jdisagg.model.weight import Weight

TOKENS = "d2t"
INPUT_NORM, NORM = "layers.0.input_layernorm.weight", "norm.weight"
FC, FC_BIAS = "fc.weight", "fc.bias"
EMBED, ROWS = "model.embed_tokens.weight", "rows of the head"
ALIKE = ("vocab_size", "hidden_size", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class HeadConfig:
    """The configuration of a draft head: its one layer, its optional norms and biases, and its draft vocabulary."""

    layer: ModelConfig
    bias: bool = False
    input_norm: bool = True
    norm: bool = False
    tokens: tuple[int, ...] | None = None  # draft vocabulary, ascending; None: the whole vocabulary

    @property
    def num_tokens(self) -> int:
        return self.layer.vocab_size if self.tokens is None else len(self.tokens)


class DraftHead(nnx.Module):
    """The module of a draft head as one of `tp` shards computes it."""

    def __init__(
        self, config: HeadConfig, *, embeds: bool, tp: int, axis: str | None, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        """Builds the module. `embeds`: the head has its own embedding table because its stage has none."""
        size = config.layer.hidden_size

        def table(rows: int) -> nnx.Param:
            return nnx.Param(jnp.zeros((rows, size), dtype))

        self.config, self.dtype = config.layer, dtype
        self.fc = Weight(2 * size, size, bias=config.bias, scale=(2 * size) ** -0.5, dtype=dtype, rngs=rngs)
        self.layer = Layer(config.layer, 0, tp=tp, axis=axis, dtype=dtype, rngs=rngs)
        if not config.input_norm:
            self.layer.attention_norm = nnx.data(None)
        self.norm = RMSNorm(size, config.layer, dtype) if config.norm else None
        self.embed = table(config.layer.vocab_size) if embeds else None
        self.rows = table(config.num_tokens) if config.tokens is not None else None

    def become(self, out_first: bool) -> None:
        for _, module in list(nnx.iter_modules(self)):
            if isinstance(module, Weight):
                module.become(MatrixFormat(out_first))

    def __call__(self, embedded: Array, states: Array, positions: Array, attend: Attend) -> Array:
        """Returns the predicted states after these tokens, from their embeddings and the states before them."""
        x = self.fc(jnp.concatenate([embedded.astype(self.dtype), states.astype(self.dtype)], axis=-1))
        return normed(self.norm, self.layer(x, self.rotation(positions), 0, attend))

    def rotation(self, positions: Array) -> RotaryTable:
        scaling = self.config.rope_scaling
        return rotations(positions, inverse_frequencies(self.config), scaling.attention_factor if scaling else 1.0)

    def scores(self, states: Array) -> Array | None:
        """Returns logits over the draft vocabulary, f32[..., num_tokens]; None if the model's own head scores all
        tokens."""
        return None if self.rows is None else scored(states, self.rows[...])


# Configuration and weights in a folder.


@dataclass(frozen=True)
class HeadModel:
    """A draft head with its weights and those of its target model, which it shares in part."""

    source: TensorSource
    config: HeadConfig
    model: TensorSource


def read_head(folder: Path, model: ModelConfig, label: str) -> HeadConfig:
    """Returns the configuration of the head in `folder` for the target `model`; `label` names it in errors. Raises
    CheckpointError if there is no head, ConfigError if it belongs to another model."""
    why = why_no_model(folder)
    if why is not None:
        raise CheckpointError(f"{label}: {why}")
    if model.latent or model.sinks or model.embedding_scale != 1.0 or model.norms != "before":
        raise ConfigError(f"{label}: heads are for models of plain attention, and this one is a {model.family}")
    found, source = _layer_config(folder), HFSource(folder)
    for name in ALIKE:
        own, other = getattr(found, name), getattr(model, name)
        if own != other:
            raise ConfigError(f"{label} has a {name} of {own} and the model one of {other}: it is another model's head")
    if source.shape(FC) is None:
        raise CheckpointError(f"{label} has no tensor {FC}: it is no EAGLE head")
    if found.num_layers != 1 or found.experts or found.latent:
        raise ConfigError(
            f"{label} has {found.num_layers} layers of a {found.family}: heads of one plain layer are run"
        )
    tokens = read_tokens(source, model.vocab_size, label)
    parts = source.shape(FC_BIAS), source.shape(INPUT_NORM), source.shape(NORM)
    return HeadConfig(found, *(part is not None for part in parts), tokens=tokens)


def _layer_config(folder: Path) -> ModelConfig:
    """Reads the configuration of the head's layer. The architecture may have the suffix "Eagle". The window applies to
    any family unless `use_sliding_window` is false."""
    fields = read_json(folder / "config.json")
    names = fields.get("architectures")
    if isinstance(names, list):
        fields = {**fields, "architectures": [re.sub(r"Eagle\d*$", "", str(name)) for name in names]}
    found = parse_config(fields, str(folder / "config.json"))
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    if window is None or found.layer_windows:
        return found
    if type(window) is not int or window < 1:
        raise ConfigError(f"{folder}/config.json: sliding_window = {window!r} is no number of tokens")
    return replace(found, layer_windows=(window,) * found.num_layers)


def read_tokens(source: TensorSource, vocab_size: int, label: str) -> tuple[int, ...] | None:
    """Returns the draft vocabulary; None if it is the whole one. Raises ConfigError."""
    shape = source.shape(TOKENS)
    if shape is None:
        return None
    tokens = source.read(TOKENS, tuple(slice(0, size) for size in shape)).astype(np.int64)
    tokens = tokens + np.arange(len(tokens))
    if not len(tokens) or np.any(np.diff(tokens) <= 0) or tokens[0] < 0 or tokens[-1] >= vocab_size:
        raise ConfigError(f"{label}: {TOKENS} names {len(tokens)} tokens that are not ascending ones of {vocab_size}")
    return tuple(tokens.tolist())


class _SharedHeadSource:
    """The head's tensors together with the target model's embedding and LM head rows, by the names of the head's
    leaves."""

    def __init__(self, head: HeadModel) -> None:
        self._own, self._model, self._tokens = head.source, head.model, head.config.tokens
        self._head = "model.embed_tokens.weight" if head.model.shape("lm_head.weight") is None else "lm_head.weight"

    @property
    def place(self) -> str:
        return self._own.place

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name == ROWS:
            assert self._tokens is not None
            whole = self._model.shape(self._head)
            return whole and (len(self._tokens), *whole[1:])
        return self._of(name).shape(name)

    def dtype(self, name: str) -> str:
        return self._model.dtype(self._head) if name == ROWS else self._of(name).dtype(name)

    def read(self, name: str, index: Index) -> np.ndarray:
        if name != ROWS:
            return self._of(name).read(name, index)
        whole = self._model.shape(self._head)
        assert whole is not None
        return self._model.read(self._head, tuple(slice(0, size) for size in whole))[list(self._tokens or ())][index]

    def _of(self, name: str) -> TensorSource:
        return self._model if name == EMBED else self._own


@dataclass(frozen=True)
class HeadParams:
    """The weights of a draft head on a mesh."""

    graphdef: nnx.GraphDef
    treedef: object
    leaves: list[Array]
    specs: list[PartitionSpec]
    paths: list[str]  # of each leaf in the module tree

    def merge(self, leaves: list[Array]) -> DraftHead:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


def load_head(head: HeadModel, mesh: Mesh, dtype: DTypeLike, embeds: bool, out_first: bool | None = None) -> HeadParams:
    """Loads the head's weights, cut for the shards of `mesh`. `out_first` is as in `load_stage`. Raises MissingTensor,
    WrongShape, WrongDtype."""
    tp, config = mesh.size, head.config
    out_first = layout_of(mesh.devices.flat[0].platform) if out_first is None else out_first
    abstract = _abstract(config, tp, dtype, embeds, out_first)
    table, source = head_leaves(config), _SharedHeadSource(head)
    rules = abstract.rules(table)
    check_leaves(source, rules)
    specs, shapes = placed_leaves(abstract, rules, StageSpec(config.layer, range(1), mesh, dtype))
    named = zip(abstract.paths, rules, shapes, strict=True)
    leaves = [load_leaf(source, abstract, path, rule, leaf, tp) for path, rule, leaf in named]
    return HeadParams(abstract.graphdef, abstract.treedef, leaves, specs, abstract.paths)


def _abstract(config: HeadConfig, tp: int, dtype: DTypeLike, embeds: bool, out_first: bool) -> StageTree:
    def formed() -> DraftHead:
        axis = AXIS if tp > 1 else None
        made = DraftHead(config, embeds=embeds, tp=tp, axis=axis, dtype=dtype, rngs=nnx.Rngs(0))
        made.become(out_first)
        return made

    made = nnx.eval_shape(formed)
    graphdef, state = nnx.split(made)
    found, treedef = jax.tree_util.tree_flatten_with_path(state)
    paths, leaves = [dotted(path) for path, _ in found], [leaf for _, leaf in found]
    return StageTree(graphdef, treedef, paths, leaves, weight_forms(made))


def head_leaves(config: HeadConfig) -> dict[str, LeafSpec]:
    """Returns every leaf that a head can have, by path, with the tensor names of EAGLE checkpoints."""
    size, rows = config.layer.hidden_size, config.layer.vocab_size
    return {
        **{f"layer.{path}": leaf for path, leaf in layer_leaves(config.layer, "layers.0").items()},
        "fc.kernel": LeafSpec((TensorSlice(FC, (size, 2 * size)),), transposed=True),
        "fc.bias": LeafSpec((TensorSlice(FC_BIAS, (size,)),)),
        "norm.scale": LeafSpec((TensorSlice(NORM, (size,)),)),
        "embed": LeafSpec((TensorSlice(EMBED, (rows, size)),)),
        "rows": LeafSpec((TensorSlice(ROWS, (config.num_tokens, size)),)),
    }


def head_bytes(config: HeadConfig, tp: int, dtype: str) -> int:
    """Returns the bytes of the head on one of `tp` devices, including the tables it may add to its stage's."""
    layer, size = config.layer, config.layer.hidden_size
    rows = layer.vocab_size + (config.num_tokens if config.tokens is not None else 0)
    return (layer.layer_params(tp) + 2 * size * size + rows * size) * DTYPE_BYTES[dtype]
