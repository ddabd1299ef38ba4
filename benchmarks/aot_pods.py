"""Llama-3-70B on slices and hosts that are not here: `jdisagg aot` of meshes whose workers span hosts, pod by pod.

Of each worker's largest step are told its collectives, what its busiest device sends over NVLink or ICI and to other
hosts, the least time that takes, and the floor of its arithmetic and its memory.

    python -m benchmarks.aot_pods --reports=FOLDER --output=benchmarks/results/aot_pods.json

Reports that lie in the folder already are read and not made again: each takes minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry
from benchmarks.machine import described
from benchmarks.shallow import shallow

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "configs/llama3_70b", "folder with a config.json", flag_values=FLAGS)
flags.DEFINE_string("reports", "", "folder to keep the report of each pod in; it is made", flag_values=FLAGS)
flags.DEFINE_list("pods", [], "names of those to do; empty: all", flag_values=FLAGS)
flags.DEFINE_integer("layers", 0, "of the model; 0: as many as it has", flag_values=FLAGS)
flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)
PODS = {
    "h100_2": ("h100:2x8", "prefill:pp2tp4,decode:ring2tp4"),
    "h100_4": ("h100:4x8", "prefill:tp16,decode:ring4tp4"),
    "h100_8": ("h100:8x8", "prefill:pp2tp16,decode:ring4tp8"),
    "v5p": ("v5p:2x2x4", "prefill:tp8,decode:ring4tp2"),
    "v6e": ("v6e:4x4", "prefill:tp8,decode:ring4tp2"),
}
SIZES = (
    "--max_num_batched_tokens=512", "--prefill_buckets=512", "--max_model_len=4096", "--table_buckets=4096",
    "--max_num_seqs=32", "--multi_step=4",
)  # fmt: skip
STEPS = ("prefill", "ring plain")


@dataclass(frozen=True, slots=True)
class Step:
    """A chunk of one layer group or stage, or a dispatch of a ring."""

    pod: str
    target: str
    mesh: str
    kind: str
    compile_s: float
    collectives: dict[str, int]
    inside_bytes: float
    between_bytes: float
    links_s: float
    floor_s: float
    device_bytes: int  # of the fullest device of its worker
    limit_bytes: int


def report_of(pod: str, folder: Path) -> dict[str, Any]:
    """What was found, now or before. Raises RuntimeError where it does not compile or fit."""
    folder.mkdir(parents=True, exist_ok=True)
    path, (target, mesh) = folder / f"{pod}.json", PODS[pod]
    if not path.exists():
        model = shallow(Path(FLAGS.model), FLAGS.layers, folder) if FLAGS.layers else FLAGS.model
        given = [f"--model={model}", f"--mesh={mesh}", f"--target={target}", f"--json={path}", *SIZES]
        done = subprocess.run([sys.executable, "-m", "jdisagg", "aot", *given], check=False)
        if done.returncode:
            raise RuntimeError(f"{pod}: jdisagg aot ended with {done.returncode}")
    return json.loads(path.read_text())


def steps_of(pod: str, report: dict[str, Any]) -> list[Step]:
    """The largest of each kind and worker; stages of prefill are alike, the last one counts."""
    found: dict[tuple[str, str], Step] = {}
    for each in report["programs"]:
        if each["kind"] not in STEPS or not each["exact"]:
            continue
        stages = [stage for stage in report["stages"] if stage["worker"] == each["worker"]]
        fullest = max(stages, key=lambda stage: stage["total_bytes"])
        found[each["worker"], each["kind"]] = Step(
            pod=pod,
            target=report["target"],
            mesh=report["mesh"],
            kind=each["kind"],
            compile_s=each["compile_s"],
            collectives=each["collectives"],
            inside_bytes=each["sent_bytes"]["inside"],
            between_bytes=each["sent_bytes"]["between"],
            links_s=each["links_s"],
            floor_s=each["floor_s"],
            device_bytes=fullest["total_bytes"],
            limit_bytes=fullest["limit_bytes"],
        )
    return list(found.values())


def table(steps: list[Step]) -> Table:
    shown = Table("target", "mesh", "step", "collectives", "MiB inside", "MiB to other hosts", "links ms", "floor ms")
    for each in steps:
        figures = each.inside_bytes / 2**20, each.between_bytes / 2**20, 1e3 * each.links_s, 1e3 * each.floor_s
        sums = ", ".join(f"{count} {name}" for name, count in each.collectives.items())
        shown.add_row(each.target, each.mesh, each.kind, sums, *(f"{figure:,.2f}" for figure in figures))
    return shown


def main() -> int:
    about = described()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(FLAGS.reports or scratch)
        steps = [step for pod in FLAGS.pods or PODS for step in steps_of(pod, report_of(pod, folder))]
    Console().print(table(steps))
    if FLAGS.output:
        report = {**about, "model": Path(FLAGS.model).name, "steps": [asdict(each) for each in steps]}
        Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
