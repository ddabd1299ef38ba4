"""One training run from corpus to exported model, resumable at any step with the same losses."""

from __future__ import annotations

import datetime
import importlib
import json
import logging
import math
import platform
import time
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import Array
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from jdisagg.core.errors import ConfigError, FlagError, UnsupportedModel
from jdisagg.core.model_config import ModelConfig
from jdisagg.model.export import checkpoint_tensors, config_json, save_hf, write_json
from jdisagg.model.hf_config import parse_config
from jdisagg.model.network import Stage, forward
from jdisagg.training.data import (
    CHAT_END,
    CHAT_START,
    CHAT_TEMPLATE,
    END_OF_TEXT,
    PAD,
    SPECIALS,
    CorpusFiles,
    SourceFile,
    TrainingPhase,
    batch_at,
    make_tokenizer,
    token_stream,
    tokens_before,
    total_steps,
)
from jdisagg.training.step import (
    Leaves,
    OptimiserSettings,
    SplitModel,
    TrainStep,
    make_optimiser,
    make_step,
    new_network,
    token_losses,
)
from jdisagg.training.teacher import TeacherSettings, answers_of, make_lesson, open_teacher, pupil_of

# Evaluation on held-out files in bits per byte of text, which does not depend on the tokenizer.

Meter = Callable[[Leaves, np.ndarray, np.ndarray], Array]


@dataclass(frozen=True, slots=True)
class EvaluationWindows:
    """Held-out text cut at document boundaries and every `length` tokens; each token is a target exactly once."""

    tokens: np.ndarray  # i32[N, length + 1], the tail padded with <|endoftext|>
    counted: np.ndarray  # bool[N, length], False where padded
    text_bytes: int  # bytes of all counted targets


def cut_windows(documents: tuple[SourceFile, ...], tokenizer: Tokenizer, length: int) -> EvaluationWindows:
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    sizes = token_bytes(tokenizer)
    rows, counts, text_bytes = [], [], 0
    for document in documents:
        ids = [end_of_text, *tokenizer.encode(document.text).ids]
        text_bytes += int(sizes[ids].sum())
        for start in range(0, len(ids) - 1, length):
            row = ids[start : start + length + 1]
            counts.append(len(row) - 1)
            rows.append(row + [end_of_text] * (length + 1 - len(row)))
    return EvaluationWindows(np.asarray(rows, np.int32), np.arange(length) < np.asarray(counts)[:, None], text_bytes)


def thinned(windows: EvaluationWindows, count: int, tokenizer: Tokenizer) -> EvaluationWindows:
    """Returns about `count` windows spread evenly over all of them."""
    chosen = np.unique(np.linspace(0, len(windows.tokens) - 1, count).astype(int))
    tokens, counted = windows.tokens[chosen], windows.counted[chosen]
    sizes = token_bytes(tokenizer)
    return EvaluationWindows(tokens, counted, int((sizes[tokens[:, 1:]] * counted).sum()))


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Returns i64[V]: the bytes of text of each token. Byte-level BPE writes a byte as one character; special tokens
    count 0."""
    texts = [tokenizer.id_to_token(index) or "" for index in range(tokenizer.get_vocab_size())]
    return np.asarray([0 if text in SPECIALS else len(text) for text in texts])


def make_meter(network: SplitModel) -> Meter:
    """Returns a jitted (leaves, i32[B, T + 1], bool[B, T]) -> f32[]: the nats of all counted targets. Create it once,
    because it compiles."""

    def nats(leaves: Leaves, tokens: Array, counted: Array) -> Array:
        return (token_losses(network.merge(leaves), tokens) * counted.astype(jnp.float32)).sum()

    return jax.jit(nats)


def bits_per_byte(meter: Meter, leaves: Leaves, windows: EvaluationWindows, batch: int) -> float:
    """Returns the model's bits per byte of the windows, measured in batches of `batch` windows."""
    total = 0.0
    for start in range(0, len(windows.tokens), batch):
        rows = slice(start, start + batch)
        tokens, counted = _padded(windows.tokens[rows], batch), _padded(windows.counted[rows], batch)
        total += float(meter(leaves, tokens, counted))
    return total / math.log(2) / windows.text_bytes


def _padded(rows: np.ndarray, batch: int) -> np.ndarray:
    """Pads with zero rows so that the last batch has the shape of the others."""
    return np.concatenate([rows, np.zeros((batch - len(rows), *rows.shape[1:]), rows.dtype)])


# Settings of a training run: one TOML file, read into frozen dataclasses; errors name unknown and missing keys.

Table = TypeVar("Table")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The folders of a run, and how often it reports and saves, in steps."""

    out_dir: str
    export_dir: str
    seed: int
    save_every: int
    log_every: int
    eval_every: int
    eval_windows: int  # held-out windows of 512 tokens in intermediate evaluations; the final one uses every file
    lesson_share: float  # share of the documented functions added again as chats


@dataclass(frozen=True, slots=True)
class TrainSettings:
    run: RunSettings
    model: ModelConfig
    optimiser: OptimiserSettings
    phases: tuple[TrainingPhase, ...]
    teacher: TeacherSettings | None = None  # the source of the training text instead of the corpus


def read_settings(path: Path) -> TrainSettings:
    """Reads the settings. Raises `ConfigError` if the file cannot be read, `FlagError` for unknown or missing keys."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    unknown = sorted(tables.keys() - {"run", "model", "optimiser", "phase", "teacher"})
    if unknown:
        raise FlagError(f"unknown table {unknown[0]} in {path}; there are run, model, optimiser, phase and teacher")
    phases = tuple(read_table(TrainingPhase, "phase", phase) for phase in tables.get("phase", []))
    if not phases:
        raise FlagError(f"{path} has no [[phase]]: nothing to train")
    return TrainSettings(
        read_table(RunSettings, "run", tables.get("run", {})),
        read_table(ModelConfig, "model", {"family": "llama", **tables.get("model", {})}),
        read_table(OptimiserSettings, "optimiser", tables.get("optimiser", {})),
        phases,
        _teacher(tables["teacher"]) if "teacher" in tables else None,
    )


def _teacher(given: dict[str, Any]) -> TeacherSettings:
    found = read_table(TeacherSettings, "teacher", given)
    return replace(found, temperatures=tuple(found.temperatures))


def override(settings: TrainSettings, **given: Any) -> TrainSettings:
    """Returns the settings with the run fields replaced whose given value is not None."""
    return replace(settings, run=replace(settings.run, **{k: v for k, v in given.items() if v is not None}))


def read_table(kind: type[Table], name: str, given: dict[str, Any]) -> Table:
    """Returns the dataclass of a TOML table. Raises FlagError for unknown or missing keys."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        raise FlagError(f"unknown key {name}.{unknown[0]}; known are {', '.join(known)}")
    needed = {key for key, field in known.items() if field.default is MISSING}
    missing = sorted(needed - given.keys())
    if missing:
        raise FlagError(f"missing key {name}.{missing[0]}")
    return kind(**given)


# Export as a Hugging Face folder in bf16, with tokenizer, chat template and sampling defaults.


def export(folder: Path, model: Stage, tokenizer: Tokenizer) -> None:
    """Writes a whole (tp = 1) model to `folder`. Raises UnsupportedModel if config.json cannot express its
    configuration."""
    config = model_config_json(model.config, tokenizer)
    if parse_config(config) != model.config:
        raise UnsupportedModel(f"a {model.config.family} checkpoint cannot say all of {model.config}")
    folder.mkdir(parents=True, exist_ok=True)
    save_hf(folder, ((name, tensor.astype(ml_dtypes.bfloat16)) for name, tensor in checkpoint_tensors(model)))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer_config.json", tokenizer_config(model.config, tokenizer))
    write_json(folder / "generation_config.json", generation_config(tokenizer))


def rounded(leaves: Leaves) -> Leaves:
    """Returns the leaves as read back from the exported folder: rounded to bf16."""
    return [leaf.astype(jnp.bfloat16).astype(leaf.dtype) for leaf in leaves]


def model_config_json(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    pad = tokenizer.token_to_id(PAD)
    return config_json(config, "bfloat16", bos_token_id=end_of_text, eos_token_id=end_of_text, pad_token_id=pad)


def tokenizer_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "additional_special_tokens": [CHAT_START, CHAT_END],
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(text)): {"content": text, **flags} for text in SPECIALS
        },
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position,
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    return {
        "bos_token_id": end_of_text,
        "eos_token_id": [end_of_text, tokenizer.token_to_id(CHAT_END)],
        "pad_token_id": tokenizer.token_to_id(PAD),
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
    }


# Sample completions by a full forward pass per token, for inspection only.

PROMPTS = (
    "def fibonacci(n):",
    "class Stack:\n    def __init__(self",
    "import os\n\ndef ",
    f"{CHAT_START}user\nWrite the function is_prime: Return True if n is a prime number.{CHAT_END}\n"
    f"{CHAT_START}assistant\n",
)


@dataclass(frozen=True, slots=True)
class CompletionWriter:
    """Generates completions of up to `room` tokens with the prompt; compiled once."""

    network: SplitModel
    leaves: Leaves
    tokenizer: Tokenizer
    room: int
    next_token: Callable[[Leaves, Array, int, float, Array], Array]

    def complete(self, prompt: str, new_tokens: int, temperature: float, seed: int) -> str:
        """Returns the completion of `prompt` up to an end token; temperature 0 is greedy."""
        ids = self.tokenizer.encode(prompt).ids
        ends = {self.tokenizer.token_to_id(END_OF_TEXT), self.tokenizer.token_to_id(CHAT_END)}
        buffer = jnp.zeros((1, self.room), jnp.int32).at[0, : len(ids)].set(jnp.asarray(ids))
        written: list[int] = []
        for position in range(len(ids), min(self.room, len(ids) + new_tokens)):
            token = int(self.next_token(self.leaves, buffer, position - 1, temperature, jax.random.key(seed)))
            if token in ends:
                break
            written.append(token)
            buffer = buffer.at[0, position].set(token)
        return self.tokenizer.decode(written, skip_special_tokens=False)


def new_writer(network: SplitModel, leaves: Leaves, tokenizer: Tokenizer, room: int) -> CompletionWriter:
    @jax.jit
    def next_token(leaves: Leaves, buffer: Array, last: int, temperature: float, key: Array) -> Array:
        logits = forward(network.merge(leaves), buffer)[0, last]
        drawn = jax.random.categorical(jax.random.fold_in(key, last), logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature == 0, jnp.argmax(logits), drawn)

    return CompletionWriter(network, leaves, tokenizer, room, next_token)


def sample_page(writer: CompletionWriter) -> str:
    """Returns every prompt completed greedily and at temperature 0.6, as readable text."""
    parts = []
    for prompt in PROMPTS:
        for temperature in (0.0, 0.6):
            text = writer.complete(prompt, writer.room, temperature, seed=0)
            parts.append(f"----- temperature {temperature} -----\n{prompt}{text}\n")
    return "\n".join(parts)


# Progress output: a bar on a terminal, plain lines elsewhere, and one JSON line per report for the plot.


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """The progress after `step` steps. `held_out` is bits per byte, if measured."""

    step: int
    tokens: int
    loss: float  # nats per token, mean over the steps since the last report
    gradient_norm: float
    tokens_per_s: float
    held_out: float | None = None

    def line(self) -> str:
        held_out = "" if self.held_out is None else f"  held-out {self.held_out:.3f} bits/byte"
        return f"loss {self.loss:.3f}  norm {self.gradient_norm:.2f}  {self.tokens_per_s:,.0f} tokens/s{held_out}"


class ProgressLog:
    """The file `log.jsonl` and the progress bar; lines after `resumed_at` belong to lost work and are dropped."""

    def __init__(self, path: Path, total_steps: int, resumed_at: int) -> None:
        self.reports = [report for report in read_reports(path) if report.step <= resumed_at]
        path.write_text("".join(json.dumps(asdict(report)) + "\n" for report in self.reports))
        self._path, self._total = path, total_steps
        self._console = Console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
        self._task = self._bar.add_task("training", total=total_steps, completed=resumed_at)
        if self._console.is_terminal:
            self._bar.start()

    def advance(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def add(self, report: TrainingReport) -> None:
        self.reports.append(report)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(report)) + "\n")
        if self._console.is_terminal:
            self._bar.update(self._task, description=report.line())
        else:
            print(f"step {report.step}/{self._total}  {report.line()}", flush=True)

    def close(self) -> None:
        self._bar.stop()


def read_reports(path: Path) -> list[TrainingReport]:
    """Returns every report of a run so far; none if it has not started."""
    return [TrainingReport(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


# Orbax checkpoints of a run: weights and optimiser state as flat lists; the newest two are kept.

KEPT = 2


class CheckpointStore:
    def __init__(self, folder: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True, enable_async_checkpointing=False)
        self._store = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, step: int, leaves: Leaves, state: optax.OptState) -> None:
        """Writes the state after `step` steps, from which the run can resume."""
        tree = {"leaves": leaves, "optimiser": jax.tree.leaves(state)}
        self._store.save(step, args=ocp.args.StandardSave(tree), force=True)
        self._store.wait_until_finished()

    def latest_step(self) -> int | None:
        return self._store.latest_step()

    def restore(self, step: int, leaves: Leaves, state: optax.OptState) -> tuple[Leaves, optax.OptState]:
        """Reads `step` into the shapes of `leaves` and `state`, whose values are not used."""
        parts, tree = jax.tree.flatten(state)
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"leaves": leaves, "optimiser": parts})
        read = self._store.restore(step, args=ocp.args.StandardRestore(shapes))
        return list(read["leaves"]), jax.tree.unflatten(tree, read["optimiser"])

    def close(self) -> None:
        self._store.close()


CHECK_LENGTH, CHECK_BATCH = 512, 4


@dataclass
class TrainingRun:
    """The state of a training run: its data, its compiled functions and its progress (`step` steps done)."""

    settings: TrainSettings
    tokenizer: Tokenizer
    stream: np.ndarray  # u16[N]
    network: SplitModel
    train_step: TrainStep
    meter: Meter
    checkpoints: CheckpointStore
    step: int
    leaves: Leaves
    state: optax.OptState


def open_run(settings: TrainSettings, corpus: CorpusFiles, *, resume: bool) -> TrainingRun:
    """Opens a run: at its newest checkpoint if `resume` and there is one, else at step 0."""
    folder = Path(settings.run.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = CheckpointStore(folder / "checkpoints")
    checkpoint_step = checkpoints.latest_step()
    if checkpoint_step is not None and not resume:
        raise ConfigError(f"{folder} already holds a run of {checkpoint_step} steps; resume it or name another out_dir")
    tokenizer = run_tokenizer(settings, corpus, folder / "tokenizer.json")
    stream = token_stream(corpus.training, tokenizer, settings.run.lesson_share, settings.run.seed)
    teacher = open_teacher(settings.teacher, settings.model) if settings.teacher else None
    seed = settings.run.seed
    network = pupil_of(teacher, settings.model, seed) if teacher else new_network(settings.model, seed)
    optimiser = make_optimiser(settings.optimiser, total_steps(settings.phases))
    leaves, state = network.leaves, optimiser.init(network.leaves)
    if checkpoint_step is not None:
        leaves, state = checkpoints.restore(checkpoint_step, leaves, state)
    meter, train_step = make_meter(network), make_step(network, optimiser)
    if teacher is not None:
        train_step, stream = make_lesson(network, teacher, optimiser), answers_of(teacher, stream, seed)
    return TrainingRun(
        settings, tokenizer, stream, network, train_step, meter, checkpoints, checkpoint_step or 0, leaves, state
    )


def run_tokenizer(settings: TrainSettings, corpus: CorpusFiles, path: Path) -> Tokenizer:
    """Returns the tokenizer: the teacher's, or one trained at the first start and then read back."""
    if settings.teacher is not None:
        return Tokenizer.from_file(str(Path(settings.teacher.folder) / "tokenizer.json"))
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = make_tokenizer((document.text for document in corpus.training), settings.model.vocab_size)
    tokenizer.save(str(path))
    return tokenizer


def train(run: TrainingRun, corpus: CorpusFiles, stop_at: int | None = None) -> list[TrainingReport]:
    """Trains to the last step or to `stop_at`, with checkpoints and reports; returns all reports of the run."""
    every, last = run.settings.run, total_steps(run.settings.phases)
    last = last if stop_at is None else min(last, stop_at)
    windows = cut_windows(corpus.held_out, run.tokenizer, min(CHECK_LENGTH, run.settings.model.max_position))
    check = thinned(windows, every.eval_windows, run.tokenizer)
    log = ProgressLog(Path(every.out_dir) / "log.jsonl", total_steps(run.settings.phases), run.step)
    try:
        while run.step < last:
            done = min(last, _next_multiple(run.step, every.log_every))
            log.add(_train_until(run, done, log, check))
    finally:
        log.close()
    if run.checkpoints.latest_step() != run.step:
        run.checkpoints.save(run.step, run.leaves, run.state)
    return log.reports


def _next_multiple(step: int, every: int) -> int:
    return (step // every + 1) * every


def _train_until(run: TrainingRun, done: int, log: ProgressLog, check: EvaluationWindows) -> TrainingReport:
    began_s, began_tokens = time.perf_counter(), tokens_before(run.settings.phases, run.step)
    losses, norm = [], 0.0
    while run.step < done:
        loss, norm = one_step(run)
        losses.append(loss)
        log.advance(run.step)
        if run.step % run.settings.run.save_every == 0:
            run.checkpoints.save(run.step, run.leaves, run.state)
    tokens = tokens_before(run.settings.phases, run.step)
    speed = (tokens - began_tokens) / (time.perf_counter() - began_s)
    held_out = None
    if run.step % run.settings.run.eval_every == 0:
        held_out = bits_per_byte(run.meter, run.leaves, check, CHECK_BATCH)
    return TrainingReport(run.step, tokens, float(np.mean(losses)), norm, speed, held_out)


def one_step(run: TrainingRun) -> tuple[float, float]:
    """Trains one step in place; returns the loss in nats per token and the gradient norm."""
    tokens = batch_at(run.stream, run.settings.phases, run.settings.run.seed, run.step)
    run.leaves, run.state, loss, norm = run.train_step(run.leaves, run.state, jax.numpy.asarray(tokens))
    run.step += 1
    return float(loss), float(norm)


# Results of a run: the exported folder, its held-out measure, the loss plot and sample completions.

SAMPLE_TOKENS = 160

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingSummary:
    """`training.json` beside the exported weights: the data, the settings and the quality of the run."""

    date: str
    steps: int
    tokens: int
    parameters: int
    held_out_bits_per_byte: float  # of the exported bf16 weights, over every held-out file
    held_out_files: int
    held_out_bytes: int
    training_files: int
    training_bytes: int
    training_tokens: int  # length of one epoch, chat lessons included
    last_training_loss: float  # nats per token
    python_version: str


def finish(run: TrainingRun, corpus: CorpusFiles, reports: list[TrainingReport]) -> TrainingSummary:
    """Exports the current state of the run, and writes plot and samples."""
    leaves = rounded(run.leaves)
    windows = cut_windows(corpus.held_out, run.tokenizer, run.settings.model.max_position)
    summary = TrainingSummary(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        steps=run.step,
        tokens=tokens_before(run.settings.phases, run.step),
        parameters=sum(leaf.size for leaf in leaves),
        held_out_bits_per_byte=round(bits_per_byte(run.meter, leaves, windows, batch=1), 4),
        held_out_files=len(corpus.held_out),
        held_out_bytes=windows.text_bytes,
        training_files=len(corpus.training),
        training_bytes=sum(len(document.text.encode()) for document in corpus.training),
        training_tokens=len(run.stream),
        last_training_loss=round(reports[-1].loss, 4),
        python_version=platform.python_version(),
    )
    folder = Path(run.settings.run.export_dir)
    export(folder, run.network.merge(leaves), run.tokenizer)
    (folder / "training.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    _plot(reports, Path(run.settings.run.out_dir) / "loss.png")
    samples = sample_page(new_writer(run.network, leaves, run.tokenizer, room=SAMPLE_TOKENS))
    (Path(run.settings.run.out_dir) / "samples.txt").write_text(samples, encoding="utf-8")
    return summary


def _plot(reports: list[TrainingReport], path: Path) -> None:
    """Draws the loss plot; logs a warning if matplotlib is not installed, because the export must not fail."""
    try:
        plot = importlib.import_module("jdisagg.training.plot")
    except ModuleNotFoundError as error:
        log.warning("no %s: it needs %s: pip install matplotlib", path, error.name)
    else:
        plot.plot_losses(reports, path)
