"""A run as a whole: interrupted and resumed it is the run that was never interrupted."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.training.data import CorpusFiles
from jdisagg.training.run import TrainingReport, TrainSettings, finish, open_run, override, read_reports, train


def _figures(reports: list[TrainingReport]) -> list[tuple[int, float, float, float | None]]:
    return [(report.step, report.loss, report.gradient_norm, report.held_out) for report in reports]


@pytest.mark.slow
def test_a_resumed_run_has_identical_losses(settings: TrainSettings, corpus: CorpusFiles, tmp_path: Path) -> None:
    whole = train(open_run(settings, corpus, resume=True), corpus)
    parted = override(settings, out_dir=str(tmp_path / "parted"))
    first = open_run(parted, corpus, resume=True)
    train(first, corpus, stop_at=4)
    first.checkpoints.close()
    second = open_run(parted, corpus, resume=True)
    assert second.step == 4
    assert _figures(train(second, corpus)) == _figures(whole)
    assert [report.step for report in whole] == list(range(1, 7))
    assert whole[-1].loss < whole[0].loss


def test_work_behind_the_last_checkpoint_is_done_again_and_told_once(
    settings: TrainSettings, corpus: CorpusFiles
) -> None:
    run = open_run(settings, corpus, resume=True)
    train(run, corpus, stop_at=3)
    log = Path(settings.run.out_dir) / "log.jsonl"
    before = read_reports(log)
    lost = json.dumps(asdict(replace(before[-1], step=4, loss=99.0)))
    log.write_text(log.read_text() + lost + "\n")
    train(open_run(settings, corpus, resume=True), corpus, stop_at=4)
    assert [report.step for report in read_reports(log)] == [1, 2, 3, 4]
    assert _figures(read_reports(log))[:3] == _figures(before)
    assert read_reports(log)[3].loss < 99.0


def test_a_folder_with_a_run_is_not_overwritten(settings: TrainSettings, corpus: CorpusFiles) -> None:
    train(open_run(settings, corpus, resume=False), corpus, stop_at=1)
    with pytest.raises(ConfigError, match="already holds a run of 1 steps"):
        open_run(settings, corpus, resume=False)


def test_a_finished_run_leaves_folder_summary_plot_and_samples(settings: TrainSettings, corpus: CorpusFiles) -> None:
    run = open_run(replace(settings, phases=settings.phases[:1]), corpus, resume=True)
    summary = finish(run, corpus, train(run, corpus))
    exported = Path(settings.run.export_dir)
    written = json.loads((exported / "training.json").read_text())
    assert written["steps"] == 4 and written["tokens"] == 4 * 64
    assert written["held_out_bits_per_byte"] == summary.held_out_bits_per_byte > 0
    assert written["held_out_bytes"] == sum(len(document.text.encode()) for document in corpus.held_out)
    assert sorted(path.name for path in exported.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "training.json",
    ]  # fmt: skip
    assert (Path(settings.run.out_dir) / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "def fibonacci(n):" in (Path(settings.run.out_dir) / "samples.txt").read_text()
