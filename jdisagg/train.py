"""`python -m jdisagg.train --config=configs/embedded_train.toml`: trains the embedded model and exports it."""

import sys
from pathlib import Path

from absl import app, flags, logging

from jdisagg.core.errors import JdisaggError
from jdisagg.training.corpus import read_corpus
from jdisagg.training.finish import finish
from jdisagg.training.progress import read_reports
from jdisagg.training.run import open_run, train
from jdisagg.training.settings import TrainSettings, override, read_settings

FLAGS = flags.FLAGS
flags.DEFINE_string("config", "configs/embedded_train.toml", "TOML file with the run's settings.")
flags.DEFINE_bool("resume", True, "Go on from the newest checkpoint in out_dir; off: refuse a folder that has one.")
flags.DEFINE_bool("export_only", False, "Train no further: export the newest checkpoint as it stands.")
flags.DEFINE_string("out_dir", None, "Overrides run.out_dir: checkpoints, log, plot and samples.")
flags.DEFINE_string("export_dir", None, "Overrides run.export_dir: the Hugging Face folder written at the end.")
flags.DEFINE_integer("seed", None, "Overrides run.seed.")


def train_and_export(settings: TrainSettings) -> str:
    """The whole run; the text to print at its end."""
    corpus = read_corpus()
    run = open_run(settings, corpus, resume=FLAGS.resume)
    reports = read_reports(Path(settings.run.out_dir) / "log.jsonl") if FLAGS.export_only else train(run, corpus)
    summary = finish(run, corpus, reports)
    return (
        f"held-out bits per byte {summary.held_out_bits_per_byte:.4f} over {summary.held_out_files} files"
        f" after {summary.tokens:,} tokens; exported to {settings.run.export_dir},"
        f" plot and samples in {settings.run.out_dir}"
    )


def main(_: list[str]) -> None:
    try:
        logging.set_verbosity(logging.WARNING)  # Orbax tells every file operation at INFO
        settings = read_settings(Path(FLAGS.config))
        print(train_and_export(override(settings, out_dir=FLAGS.out_dir, export_dir=FLAGS.export_dir, seed=FLAGS.seed)))
    except JdisaggError as error:
        print(f"jdisagg.train: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(main)
