"""Distillation: a teacher model generates the training text, and its next-token distributions are the targets."""

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
from jdisagg.training.step import Leaves, SplitModel, TrainStep, logits_of, new_network, updated


@dataclass(frozen=True, slots=True)
class TeacherSettings:
    """The teacher and the text that it generates: answers of `answer_tokens` tokens after `prompt_tokens` of the
    corpus. The answers use the temperatures in turn."""

    folder: str
    answers: int
    answer_tokens: int
    prompt_tokens: int
    temperatures: tuple[float, ...] = (0.0, 0.7)
    batch: int = 64  # answers generated at once


@dataclass(frozen=True)
class TeacherModel:
    settings: TeacherSettings
    config: ModelConfig
    network: SplitModel


def open_teacher(settings: TeacherSettings, config: ModelConfig) -> TeacherModel:
    """Loads a teacher for a model of this configuration. Raises CheckpointError, ConfigError if the vocabularies
    differ."""
    folder = Path(settings.folder)
    found = read_sharing_vocabulary(folder, config.vocab_size, f"teacher.folder = {folder}")
    if found.latent or found.sinks or any(found.layer_windows) or found.attention_soft_cap:
        raise ConfigError(f"the teacher in {folder} is a {found.family}: only models of plain attention teach here")
    return TeacherModel(settings, found, _read(folder, found))


def pupil_of(teacher: TeacherModel, config: ModelConfig, seed: int) -> SplitModel:
    """Returns the initial student: the teacher's first layers if the configurations match otherwise, else random
    weights."""
    cut = replace(teacher.config, num_layers=config.num_layers)
    if config.num_layers <= teacher.config.num_layers and cut == config:
        return _read(Path(teacher.settings.folder), config)
    return new_network(config, seed)


def _read(folder: Path, config: ModelConfig) -> SplitModel:
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,))
    source = open_source(folder, "hf", config, 0)
    params = load_stage(source, StageSpec(config, range(config.num_layers), mesh, jnp.float32, out_first=False))
    return SplitModel(params.leaves, params.merge)


# Generation of the training text.


def answers_of(teacher: TeacherModel, stream: np.ndarray, seed: int) -> np.ndarray:
    """Returns u16[N]: the generated answers concatenated, each after its prompt."""
    settings, written = teacher.settings, list[np.ndarray]()
    rng = np.random.default_rng([seed, 1])
    for number in range(0, settings.answers, settings.batch):
        starts = rng.integers(0, len(stream) - settings.prompt_tokens, settings.batch)
        prompts = stream[starts[:, None] + np.arange(settings.prompt_tokens)].astype(np.int32)
        temperature = settings.temperatures[number // settings.batch % len(settings.temperatures)]
        key = jax.random.key(number + seed)
        written.append(np.asarray(_generate(teacher, jnp.asarray(prompts), temperature, key)))
    return np.concatenate(written)[: settings.answers].reshape(-1).astype(np.uint16)


def _generate(teacher: TeacherModel, prompts: Array, temperature: float, key: Array) -> Array:
    """Generates answers: i32[B, prompt + answer]."""
    length = prompts.shape[1] + teacher.settings.answer_tokens
    config, batch = teacher.config, prompts.shape[0]
    shape = (batch, length, config.num_kv_heads, config.head_dim)

    def generate(leaves: Leaves, prompts: Array, temperature: Array, key: Array) -> Array:
        padded = jnp.pad(prompts, ((0, 0), (0, length - prompts.shape[1])))

        def generate_one(carry: tuple[list[tuple[Array, Array]], Array], position: Array) -> tuple[Any, Array]:
            cache, next_token = [*carry[0]], carry[1]
            token = jnp.where(position < prompts.shape[1], padded[:, position], next_token)
            model = teacher.network.merge(leaves)
            positions = jnp.full((batch, 1), position)
            x = model.run_layers(model.embed_tokens(token[:, None]), positions, attending(cached(cache, position)))
            logits = model.logits(x)[:, 0]
            sampled = jax.random.categorical(jax.random.fold_in(key, position), logits / jnp.maximum(temperature, 1e-3))
            next_token = jnp.where(temperature > 0, sampled, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
            return (cache, next_token), token

        empty = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers)]
        start = empty, jnp.zeros(batch, jnp.int32)
        return jax.lax.scan(generate_one, start, jnp.arange(length))[1].T

    return jax.jit(generate)(teacher.network.leaves, prompts, jnp.float32(temperature), key)


def cached(cache: list[tuple[Array, Array]], position: Array) -> Attend:
    """Returns attention of one token per row over the earlier ones; `cache` holds keys and values f32[B, S, Hkv, D] per
    layer."""

    def attend(layer: int, q: Array | LatentQueries, k: Array, v: Array | None, sinks: Array | None = None) -> Array:
        assert not isinstance(q, LatentQueries) and v is not None and sinks is None, "teachers are plain"
        start = (0, position, 0, 0)
        keys, values = (jax.lax.dynamic_update_slice(*each, start) for each in zip(cache[layer], (k, v), strict=True))
        cache[layer] = keys, values
        group = q.shape[2] // k.shape[2]
        by_head = q[:, 0].reshape(q.shape[0], k.shape[2], group, -1)
        scores = jnp.einsum("bhgd,bshd->bhgs", by_head, keys) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.arange(keys.shape[1]) <= position, scores, -jnp.inf)
        mixed = jnp.einsum("bhgs,bshd->bhgd", jax.nn.softmax(scores, axis=-1), values)
        return mixed.reshape(q.shape)

    return attend


# The distillation loss.


def make_lesson(network: SplitModel, teacher: TeacherModel, optimiser: optax.GradientTransformation) -> TrainStep:
    """Returns a training step like `step.make_step` with the KL divergence from the teacher in nats as loss (Hinton et
    al. 2015, at temperature 1)."""
    teacher_network = teacher.network

    def step(leaves: Leaves, state: optax.OptState, tokens: Array, teacher_leaves: Leaves) -> tuple:
        teacher_log_probs = jax.nn.log_softmax(logits_of(teacher_network.merge(teacher_leaves), tokens[:, :-1]))

        def loss_of(leaves: Leaves) -> Array:
            student_log_probs = jax.nn.log_softmax(logits_of(network.merge(leaves), tokens[:, :-1]))
            return jnp.sum(jnp.exp(teacher_log_probs) * (teacher_log_probs - student_log_probs), axis=-1).mean()

        loss, gradients = jax.value_and_grad(loss_of)(leaves)
        return (
            *updated(optimiser, leaves, state, gradients),
            loss,
            jnp.sqrt(sum(jnp.vdot(part, part) for part in gradients)),
        )

    run = jax.jit(step, donate_argnums=(0, 1))
    return lambda leaves, state, tokens: run(leaves, state, tokens, teacher_network.leaves)


def agreement(network: SplitModel, leaves: Leaves, teacher: TeacherModel, batches: Sequence[Array]) -> float:
    """Returns the share of positions where both models have the same greedy token."""

    @jax.jit
    def alike(leaves: Leaves, teacher_leaves: Leaves, tokens: Array) -> Array:
        student_tokens = jnp.argmax(logits_of(network.merge(leaves), tokens), axis=-1)
        return (student_tokens == jnp.argmax(logits_of(teacher.network.merge(teacher_leaves), tokens), axis=-1)).mean()

    return float(np.mean([alike(leaves, teacher.network.leaves, tokens) for tokens in batches]))
