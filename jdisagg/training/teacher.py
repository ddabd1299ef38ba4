"""A model that another learns from: it writes what the other reads, and says how likely each next token was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from jdisagg.core.errors import ConfigError
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.checkpoint import open_source, read_sharing_vocabulary
from jdisagg.model.latent_attention import LatentQueries
from jdisagg.model.network import Attend, attending
from jdisagg.model.params import AXIS, StageSpec, load_stage
from jdisagg.training.step import Leaves, Network, TrainStep, logits_of, new_network, updated


@dataclass(frozen=True, slots=True)
class TeacherSettings:
    """Who teaches, and how much it writes: answers of `answer_tokens` tokens each, begun with `prompt_tokens` of the
    corpus, drawn at these temperatures in turn."""

    folder: str
    answers: int
    answer_tokens: int
    prompt_tokens: int
    temperatures: tuple[float, ...] = (0.0, 0.7)
    batch: int = 64  # answers written at once


@dataclass(frozen=True)
class Teacher:
    settings: TeacherSettings
    config: ModelConfig
    network: Network


def open_teacher(settings: TeacherSettings, config: ModelConfig) -> Teacher:
    """For a model of these numbers. Raises CheckpointError, ConfigError where it has other tokens."""
    folder = Path(settings.folder)
    found = read_sharing_vocabulary(folder, config.vocab_size, f"teacher.folder = {folder}")
    if found.latent or found.sinks or any(found.layer_windows) or found.attention_soft_cap:
        raise ConfigError(f"the teacher in {folder} is a {found.family}: only models of plain attention teach here")
    return Teacher(settings, found, _read(folder, found))


def pupil_of(teacher: Teacher, config: ModelConfig, seed: int) -> Network:
    """What begins to learn: the teacher's first layers between its tables where it is cut from the same cloth, else a
    network that knows nothing."""
    cut = replace(teacher.config, num_layers=config.num_layers)
    if config.num_layers <= teacher.config.num_layers and cut == config:
        return _read(Path(teacher.settings.folder), config)
    return new_network(config, seed)


def _read(folder: Path, config: ModelConfig) -> Network:
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,))
    source = open_source(folder, "hf", config, 0)
    params = load_stage(source, StageSpec(config, range(config.num_layers), mesh, jnp.float32, out_first=False))
    return Network(params.leaves, params.merge)


# ------------------------------------------------------------ what it writes


def answers_of(teacher: Teacher, stream: np.ndarray, seed: int) -> np.ndarray:
    """u16[N]: its answers one behind the other, each behind the prompt that it was asked with."""
    settings, written = teacher.settings, list[np.ndarray]()
    rng = np.random.default_rng([seed, 1])
    for number in range(0, settings.answers, settings.batch):
        starts = rng.integers(0, len(stream) - settings.prompt_tokens, settings.batch)
        prompts = stream[starts[:, None] + np.arange(settings.prompt_tokens)].astype(np.int32)
        temperature = settings.temperatures[number // settings.batch % len(settings.temperatures)]
        key = jax.random.key(number + seed)
        written.append(np.asarray(_written(teacher, jnp.asarray(prompts), temperature, key)))
    return np.concatenate(written)[: settings.answers].reshape(-1).astype(np.uint16)


def _written(teacher: Teacher, prompts: Array, temperature: float, key: Array) -> Array:
    """i32[B, prompt + answer]."""
    length = prompts.shape[1] + teacher.settings.answer_tokens
    config, batch = teacher.config, prompts.shape[0]
    shape = (batch, length, config.num_kv_heads, config.head_dim)

    def write(leaves: Leaves, prompts: Array, temperature: Array, key: Array) -> Array:
        asked = jnp.pad(prompts, ((0, 0), (0, length - prompts.shape[1])))

        def one(carry: tuple[list[tuple[Array, Array]], Array], place: Array) -> tuple[Any, Array]:
            kept, drawn = [*carry[0]], carry[1]
            token = jnp.where(place < prompts.shape[1], asked[:, place], drawn)
            model = teacher.network.merge(leaves)
            positions = jnp.full((batch, 1), place)
            x = model.run_layers(model.embed_tokens(token[:, None]), positions, attending(cached(kept, place)))
            logits = model.logits(x)[:, 0]
            hot = jax.random.categorical(jax.random.fold_in(key, place), logits / jnp.maximum(temperature, 1e-3))
            drawn = jnp.where(temperature > 0, hot, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
            return (kept, drawn), token

        empty = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers)]
        start = empty, jnp.zeros(batch, jnp.int32)
        return jax.lax.scan(one, start, jnp.arange(length))[1].T

    return jax.jit(write)(teacher.network.leaves, prompts, jnp.float32(temperature), key)


def cached(kept: list[tuple[Array, Array]], place: Array) -> Attend:
    """Attention of one token a row over those before it, whose keys and values, f32[B, S, Hkv, D], are `kept`."""

    def attend(layer: int, q: Array | LatentQueries, k: Array, v: Array | None, sinks: Array | None = None) -> Array:
        assert not isinstance(q, LatentQueries) and v is not None and sinks is None, "teachers are plain"
        places = (0, place, 0, 0)
        keys, values = (jax.lax.dynamic_update_slice(*each, places) for each in zip(kept[layer], (k, v), strict=True))
        kept[layer] = keys, values
        group = q.shape[2] // k.shape[2]
        by_head = q[:, 0].reshape(q.shape[0], k.shape[2], group, -1)
        scores = jnp.einsum("bhgd,bshd->bhgs", by_head, keys) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.arange(keys.shape[1]) <= place, scores, -jnp.inf)
        mixed = jnp.einsum("bhgs,bshd->bhgd", jax.nn.softmax(scores, axis=-1), values)
        return mixed.reshape(q.shape)

    return attend


# ------------------------------------------------------------ what is learnt


def make_lesson(network: Network, teacher: Teacher, optimiser: optax.GradientTransformation) -> TrainStep:
    """As `step.make_step`; the loss is how far its distribution of each next token is from the teacher's, in nats
    (Hinton et al. 2015, at temperature 1)."""
    knowing = teacher.network

    def step(leaves: Leaves, state: optax.OptState, tokens: Array, told: Leaves) -> tuple:
        likely = jax.nn.log_softmax(logits_of(knowing.merge(told), tokens[:, :-1]))

        def loss_of(leaves: Leaves) -> Array:
            guessed = jax.nn.log_softmax(logits_of(network.merge(leaves), tokens[:, :-1]))
            return jnp.sum(jnp.exp(likely) * (likely - guessed), axis=-1).mean()

        loss, gradients = jax.value_and_grad(loss_of)(leaves)
        return (
            *updated(optimiser, leaves, state, gradients),
            loss,
            jnp.sqrt(sum(jnp.vdot(part, part) for part in gradients)),
        )

    run = jax.jit(step, donate_argnums=(0, 1))
    return lambda leaves, state, tokens: run(leaves, state, tokens, knowing.leaves)


def agreement(network: Network, leaves: Leaves, teacher: Teacher, batches: Sequence[Array]) -> float:
    """Share of places at which both think the same token likeliest."""

    @jax.jit
    def alike(leaves: Leaves, told: Leaves, tokens: Array) -> Array:
        mine = jnp.argmax(logits_of(network.merge(leaves), tokens), axis=-1)
        return (mine == jnp.argmax(logits_of(teacher.network.merge(told), tokens), axis=-1)).mean()

    return float(np.mean([alike(leaves, teacher.network.leaves, tokens) for tokens in batches]))
