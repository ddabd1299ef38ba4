"""Loads a stage's weights from a source, shard by shard, into sharded arrays.

The module tree is flattened once here. Afterwards a stage is a flat list of leaves, and `merge` rebuilds the `Stage`
inside a jitted program. Under `shard_map` with `specs`, each program sees its shard's local arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from jdisagg.core.errors import MissingTensor, WrongDtype, WrongShape
from jdisagg.core.model_config import AS_MADE, ModelConfig, WeightFormat
from jdisagg.core.steps import Repeat
from jdisagg.model.experts import MATRICES, ExpertLayer
from jdisagg.model.names import Index, LeafSpec, first_tensor, stage_leaves
from jdisagg.model.network import Stage, VocabularyLayout, Weight
from jdisagg.model.products import MatrixFormat, layout_of
from jdisagg.model.shards import channel_scales, scaled_shard, shard_of_leaf
from jdisagg.model.sources import FLOATS, TensorSource
from jdisagg.parallel.submesh import Device

SUMMED = (
    "out.kernel",
    "mlp.down.kernel",
    "mlp.down",
)  # leaves whose product is reduced; experts and shared MLP share one
AXIS = "tp"  # the one axis of a stage's mesh


@dataclass(frozen=True)
class StageSpec:
    """The layers, devices and number formats of a stage: everything but the numbers."""

    config: ModelConfig
    layers: range
    mesh: Mesh  # one axis, "tp"
    dtype: DTypeLike  # dtype of activations and of matrices that `weights` does not round
    weights: WeightFormat = AS_MADE
    out_first: bool | None = None  # True if matrices are stored [out, in]; None: as the platform prefers

    @property
    def tp(self) -> int:
        return self.mesh.size

    @property
    def device(self) -> Device:
        return self.mesh.devices.flat[0]

    @property
    def platform(self) -> str:
        return self.device.platform

    def abstract(self, repeat: Repeat | None = None) -> StageTree:
        assert self.mesh.axis_names == (AXIS,), self.mesh.axis_names
        out_first = layout_of(self.platform) if self.out_first is None else self.out_first
        sharded = self.tp, AXIS if self.tp > 1 else None
        return abstract_stage(self.config, self.layers, *sharded, self.dtype, self.weights, out_first, repeat=repeat)

    def sharding(self, spec: PartitionSpec) -> Sharding:
        return SingleDeviceSharding(self.mesh.devices.flat[0]) if self.tp == 1 else NamedSharding(self.mesh, spec)


@dataclass(frozen=True)
class StageTree:
    """The module tree of one shard of a stage, without memory."""

    graphdef: nnx.GraphDef
    treedef: Any  # a PyTreeDef; JAX gives no name for it that type checkers accept
    paths: list[str]  # "layers.0.attention.qkv.kernel", in leaf order
    leaves: list[jax.ShapeDtypeStruct]  # local shapes
    forms: dict[str, MatrixFormat]  # see `forms_of`

    def rules(self, table: dict[str, LeafSpec]) -> list[LeafSpec]:
        """Returns the recipe of each leaf from a checkpoint; `table` comes from `stage_leaves`."""
        return [self._rule(path, table) for path in self.paths]

    def _rule(self, path: str, table: dict[str, LeafSpec]) -> LeafSpec:
        kernel = self.scaled_by(path)
        return as_it_lies(table[path], path, self.forms) if kernel is None else table[kernel].channels()

    def scaled_by(self, path: str) -> str | None:
        """Returns the leaf whose scales are at `path`; None if `path` is not a scale."""
        kernel = "head" if path == "head_scale" else path.removesuffix("scale") + "kernel"
        form = self.forms.get(kernel)
        return kernel if path.endswith("scale") and form is not None and form.is_scaled else None


@dataclass(frozen=True)
class StageParams:
    """A stage's weights. Leaf i is a global array sharded by `specs[i]`, which is empty on one device. Without loading
    (`abstract_stage_params`) leaves are shapes with a sharding, enough to compile programs for."""

    graphdef: nnx.GraphDef
    treedef: Any  # a PyTreeDef; JAX gives no name for it that type checkers accept
    leaves: list[Any]  # jax.Array, or jax.ShapeDtypeStruct
    specs: list[PartitionSpec]
    num_reductions: int = 0  # see `count_reductions`

    def merge(self, leaves: list[jax.Array]) -> Stage:
        """Returns the module over `leaves`: a shard's local arrays under `shard_map`, or whole arrays on one device."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    @property
    def in_f32(self) -> bool:
        """True if all floating-point weights are f32."""
        return all(leaf.dtype == jnp.float32 or not jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in self.leaves)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards together, with replicas counted once."""
        return sum(leaf.nbytes for leaf in self.leaves)


def abstract_stage(
    config: ModelConfig,
    layers: Sequence[int],
    tp: int,
    axis: str | None,
    dtype: DTypeLike,
    weights: WeightFormat = AS_MADE,
    out_first: bool = False,
    spread: VocabularyLayout | None = None,
    repeat: Repeat | None = None,
) -> StageTree:
    """Returns one shard of a stage with matrices in the given form; nothing is allocated. See `network.Stage` for
    `spread` (rings) and `repeat` (loops)."""
    assert len(layers) and 0 <= min(layers) <= max(layers) < config.num_layers, layers

    def formed() -> Stage:
        stage = Stage(config, layers, tp=tp, axis=axis, dtype=dtype, rngs=nnx.Rngs(0), spread=spread, repeat=repeat)
        stage.become(weights, out_first)
        return stage

    stage = nnx.eval_shape(formed)
    graphdef, state = nnx.split(stage)
    found, treedef = jax.tree_util.tree_flatten_with_path(state)
    paths, leaves = [dotted(path) for path, _ in found], [leaf for _, leaf in found]
    return StageTree(graphdef, treedef, paths, leaves, forms_of(stage))


def forms_of(stage: Stage) -> dict[str, MatrixFormat]:
    """Returns the form of every matrix by leaf, such as "layers.0.attention.qkv.kernel", and of "head"."""
    experts = {
        ".".join(map(str, (*path, name))): module.form
        for path, module in nnx.iter_modules(stage)
        if isinstance(module, ExpertLayer)
        for name in MATRICES
    }
    return weight_forms(stage) | experts | {"head": stage.head_form}


def weight_forms(module: nnx.Module) -> dict[str, MatrixFormat]:
    return {
        ".".join(map(str, (*path, "kernel"))): each.form
        for path, each in nnx.iter_modules(module)
        if isinstance(each, Weight)
    }


def as_it_lies(rule: LeafSpec, path: str, forms: dict[str, MatrixFormat]) -> LeafSpec:
    """Returns the leaf of `path` in the stored orientation of its matrix; the head is always stored as in the
    checkpoint."""
    form = forms.get(path)
    return rule.flipped() if form is not None and form.out_first and path != "head" else rule


def dotted(path: tuple) -> str:
    """Returns a path of the module tree as "layers.0.attention.qkv.kernel"."""
    return ".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))


def load_stage(source: TensorSource, spec: StageSpec) -> StageParams:
    """Loads a stage onto its devices, each shard's slice on its own, in the formats of `spec`.

    On a mesh of one device the program has no axis and leaves are on that device. Host memory holds one leaf at a time.
    Raises `MissingTensor`, `WrongShape`, `WrongDtype`.
    """
    outline, _, leaves = load_leaves(source, spec)
    return replace(outline, leaves=list(leaves))


def load_leaves(source: TensorSource, spec: StageSpec) -> tuple[StageParams, StageTree, Iterator[jax.Array]]:
    """Returns what `load_stage` needs: the shapes, the abstract stage, and an iterator that loads each leaf on
    demand."""
    check_depth(source, spec.config, spec.layers)
    outline, abstract, rules = outline_of(spec)
    check_leaves(source, rules)
    named = zip(abstract.paths, rules, outline.leaves, strict=True)
    leaves = (load_leaf(source, abstract, path, rule, leaf, spec.tp) for path, rule, leaf in named)
    return outline, abstract, leaves


def abstract_stage_params(spec: StageSpec) -> StageParams:
    """Returns the result of `load_stage` with shapes instead of arrays; nothing is read or allocated. The devices may
    belong to a topology that is not attached."""
    return outline_of(spec)[0]


def outline_of(spec: StageSpec) -> tuple[StageParams, StageTree, list[LeafSpec]]:
    """Returns the stage's shapes and the recipe of each leaf."""
    config, tp, abstract = spec.config, spec.tp, spec.abstract()
    rules = abstract.rules(stage_leaves(config, spec.layers, tp if config.vocab_size % tp == 0 else 1))
    specs, leaves = placed_leaves(abstract, rules, spec)
    reductions = count_reductions(abstract)
    return StageParams(abstract.graphdef, abstract.treedef, leaves, specs, reductions), abstract, rules


def placed_leaves(
    abstract: StageTree, rules: list[LeafSpec], spec: StageSpec
) -> tuple[list[PartitionSpec], list[jax.ShapeDtypeStruct]]:
    """Returns how each leaf is cut over the mesh, and its global shape."""
    specs = [_spec(rule, spec.tp) for rule in rules]
    leaves = [
        _whole_leaf(rule, local, spec.sharding(each), spec.tp)
        for rule, local, each in zip(rules, abstract.leaves, specs, strict=True)
    ]
    return specs, leaves


def count_reductions(abstract: StageTree) -> int:
    """Returns the all-reduces in one pass over the layers if there are several shards."""
    summed = [abstract.forms[path] for path in abstract.paths if path.endswith(SUMMED)]
    return sum(2 if form.is_scaled else 1 for form in summed)  # quantised: the rows' scales, then the sums


def check_tensors(source: TensorSource, config: ModelConfig) -> None:
    """Checks that `source` has every tensor of the model. Raises `MissingTensor`, `WrongShape`, `WrongDtype`."""
    layers = range(config.num_layers)
    check_depth(source, config, layers)
    table = stage_leaves(config, layers, 1)
    check_leaves(source, [table[path] for path in abstract_stage(config, layers, 1, None, jnp.float32).paths])


def check_depth(source: TensorSource, config: ModelConfig, layers: range) -> None:
    """Checks that every layer exists by its first norm, because building a tree of hundreds of missing layers takes
    minutes."""
    for name in (first_tensor(config, layer) for layer in layers):
        if source.shape(name) is None:
            raise MissingTensor(f"tensor {name} is not in {source.place}")


def check_leaves(source: TensorSource, rules: list[LeafSpec]) -> None:
    """Checks existence, shape and dtype of every tensor before the first byte is read."""
    for part in (part for rule in rules for part in rule.parts):
        found = source.shape(part.name)
        if found is None:
            raise MissingTensor(f"tensor {part.name} is not in {source.place}")
        if found != part.shape:
            raise WrongShape(
                f"tensor {part.name} in {source.place} has shape {found}; the config asks for {part.shape}"
            )
        stored = source.dtype(part.name)
        if stored not in FLOATS:
            raise WrongDtype(f"tensor {part.name} in {source.place} has dtype {stored}; needed: {', '.join(FLOATS)}")


def _spec(rule: LeafSpec, tp: int) -> PartitionSpec:
    if tp == 1 or rule.axis is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * rule.axis, AXIS)


def _whole_leaf(rule: LeafSpec, local: jax.ShapeDtypeStruct, sharding: Sharding, tp: int) -> jax.ShapeDtypeStruct:
    shape = [size * tp if axis == rule.axis else size for axis, size in enumerate(local.shape)]
    return jax.ShapeDtypeStruct(shape, local.dtype, sharding=sharding)


def load_leaf(
    source: TensorSource, abstract: StageTree, path: str, rule: LeafSpec, leaf: jax.ShapeDtypeStruct, tp: int
) -> jax.Array:
    """Loads one leaf of a stage, each shard's slice on its own."""
    shard_of = shards_of(source, abstract, path, rule, tp, leaf)

    def shard_at(index: Index | None) -> np.ndarray:
        start = 0 if rule.axis is None or not index else index[rule.axis].start or 0
        return shard_of(0 if rule.axis is None else start * tp // leaf.shape[rule.axis])

    # Blocking limits host memory to one leaf: a transfer to an accelerator holds its buffer until it ends.
    return jax.block_until_ready(jax.make_array_from_callback(leaf.shape, leaf.sharding, shard_at))


def shards_of(
    source: TensorSource, abstract: StageTree, path: str, rule: LeafSpec, tp: int, leaf: jax.ShapeDtypeStruct
) -> Callable[[int], np.ndarray]:
    """Returns a function that builds one shard of a leaf on the host."""
    form, kernel = abstract.forms.get(path), abstract.scaled_by(path)
    if kernel is not None:
        return lambda shard: channel_scales(source, rule, shard, tp, abstract.forms[kernel].dtype)
    if form is not None and form.is_scaled:
        return lambda shard: scaled_shard(source, rule, shard, tp, form.dtype)
    return lambda shard: shard_of_leaf(source, rule, shard, tp, leaf.dtype)
