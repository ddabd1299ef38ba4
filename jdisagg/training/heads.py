"""Trains an EAGLE draft head on text that its target model generated (`data.py`).

The head starts as the target's last layer. Its loss is the KL divergence in nats of its next-token distribution from
the target's, plus the squared error of its predicted states. Some of the input states are its own predictions
(scheduled sampling: Bengio et al. 2015), and some are zeros, as for states that are not available in serving.
"""

from __future__ import annotations

import datetime
import json
import time
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from jdisagg.core.errors import ConfigError, FlagError
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.checkpoint import open_source
from jdisagg.model.draft_head import (
    EMBED,
    FC,
    NORM,
    ROWS,
    TOKENS,
    DraftHead,
    HeadConfig,
    HeadModel,
    HeadParams,
    head_leaves,
    load_head,
)
from jdisagg.model.export import config_json, save_hf, write_json
from jdisagg.model.names import Index
from jdisagg.model.params import AXIS
from jdisagg.model.sources import TensorSource
from jdisagg.training.data import GeneratedBatch, TargetModel, TargetSettings
from jdisagg.training.run import CheckpointStore, read_table
from jdisagg.training.step import Leaves, OptimiserSettings, blocked_attend, make_optimiser, updated

ARCHITECTURE = "LlamaForCausalLMEagle"
SHARED = ("embed", "rows")  # leaves taken from the target model


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """The draft vocabulary and the training parameters of a head: shares of input states, and a weight of the loss."""

    tokens: int  # size of the draft vocabulary, by frequency; 0: all
    steps: int
    batch: int
    out_dir: str
    export_dir: str
    save_every: int
    own_states: float = 0.35
    lost_states: float = 0.05
    regression: float = 0.5
    held_out: int = 8  # answers for evaluation, excluded from training
    seed: int = 0


class _InitialHeadSource:
    """The initial tensors of a head: those of the target's last layer."""

    def __init__(self, source: TensorSource, model: ModelConfig, state_scale: float) -> None:
        self._source, self._layer = source, f"model.layers.{model.num_layers - 1}."
        size = np.eye(model.hidden_size, dtype=np.float32)
        self._fc = np.concatenate([size, state_scale * size], axis=1)

    @property
    def place(self) -> str:
        return self._source.place

    def _name(self, name: str) -> str:
        return "model.norm.weight" if name == NORM else name.replace("layers.0.", self._layer)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._fc.shape if name == FC else self._source.shape(self._name(name))

    def dtype(self, name: str) -> str:
        return "float32" if name == FC else self._source.dtype(self._name(name))

    def read(self, name: str, index: Index) -> np.ndarray:
        return self._fc[index] if name == FC else self._source.read(self._name(name), index)


@dataclass
class HeadRun:
    """The state of a training run after `step` steps."""

    settings: HeadSettings
    config: HeadConfig
    params: HeadParams
    lesson: HeadTrainingStep
    shared: tuple[Leaves, Array]  # the target's: leaves of the head, and the LM head's rows
    kept: GeneratedBatch  # held-out answers
    written: GeneratedBatch
    checkpoints: CheckpointStore
    step: int
    leaves: Leaves
    state: optax.OptState
    losses: list[tuple[int, float]]


def open_head_run(
    settings: HeadSettings, optimiser: OptimiserSettings, target: TargetModel, parts: list[GeneratedBatch]
) -> HeadRun:
    """Opens a run at its newest checkpoint, if any. Raises ConfigError if that checkpoint has another draft
    vocabulary."""
    tokens, states = (np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "states"))
    draft_tokens = frequent(tokens, settings.tokens, target.config)
    config = HeadConfig(replace(target.config, num_layers=1), norm=True, tokens=draft_tokens)
    source = open_source(Path(target.settings.folder), "hf", target.config)
    scale = _state_scale(source, tokens, states)
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,))
    model = HeadModel(_InitialHeadSource(source, target.config, scale), config, source)
    params = load_head(model, mesh, jnp.float32, embeds=True, out_first=False)
    trained = [index for index, path in enumerate(params.paths) if path not in SHARED]
    rule, leaves = make_optimiser(optimiser, settings.steps), [params.leaves[index] for index in trained]
    folder = Path(settings.out_dir)
    checkpoints, state, at = CheckpointStore(folder / "checkpoints"), rule.init(leaves), 0
    check_same_tokens(folder, len(parts), draft_tokens, resumes=checkpoints.latest_step() is not None)
    if checkpoints.latest_step() is not None:
        at = checkpoints.latest_step() or 0
        leaves, state = checkpoints.restore(at, leaves, state)
    shared = [leaf if path in SHARED else jnp.zeros(()) for leaf, path in zip(params.leaves, params.paths, strict=True)]
    lesson, table = HeadTrainingStep(settings, params, trained, rule), _scores_of(source, config, params)
    kept, rest = (
        GeneratedBatch(tokens[cut], states[cut]) for cut in (slice(settings.held_out), slice(settings.held_out, None))
    )
    return HeadRun(settings, config, params, lesson, (shared, table), kept, rest, checkpoints, at, leaves, state, [])


def check_same_tokens(folder: Path, parts: int, draft_tokens: tuple[int, ...] | None, *, resumes: bool) -> None:
    """Records the draft vocabulary in `folder`. Raises ConfigError if checkpoints to resume have another one."""
    record, now = (
        folder / "guesses.json",
        {"parts": parts, "tokens": None if draft_tokens is None else list(draft_tokens)},
    )
    if resumes and record.exists():
        was = json.loads(record.read_text())
        if was["tokens"] != now["tokens"]:
            raise ConfigError(
                f"{folder}/checkpoints guess among the tokens that parts = {was['parts']} use most, and parts = {parts}"
                f" use others: delete {folder}/checkpoints, or set parts = {was['parts']} again"
            )
    folder.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(now) + "\n")


def frequent(tokens: np.ndarray, number: int, config: ModelConfig) -> tuple[int, ...] | None:
    """Returns the most frequent tokens, ascending; None for all."""
    if number == 0 or number >= config.vocab_size:
        return None
    counts = np.bincount(tokens.reshape(-1), minlength=config.vocab_size)
    return tuple(sorted(np.argsort(-counts, kind="stable")[:number].tolist()))


def _state_scale(source: TensorSource, tokens: np.ndarray, states: np.ndarray) -> float:
    """Returns the factor that scales a state to the size of an embedding."""
    shape = source.shape(EMBED)
    assert shape is not None
    table = source.read(EMBED, tuple(slice(0, size) for size in shape)).astype(np.float32)[tokens[0]]
    return float(np.sqrt(np.mean(table**2) / np.mean(states[0].astype(np.float32) ** 2)))


def _scores_of(source: TensorSource, config: HeadConfig, params: HeadParams) -> Array:
    """Returns the target's LM head rows of the draft vocabulary, f32[tokens, hidden]."""
    if "rows" in params.paths:
        return params.leaves[params.paths.index("rows")]
    name = "model.embed_tokens.weight" if source.shape("lm_head.weight") is None else "lm_head.weight"
    rule = head_leaves(config)[ROWS if name == ROWS else "embed"].parts[0]
    return jnp.asarray(source.read(name, tuple(slice(0, size) for size in rule.shape)), jnp.float32)


class HeadTrainingStep:
    """The training step of a head, and its evaluation."""

    def __init__(
        self, settings: HeadSettings, params: HeadParams, trained: list[int], rule: optax.GradientTransformation
    ) -> None:
        self.settings, self.params, self.trained, self.rule = settings, params, trained, rule
        self.step, self.judge = jax.jit(self._step, donate_argnums=(0, 1)), jax.jit(self._judged)

    def merged(self, leaves: Leaves, shared: Leaves) -> DraftHead:
        whole = list(shared)
        for index, leaf in zip(self.trained, leaves, strict=True):
            whole[index] = leaf
        return self.params.merge(whole)

    def loss(self, leaves: Leaves, shared: Leaves, table: Array, tokens: Array, states: Array, key: Array) -> Array:
        head, before = self.merged(leaves, shared), later(states)
        own_states = later(jax.lax.stop_gradient(run_head(head, tokens, before)))
        chance = jax.random.uniform(key, (*tokens.shape, 1))
        given = jnp.where(chance < self.settings.own_states, own_states, before)
        made = run_head(head, tokens, jnp.where(chance > 1 - self.settings.lost_states, 0, given))
        target_log_probs, head_log_probs = log_likely(states, table), log_likely(made, table)
        divergence = jnp.sum(jnp.exp(target_log_probs) * (target_log_probs - head_log_probs), axis=-1).mean()
        return divergence + self.settings.regression * jnp.mean((made - states) ** 2) / jnp.mean(states**2)

    def _step(self, leaves: Leaves, state: optax.OptState, *given: Any) -> tuple[Any, ...]:
        shared, table, tokens, states, key = given
        batch = shared, table, tokens, states.astype(jnp.float32), key
        loss, gradients = jax.value_and_grad(self.loss)(leaves, *batch)
        return *updated(self.rule, leaves, state, gradients), loss

    def _judged(self, leaves: Leaves, shared: Leaves, table: Array, tokens: Array, states: Array) -> list[Array]:
        """Returns the agreement of greedy tokens with the target, from true states and from the head's own predicted
        states."""
        head, states = self.merged(leaves, shared), states.astype(jnp.float32)
        first = run_head(head, tokens, later(states))
        second = run_head(head, tokens, later(first))
        true = jnp.argmax(log_likely(states, table), axis=-1)
        return [(jnp.argmax(log_likely(made, table), axis=-1) == true)[:, 1:].mean() for made in (first, second)]


def run_head(head: DraftHead, tokens: Array, before: Array) -> Array:
    """Returns the predicted states [B, T, hidden] for tokens i32[B, T] and the states before each."""
    assert head.embed is not None
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return head(head.embed[...][tokens], before, positions, blocked_attend)


def log_likely(states: Array, table: Array) -> Array:
    return jax.nn.log_softmax(jnp.einsum("bth,vh->btv", states, table))


def later(states: Array) -> Array:
    """Shifts states [B, T, hidden] by one position, so that each position has the state before it."""
    return jnp.pad(states, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def train_head(run: HeadRun) -> None:
    """Trains to the last step, with checkpoints and reports."""
    settings, began_s, since = run.settings, time.perf_counter(), list[float]()
    while run.step < settings.steps:
        rng = np.random.default_rng([settings.seed, run.step])
        rows = rng.permutation(len(run.written.tokens))[: settings.batch]
        given = run.written.tokens[rows], run.written.states[rows], jax.random.key(run.step)
        run.leaves, run.state, loss = run.lesson.step(run.leaves, run.state, *run.shared, *given)
        run.step += 1
        since.append(float(loss))
        if run.step % settings.save_every == 0 or run.step == settings.steps:
            run.checkpoints.save(run.step, run.leaves, run.state)
            run.losses.append((run.step, round(float(np.mean(since)), 4)))
            first, second = judge(run)
            took = time.perf_counter() - began_s
            line = f"step {run.step}/{settings.steps}  loss {run.losses[-1][1]}  agrees {first:.3f}, then {second:.3f}"
            print(f"{line}  {took:.0f} s", flush=True)
            with (Path(settings.out_dir) / "log.jsonl").open("a") as file:
                file.write(json.dumps({"step": run.step, "loss": run.losses[-1][1], "agrees": [first, second]}) + "\n")
            since.clear()


def judge(run: HeadRun) -> tuple[float, float]:
    """Returns the shares of positions where head and target agree on the greedy token, one and two tokens ahead."""
    found = run.lesson.judge(run.leaves, *run.shared, run.kept.tokens, run.kept.states)
    return round(float(found[0]), 4), round(float(found[1]), 4)


def export_head(run: HeadRun) -> None:
    """Writes the head's own weights in bf16 as an EAGLE folder; the tables are the target's."""
    folder = Path(run.settings.export_dir)
    folder.mkdir(parents=True, exist_ok=True)
    rules, tensors = head_leaves(run.config), dict[str, np.ndarray]()
    for index, leaf in zip(run.lesson.trained, run.leaves, strict=True):
        for part, _, piece in rules[run.params.paths[index]].cut(np.asarray(leaf), 0, 1):
            tensors[part.name] = np.ascontiguousarray(piece).astype(ml_dtypes.bfloat16)
    if run.config.tokens is not None:
        tensors[TOKENS] = np.array(run.config.tokens, np.int64) - np.arange(len(run.config.tokens))
    save_hf(folder, tensors.items())
    own = {
        "architectures": [ARCHITECTURE],
        "sliding_window": run.written.tokens.shape[1],
    }  # the longest context in training
    write_json(folder / "config.json", config_json(run.config.layer, "bfloat16") | own)
    first, second = judge(run)
    summary = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "steps": run.step,
        "tokens": run.step * run.settings.batch * run.written.tokens.shape[1],
        "written_tokens": int(run.written.tokens.size),
        "parameters": sum(leaf.size for leaf in run.leaves),
        "agrees_one_ahead": first,
        "agrees_two_ahead": second,
        "losses": read_losses(Path(run.settings.out_dir) / "log.jsonl"),
        "settings": asdict(run.settings),
    }
    write_json(folder / "training.json", summary)


def read_losses(path: Path) -> list[list[float]]:
    """Returns [steps done, mean loss since the previous line] of each line of the log."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [[line["step"], line["loss"]] for line in lines]


# Settings of a head's training: one TOML file with [target], [head] and [optimiser].

TABLES = ("target", "head", "optimiser")


@dataclass(frozen=True, slots=True)
class HeadTrainSettings:
    target: TargetSettings
    head: HeadSettings
    optimiser: OptimiserSettings


def read_tables(path: Path) -> dict[str, Any]:
    """Reads a TOML file. Raises ConfigError if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error


def read_head_settings(path: Path) -> HeadTrainSettings | None:
    """Returns the settings, or None if the file describes a model. Raises ConfigError, FlagError for unknown or missing
    keys."""
    tables = read_tables(path)
    if "head" not in tables:
        return None
    unknown = sorted(tables.keys() - set(TABLES))
    if unknown:
        raise FlagError(f"unknown table {unknown[0]} in {path}; beside a head there are {', '.join(TABLES)}")
    found = read_table(TargetSettings, "target", tables.get("target", {}))
    return HeadTrainSettings(
        replace(found, temperatures=tuple(found.temperatures)),
        read_table(HeadSettings, "head", tables["head"]),
        read_table(OptimiserSettings, "optimiser", tables.get("optimiser", {})),
    )
