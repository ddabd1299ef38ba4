"""The table of alerts in docs/operations.md, from the rules that Prometheus is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).parents[2] / "launch" / "prometheus" / "alerts.yml"


def rules() -> list[dict[str, Any]]:
    return yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"][0]["rules"]


def text() -> str:
    rows = [
        f"| {rule['annotations']['summary']} | `{rule['expr']}` | {rule.get('for', 'at once')} |"
        f" {rule['labels']['severity']} | {rule['annotations']['why']} |"
        for rule in rules()
    ]
    return "\n".join(["| alert | query | for | severity | why |", "|---|---|---|---|---|", *rows])
