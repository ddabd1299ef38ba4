"""What a model writes, and beside each token the state that its head took: what a draft head learns from.

A third of the prompts are beginnings of the corpus' windows; the others the model asks itself: behind the words with
which a chat hands the question over, a model that was taught chats writes a question (Xu et al. 2024, arXiv
2406.08464), and then answers it. A part is kept as soon as it is written: a run that is interrupted goes on there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jdisagg.core.errors import ConfigError
from jdisagg.core.model_config import ModelConfig
from jdisagg.core.weight_format import WeightFormat
from jdisagg.model.checkpoint import open_source, read_model
from jdisagg.model.network import Stage, attending
from jdisagg.model.params import AXIS, StageSpec, load_stage
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.training.step import Leaves
from jdisagg.training.teacher import cached

CORPUS_SHARE = 3  # one part of so many begins with the corpus
QUESTION_TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """The model whose tokens are to be guessed, and how much it writes: `parts` of `batch` answers, `length_tokens`
    each with its prompt, drawn at these temperatures in turn."""

    folder: str
    parts: int
    batch: int
    length_tokens: int
    prompt_tokens: int  # of the corpus, and at most of a question
    temperatures: tuple[float, ...] = (0.0, 0.7)
    question_begin: str = ""  # what stands before a question; empty: all prompts are of the corpus
    question_end: str = ""  # and behind it
    weight_dtype: str = "dtype"  # of its matrices while it writes
    seed: int = 0


@dataclass(frozen=True)
class Target:
    settings: TargetSettings
    config: ModelConfig
    leaves: Leaves
    write: Callable[..., tuple[Array, Array]]  # compiled for each shape once
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Written:
    """Of one part: tokens i32[B, T], and the states f16[B, T, hidden] from which each next token was drawn."""

    tokens: np.ndarray
    states: np.ndarray


def open_target(settings: TargetSettings) -> Target:
    """Raises CheckpointError, ConfigError."""
    folder = Path(settings.folder)
    config = read_model(folder)
    if config.latent or config.sinks or any(config.layer_windows) or config.attention_soft_cap:
        raise ConfigError(f"target.folder = {folder} is a {config.family}: only models of plain attention teach here")
    mesh, layers = Mesh(np.array(jax.devices()[:1]), (AXIS,)), range(config.num_layers)
    weights = WeightFormat(settings.weight_dtype)
    spec = StageSpec(config, layers, mesh, jnp.float32, weights)
    params = load_stage(open_source(folder, "hf", config), spec)
    write = jax.jit(partial(_writing, params.merge, config))
    return Target(settings, config, params.leaves, write, Tokenizer(folder))


def read_or_write(target: Target, folder: Path, corpus: np.ndarray) -> list[Written]:
    """All parts, those that lie in `folder` already as they are; corpus: i32[N]."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_part(target, folder / f"part{number}.npz", number, corpus) for number in range(target.settings.parts)]


def _part(target: Target, path: Path, number: int, corpus: np.ndarray) -> Written:
    if not path.exists():
        written = write_part(target, number, corpus)
        unfinished = path.with_suffix(".new.npz")
        np.savez(unfinished, tokens=written.tokens, states=written.states)
        unfinished.rename(path)
        print(f"part {number + 1}/{target.settings.parts} is written", flush=True)
    with np.load(path) as found:
        return Written(found["tokens"], found["states"])


def write_part(target: Target, number: int, corpus: np.ndarray) -> Written:
    settings = target.settings
    rng = np.random.default_rng([settings.seed, number])
    key = jax.random.key(number + settings.seed * settings.parts)
    temperature = settings.temperatures[number % len(settings.temperatures)]
    begun = settings.batch if not settings.question_begin else -(-settings.batch // CORPUS_SHARE)
    starts = rng.integers(0, len(corpus) - settings.prompt_tokens, begun)
    prompts = [corpus[start : start + settings.prompt_tokens].tolist() for start in starts]
    prompts += _questions(target, settings.batch - begun, jax.random.fold_in(key, 0)) if begun < settings.batch else []
    return _write(target, prompts, settings.length_tokens, temperature, jax.random.fold_in(key, 1))


def _questions(target: Target, number: int, key: Array) -> list[list[int]]:
    """Prompts that end where the answer begins."""
    settings, encode = target.settings, target.tokenizer.encode
    begin, end = (encode(text, False) for text in (settings.question_begin, settings.question_end))
    room = len(begin) + settings.prompt_tokens
    asked = _write(target, [begin] * number, room, QUESTION_TEMPERATURE, key).tokens[:, len(begin) :]
    return [[*begin, *_until(row.tolist(), end[0]), *end] for row in asked]


def _until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens


def _write(target: Target, prompts: Sequence[Sequence[int]], length: int, temperature: float, key: Array) -> Written:
    """Goes on from each prompt until there are `length` tokens."""
    lengths = np.array([min(len(prompt), length) for prompt in prompts], np.int32)
    asked = np.zeros((len(prompts), length), np.int32)
    for row, prompt in enumerate(prompts):
        asked[row, : lengths[row]] = prompt[:length]
    drawn = target.write(target.leaves, asked, lengths, jnp.float32(temperature), key)
    return Written(*(np.asarray(each).swapaxes(0, 1) for each in drawn))


def _writing(
    merge: Callable[[Leaves], Stage],
    config: ModelConfig,
    leaves: Leaves,
    asked: Array,
    lengths: Array,
    temperature: Array,
    key: Array,
) -> tuple[Array, Array]:
    """(i32[T, B], f16[T, B, hidden])."""
    batch, length = asked.shape

    def one(carry: tuple[list[tuple[Array, Array]], Array], place: Array) -> tuple[Any, tuple[Array, Array]]:
        kept, drawn = [*carry[0]], carry[1]
        token = jnp.where(place < lengths, asked[:, place], drawn)
        model = merge(leaves)
        x = model.embed_tokens(token[:, None])
        x = model.run_layers(x, jnp.full((batch, 1), place), attending(cached(kept, place)))
        state = model.states(x[:, 0])
        logits = model.scores(state)
        hot = jax.random.categorical(jax.random.fold_in(key, place), logits / jnp.maximum(temperature, 1e-3))
        drawn = jnp.where(temperature > 0, hot, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
        return (kept, drawn), (token, state.astype(jnp.float16))

    shape = (batch, length, config.num_kv_heads, config.head_dim)
    empty = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers)]
    start = empty, jnp.zeros(batch, jnp.int32)
    return jax.lax.scan(one, start, jnp.arange(length))[1]
