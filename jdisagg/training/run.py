"""One training run from corpus to last checkpoint: resumable at any step with the same losses."""

import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax
from tokenizers import Tokenizer

from jdisagg.core.errors import ConfigError
from jdisagg.training.batches import batch_at, token_stream, tokens_before, total_steps
from jdisagg.training.checkpoints import Checkpoints
from jdisagg.training.corpus import Corpus
from jdisagg.training.evaluate import Meter, Windows, bits_per_byte, cut_windows, make_meter, thinned
from jdisagg.training.progress import ProgressLog, Report
from jdisagg.training.settings import TrainSettings
from jdisagg.training.step import Leaves, Network, TrainStep, make_optimiser, make_step, new_network
from jdisagg.training.teacher import answers_of, make_lesson, open_teacher, pupil_of
from jdisagg.training.tokenizer import make_tokenizer

CHECK_LENGTH, CHECK_BATCH = 512, 4


@dataclass
class Run:
    """A run taken apart: what it reads, what it computes with, and where it stands (`step` steps done)."""

    settings: TrainSettings
    tokenizer: Tokenizer
    stream: np.ndarray  # u16[N]
    network: Network
    train_step: TrainStep
    meter: Meter
    checkpoints: Checkpoints
    step: int
    leaves: Leaves
    state: optax.OptState


def open_run(settings: TrainSettings, corpus: Corpus, *, resume: bool) -> Run:
    """Prepares a run, at its newest checkpoint if `resume` and there is one, else at step 0."""
    folder = Path(settings.run.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(folder / "checkpoints")
    at = checkpoints.latest_step()
    if at is not None and not resume:
        raise ConfigError(f"{folder} already holds a run of {at} steps; resume it or name another out_dir")
    tokenizer = run_tokenizer(settings, corpus, folder / "tokenizer.json")
    stream = token_stream(corpus.training, tokenizer, settings.run.lesson_share, settings.run.seed)
    teacher = open_teacher(settings.teacher, settings.model) if settings.teacher else None
    seed = settings.run.seed
    network = pupil_of(teacher, settings.model, seed) if teacher else new_network(settings.model, seed)
    optimiser = make_optimiser(settings.optimiser, total_steps(settings.phases))
    leaves, state = network.leaves, optimiser.init(network.leaves)
    if at is not None:
        leaves, state = checkpoints.restore(at, leaves, state)
    meter, train_step = make_meter(network), make_step(network, optimiser)
    if teacher is not None:
        train_step, stream = make_lesson(network, teacher, optimiser), answers_of(teacher, stream, seed)
    return Run(settings, tokenizer, stream, network, train_step, meter, checkpoints, at or 0, leaves, state)


def run_tokenizer(settings: TrainSettings, corpus: Corpus, path: Path) -> Tokenizer:
    """The run's tokenizer: the teacher's, or made at its first start, then read back."""
    if settings.teacher is not None:
        return Tokenizer.from_file(str(Path(settings.teacher.folder) / "tokenizer.json"))
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = make_tokenizer((document.text for document in corpus.training), settings.model.vocab_size)
    tokenizer.save(str(path))
    return tokenizer


def train(run: Run, corpus: Corpus, stop_at: int | None = None) -> list[Report]:
    """Trains to the last step (or to `stop_at`), saving and reporting on the way; returns all reports of the run."""
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


def _train_until(run: Run, done: int, log: ProgressLog, check: Windows) -> Report:
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
    return Report(run.step, tokens, float(np.mean(losses)), norm, speed, held_out)


def one_step(run: Run) -> tuple[float, float]:
    """Trains one step in place; the loss in nats a token and the gradient's norm."""
    tokens = batch_at(run.stream, run.settings.phases, run.settings.run.seed, run.step)
    run.leaves, run.state, loss, norm = run.train_step(run.leaves, run.state, jax.numpy.asarray(tokens))
    run.step += 1
    return float(loss), float(norm)
