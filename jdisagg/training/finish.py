"""What a run leaves behind: the exported folder, its held-out figure, the loss plot and a page of samples."""

import datetime
import importlib
import json
import logging
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from jdisagg.training.batches import tokens_before
from jdisagg.training.corpus import Corpus
from jdisagg.training.evaluate import bits_per_byte, cut_windows
from jdisagg.training.export import export, rounded
from jdisagg.training.progress import Report
from jdisagg.training.run import Run
from jdisagg.training.samples import new_writer, sample_page

SAMPLE_TOKENS = 160

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Summary:
    """`training.json`, beside the exported weights: how they came to be and how good they are."""

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
    last_training_loss: float  # nats a token
    python_version: str


def finish(run: Run, corpus: Corpus, reports: list[Report]) -> Summary:
    """Exports the run as it stands and writes plot and samples into its folder."""
    leaves = rounded(run.leaves)
    windows = cut_windows(corpus.held_out, run.tokenizer, run.settings.model.max_position)
    summary = Summary(
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


def _plot(reports: list[Report], path: Path) -> None:
    """A line in its place where what draws it is not installed: the run is worth more than its picture."""
    try:
        plot = importlib.import_module("jdisagg.training.plot")
    except ModuleNotFoundError as error:
        log.warning("no %s: it needs %s: pip install 'jdisagg[train]'", path, error.name)
    else:
        plot.plot_losses(reports, path)
