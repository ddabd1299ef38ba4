"""What a run says while it works: a bar on a terminal, plain lines elsewhere, and a JSON line a report for the plot."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@dataclass(frozen=True, slots=True)
class Report:
    """The state after `step` steps. `held_out` is bits per byte where it was measured."""

    step: int
    tokens: int
    loss: float  # nats a token, mean over the steps since the last report
    gradient_norm: float
    tokens_per_s: float
    held_out: float | None = None

    def line(self) -> str:
        held_out = "" if self.held_out is None else f"  held-out {self.held_out:.3f} bits/byte"
        return f"loss {self.loss:.3f}  norm {self.gradient_norm:.2f}  {self.tokens_per_s:,.0f} tokens/s{held_out}"


class ProgressLog:
    """Keeps `log.jsonl`; lines behind `resumed_at` belong to work that was lost and is done again."""

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

    def add(self, report: Report) -> None:
        self.reports.append(report)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(report)) + "\n")
        if self._console.is_terminal:
            self._bar.update(self._task, description=report.line())
        else:
            print(f"step {report.step}/{self._total}  {report.line()}", flush=True)

    def close(self) -> None:
        self._bar.stop()


def read_reports(path: Path) -> list[Report]:
    """Every report of a run so far, none if it has not begun."""
    return [Report(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
