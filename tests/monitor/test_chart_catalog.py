"""The web app's charts have a place for every metric."""

import re
from pathlib import Path

from cua_rl.metrics import FAMILIES, METRICS

CATALOG = Path(__file__).parents[2] / "training-monitor" / "src" / "charts" / "catalog.ts"


def test_every_metric_of_training_steps_is_in_a_chart() -> None:
    text = CATALOG.read_text()
    prefixes = re.findall(r'prefix: "([^"]+)"', text)
    named = [name for part in re.findall(r"metrics: \[([^\]]*)\]", text) for name in re.findall(r'"([^"]+)"', part)]

    without = [name for name in METRICS if name not in named and not name.startswith(tuple(prefixes))]
    assert without == ["progress/curve"]  # lines have a gap where the next one begins
    # evaluations are drawn on the success chart, and in full on the Evaluations tab
    families = [name for name in FAMILIES if not name.startswith("eval/")]
    assert [name for name in families if not name.startswith(tuple(prefixes))] == []
    assert len(named) == len(set(named))
