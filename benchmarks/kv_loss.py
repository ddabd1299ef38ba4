"""What quantised KV pages lose of a model: KL of the next token and greedy agreement, on the calibration text.

python -m benchmarks.kv_loss --output=benchmarks/results/kv_loss_embedded.json
"""

from __future__ import annotations

import sys

from absl import flags
from rich.console import Console
from rich.table import Table

from benchmarks import entry, machine, report
from jdisagg import devices
from jdisagg.core.layout.kv_layout import KVLayout
from jdisagg.core.settings import Settings
from jdisagg.model.calibration import TEXT, measure_kv_loss
from jdisagg.model.checkpoint import open_source, read_model
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.named_models import located
from jdisagg.serve.deploy.deployment import PAGE_DTYPES, place_of

FLAGS = flags.FlagValues()
MODEL = flags.DEFINE_string("model", "", "as of jdisagg.launch", flag_values=FLAGS)
OUTPUT = flags.DEFINE_string("output", "", "JSON file", flag_values=FLAGS)
KINDS = ("int8", "fp8")


def main() -> int:
    console = Console()
    devices.prepare("cpu", 1)
    place = place_of(located(Settings(model=MODEL.value), console))
    config, tokens = read_model(place), Tokenizer(place).encode(TEXT)
    source = open_source(place, "hf", config)
    table, rows = Table("pages", "bytes a token", "KL, nats a token", "same greedy token"), []
    for kind in KINDS:
        dtype = PAGE_DTYPES.get(kind, kind)
        kl, agreement = measure_kv_loss(source, config, dtype, tokens)
        held = KVLayout.of(config, 1, dtype).bytes_per_token
        rows.append({"pages": kind, "bytes_per_token": held, "kl": kl, "agreement": agreement})
        table.add_row(kind, f"{held:,}", f"{kl:.2g}", f"{agreement:.1%}")
    console.print(table)
    if OUTPUT.value:
        plain = {name: KVLayout.of(config, 1, name).bytes_per_token for name in ("float32", "bfloat16")}
        figures = {
            "model": MODEL.value or "embedded",
            "tokens": len(tokens),
            "plain_bytes_per_token": plain,
            "rows": rows,
        }
        report.write_json(OUTPUT.value, {**machine.described(), **figures})
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, FLAGS, __doc__, sys.argv))
