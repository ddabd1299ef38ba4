"""Which tokens are trained on at which step: a pure function of the step number, so a resumed run sees the same."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jdisagg.core.errors import ConfigError
from jdisagg.core.model_config import ModelConfig, WeightFormat
from jdisagg.model.checkpoint import open_source, read_model
from jdisagg.model.network import Stage, attending
from jdisagg.model.params import AXIS, StageSpec, load_stage
from jdisagg.model.tokenizer import Tokenizer as ModelTokenizer
from jdisagg.training.step import Leaves
from jdisagg.training.teacher import cached

# What a model writes, and beside each token the state that its head took: what a draft head learns from.
#
# A third of the prompts are beginnings of the corpus' windows; the others the model asks itself: behind the words
# with which a chat hands the question over, a model that was taught chats writes a question (Xu et al. 2024,
# arXiv 2406.08464), and then answers it. A part is kept as soon as it is written: a run that is interrupted goes
# on there.

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
    tokenizer: ModelTokenizer


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
    return Target(settings, config, params.leaves, write, ModelTokenizer(folder))


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


# What the embedded model reads: the running Python's own library as documents, split into training and held-out
# files.
#
# The split depends on a file's relative name alone, so it never moves when other files come or go.

# Tests repeat themselves; the last two are generated tables and manual pages: none shows how Python is written.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "lib-dynload", "__pycache__", "encodings", "pydoc_data"}
)
HELD_OUT_PER_THOUSAND = 30
LESSON_BYTES = range(80, 1500)  # functions short enough to be a whole answer in one training sequence


@dataclass(frozen=True, slots=True)
class Document:
    name: str  # path relative to the library's root, with forward slashes
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    training: tuple[Document, ...]
    held_out: tuple[Document, ...]


def is_held_out(name: str) -> bool:
    """About 3 % of all names, the same ones on every machine."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_THOUSAND


def read_corpus(root: Path | None = None) -> Corpus:
    """Reads every Python source below `root` (the standard library by default), sorted by name."""
    documents = list(_documents(root or Path(sysconfig.get_paths()["stdlib"])))
    return Corpus(
        training=tuple(document for document in documents if not is_held_out(document.name)),
        held_out=tuple(document for document in documents if is_held_out(document.name)),
    )


def _documents(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few old sources are in other encodings
        if text.strip():
            yield Document(relative.as_posix(), text)


@dataclass(frozen=True, slots=True)
class Lesson:
    """A wish and the function that grants it: what teaches the model the shape of a chat."""

    wish: str
    answer: str


def lessons(document: Document) -> list[Lesson]:
    """Every short documented function of a document, asked for by the first line of its docstring."""
    try:
        tree = ast.parse(document.text)
    except SyntaxError:
        return []  # lib2to3 keeps samples of Python 2
    found = [_lesson(node, document.text) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [lesson for lesson in found if lesson is not None]


def _lesson(node: ast.FunctionDef, text: str) -> Lesson | None:
    docstring = ast.get_docstring(node)
    if not docstring or not docstring.strip():
        return None
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    answer = "\n".join(line[node.col_offset :] for line in lines) + "\n"
    if len(answer) not in LESSON_BYTES:
        return None
    return Lesson(f"Write the function {node.name}: {docstring.strip().splitlines()[0]}", answer)


# The embedded model's tokenizer: byte-level BPE, its special tokens and its chat template.

END_OF_TEXT, CHAT_START, CHAT_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIALS = (END_OF_TEXT, CHAT_START, CHAT_END, PAD)  # their ids are 0, 1, 2, 3
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns byte-level BPE (GPT-2's pre-tokeniser) from `texts`; every byte has a token, so nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def as_chat(lesson: Lesson) -> str:
    """A lesson written as CHAT_TEMPLATE writes one question and its answer."""
    return (
        f"{CHAT_START}user\n{lesson.wish}{CHAT_END}\n"
        f"{CHAT_START}assistant\n{lesson.answer}{CHAT_END}\n"
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phase:
    """A run of steps with sequences of one length. Early phases are short (cheap), the last one reaches the context."""

    steps: int
    length_tokens: int
    batch: int  # sequences a step

    @property
    def step_tokens(self) -> int:
        return self.length_tokens * self.batch


def token_stream(documents: tuple[Document, ...], tokenizer: Tokenizer, lesson_share: float, seed: int) -> np.ndarray:
    """u16[N]: the documents in a seeded order, each behind its <|endoftext|>, with chat lessons strewn in between.

    `lesson_share` is the share of all documented short functions that is told a second time as a chat.
    """
    rng = np.random.default_rng(seed)
    taught = [lesson for document in documents for lesson in lessons(document)]
    chosen = [as_chat(lesson) for lesson in taught if rng.random() < lesson_share]
    texts = [document.text for document in documents] + chosen
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch([texts[index] for index in rng.permutation(len(texts))])
    return np.concatenate([np.asarray([end_of_text, *item.ids], np.uint16) for item in encoded])


def batch_at(stream: np.ndarray, phases: tuple[Phase, ...], seed: int, step: int) -> np.ndarray:
    """i32[batch, length + 1]: the sequences of `step` (counted from 0) with their next tokens.

    Every phase goes over the stream in epochs of shuffled windows without repetition; each epoch starts its first
    window elsewhere, so the cuts between windows move.
    """
    index, first = phase_at(phases, step)
    phase = phases[index]
    windows = (len(stream) - 1 - phase.length_tokens) // phase.length_tokens
    if windows < phase.batch:
        raise ConfigError(f"{len(stream)} training tokens hold {windows} windows of {phase.length_tokens} tokens;"
                          f" a batch takes {phase.batch}")  # fmt: skip
    epoch, row = divmod(step - first, windows // phase.batch)
    rng = np.random.default_rng([seed, index, epoch])
    offset = rng.integers(phase.length_tokens)
    order = rng.permutation(windows)[row * phase.batch : (row + 1) * phase.batch]
    starts = offset + order * phase.length_tokens
    return stream[starts[:, None] + np.arange(phase.length_tokens + 1)].astype(np.int32)


def phase_at(phases: tuple[Phase, ...], step: int) -> tuple[int, int]:
    """The index of the phase that holds `step`, and that phase's first step."""
    first = 0
    for index, phase in enumerate(phases):
        if step < first + phase.steps:
            return index, first
        first += phase.steps
    raise ConfigError(f"step {step} lies behind the last phase, which ends at {first}")


def total_steps(phases: tuple[Phase, ...]) -> int:
    return sum(phase.steps for phase in phases)


def tokens_before(phases: tuple[Phase, ...], step: int) -> int:
    """Tokens trained on in the steps before `step`."""
    seen = 0
    for phase in phases:
        taken = min(step, phase.steps)
        seen, step = seen + taken * phase.step_tokens, step - taken
    return seen
