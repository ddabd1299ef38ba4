"""What each weight dtype loses of a model: KL of the next token and greedy agreement, on the calibration text.

python -m benchmarks.weight_loss --model=smollm2 --output=benchmarks/results/weight_loss_smollm2.json
"""

from __future__ import annotations

import sys

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry, machine, report
from jdisagg import devices
from jdisagg.core.settings import Settings
from jdisagg.model.calibration import TEXT, WORST_ERROR, measure_loss
from jdisagg.model.checkpoint import open_source, read_model
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.named_models import located

FLAGS = flags.FlagValues()
MODEL = flags.DEFINE_string("model", "smollm2", "as of jdisagg.launch", flag_values=FLAGS)
DTYPES = flags.DEFINE_list("dtypes", ["bfloat16", "int8", "fp8"], "which to compare with f32", flag_values=FLAGS)
OUTPUT = flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)


def main() -> int:
    console = Console()
    devices.prepare("cpu", 1)
    place = located(Settings(model=MODEL.value), console).model
    config, tokens = read_model(place), Tokenizer(place).encode(TEXT)
    source = open_source(place, "hf", config)
    table = Table("weights", "KL, nats a token", "same greedy token", "full", title=f"{len(tokens)} tokens")
    rows = []
    for dtype in DTYPES.value:
        loss = measure_loss(source, config, dtype, tokens)
        rows.append({"weights": dtype, "kl": loss.kl, "agreement": loss.agreement, "full": sorted(loss.weights.full)})
        table.add_row(dtype, f"{loss.kl:.2g}", f"{loss.agreement:.1%}", ", ".join(sorted(loss.weights.full)))
    console.print(table)
    if OUTPUT.value:
        figures = {"model": MODEL.value, "tokens": len(tokens), "bound": WORST_ERROR, "rows": rows}
        report.write_json(OUTPUT.value, {**machine.described(), **figures})
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
