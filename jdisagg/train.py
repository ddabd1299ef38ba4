"""Trains the embedded model and exports it.

    python -m jdisagg.train --config=configs/embedded_train.toml [--resume] [--export_only]

The file holds the model, the optimiser and the phases as well; --out_dir, --export_dir and --seed win over its [run].
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags as absl_flags
from absl import logging

from jdisagg import command, flags
from jdisagg.training.corpus import read_corpus
from jdisagg.training.finish import finish
from jdisagg.training.progress import read_reports
from jdisagg.training.run import open_run, train
from jdisagg.training.settings import TrainSettings, override, read_settings

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
    """The whole run; the text to print at its end."""
    corpus = read_corpus()
    run = open_run(settings, corpus, resume=resume)
    reports = read_reports(Path(settings.run.out_dir) / "log.jsonl") if export_only else train(run, corpus)
    summary = finish(run, corpus, reports)
    return (
        f"held-out bits per byte {summary.held_out_bits_per_byte:.4f} over {summary.held_out_files} files"
        f" after {summary.tokens:,} tokens; exported to {settings.run.export_dir},"
        f" plot and samples in {settings.run.out_dir}"
    )


def body(values: flags.FlagValues) -> int:
    logging.set_verbosity(logging.WARNING)  # Orbax tells every file operation at INFO
    settings = read_settings(Path(values.config or DEFAULT))
    settings = override(settings, out_dir=values.out_dir, export_dir=values.export_dir, seed=values.seed)
    print(train_and_export(settings, values.resume, values.export_only))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 with one line on what was wrong."""
    return command.run("jdisagg.train", __doc__, declare(), argv, body, own_file=True)


if __name__ == "__main__":
    sys.exit(main())
