"""Trains the embedded model, or a draft model or head for speculative decoding, and exports it.

    python -m jdisagg train --config=configs/embedded_train.toml [--resume] [--export_only]
    python -m jdisagg train --config=configs/draft_smollm2.toml

The file also holds the model, the optimiser and the phases; --out_dir, --export_dir and --seed override its [run].
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from absl import flags as absl_flags
from absl import logging
from rich.console import Console

from jdisagg import command, flags
from jdisagg.core.settings import Settings
from jdisagg.named_models import EMBEDDED_FOLDER, located
from jdisagg.training.data import TargetModel, open_target, read_corpus, read_or_write
from jdisagg.training.heads import HeadTrainSettings, export_head, judge, open_head_run, read_head_settings, train_head
from jdisagg.training.run import TrainSettings, finish, open_run, override, read_reports, read_settings, train

DEFAULT = "configs/embedded_train.toml"


def declare() -> flags.FlagValues:
    values = flags.own()
    flags.define(values, seed=None)
    text = "go on from the newest checkpoint in out_dir; off: refuse a folder that has one"
    absl_flags.DEFINE_bool("resume", True, text, flag_values=values)
    absl_flags.DEFINE_bool("export_only", False, "export the newest checkpoint as it stands", flag_values=values)
    absl_flags.DEFINE_string("out_dir", None, "folder of checkpoints, log, plot and samples", flag_values=values)
    absl_flags.DEFINE_string("export_dir", None, "Hugging Face folder written at the end", flag_values=values)
    return values


def train_and_export(settings: TrainSettings, resume: bool, export_only: bool) -> str:
    """Runs the whole training; returns the text to print at its end."""
    corpus = read_corpus()
    run = open_run(settings, corpus, resume=resume)
    reports = read_reports(Path(settings.run.out_dir) / "log.jsonl") if export_only else train(run, corpus)
    summary = finish(run, corpus, reports)
    return (
        f"held-out bits per byte {summary.held_out_bits_per_byte:.4f} over {summary.held_out_files} files"
        f" after {summary.tokens:,} tokens; exported to {settings.run.export_dir},"
        f" plot and samples in {settings.run.out_dir}"
    )


def train_and_export_head(settings: HeadTrainSettings, export_only: bool) -> str:
    """Runs a head's whole training; returns the text to print at its end."""
    folder = located(Settings(model=settings.target.folder), Console()).model or str(EMBEDDED_FOLDER)
    target = open_target(replace(settings.target, folder=folder))
    parts = read_or_write(target, Path(settings.head.out_dir) / "answers", code_of(target))
    run = open_head_run(settings.head, settings.optimiser, target, parts)
    if not export_only:
        train_head(run)
    export_head(run)
    first, second = judge(run)
    return f"thinks as its model at {first:.1%} of places one token ahead, {second:.1%} two; {settings.head.export_dir}"


def code_of(target: TargetModel) -> np.ndarray:
    """Returns the training corpus in the model's own tokens, i32[N]."""
    return np.concatenate(target.tokenizer.encode_all([each.text for each in read_corpus().training], False))


def body(values: flags.FlagValues) -> int:
    logging.set_verbosity(logging.WARNING)  # Orbax logs every file operation at INFO
    head = read_head_settings(Path(values.config or DEFAULT))
    if head is not None:
        given = {"out_dir": values.out_dir, "export_dir": values.export_dir, "seed": values.seed}
        own = replace(head.head, **{name: value for name, value in given.items() if value is not None})
        print(train_and_export_head(replace(head, head=own), values.export_only))
        return 0
    settings = read_settings(Path(values.config or DEFAULT))
    settings = override(settings, out_dir=values.out_dir, export_dir=values.export_dir, seed=values.seed)
    print(train_and_export(settings, values.resume, values.export_only))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 2 with one line on the error."""
    return command.run("jdisagg train", __doc__, declare(), argv, body, own_file=True)


if __name__ == "__main__":
    sys.exit(main())
