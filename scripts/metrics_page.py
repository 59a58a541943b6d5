"""Write docs/metrics.md out of `cua_rl/metrics.py`: `python -m scripts.metrics_page`."""

from collections.abc import Mapping
from pathlib import Path

from cua_rl.metrics import FAMILIES, METRICS
from cua_rl.reporting.pace import TimeLeft
from cua_rl.reporting.step_line import STEP_FIELDS, format_evaluation_line, format_step_line

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
AREAS: Mapping[str, str] = {
    "progress": "Progress",
    "reward": "Rewards and success of training rollouts",
    "eval": "Evaluations on held-out tasks",
    "judge": "Judge",
    "curriculum": "Curriculum",
    "replay": "Replayed successes",
    "rollout": "Rollouts, turns and tokens",
    "stop": "Stop reasons",
    "policy": "Policy: parity with the sampler, importance ratios, entropy, KL divergence",
    "loss": "Losses",
    "optim": "Optimizer step",
    "async": "Asynchronous training",
    "trainer": "Trainer compute and memory",
    "time": "Durations and throughput",
    "device": "Devices",
}

HEAD = """# Metrics and log lines

This page defines every metric of a run; the code that writes metrics refuses names that are not listed here. Names have
the form `area/name[/stat]`, with units as suffixes (`_s` seconds, `_tokens`, `_gib`, `_frac` for a share from 0 to 1).
A part in angle brackets is a placeholder: `eval/<suite>/success_rate` is `eval/held_out/success_rate` in the train
recipe.

The same numbers are in `metrics.jsonl` of the run's folder (one line per step and evaluation), in TensorBoard, in
Weights & Biases if `wandb_project` is set, in the database (`steps.metrics`, `evals.metrics`) and in the monitor. Which
metrics appear depends on the run: `async/...` only in asynchronous runs, `replay/...` only with
`replay_successes=true`, and so on.

`python -m scripts.metrics_page` generates this page from the texts in `cua_rl/metrics.py`.

## Log lines

The console shows one line per step and per evaluation:

```text
{lines}
```

| part of the line | metric |
|---|---|
"""
EVALUATION = {
    "eval/held_out/success_rate": 0.266,
    "eval/held_out/success_rate_low": 0.172,
    "eval/held_out/success_rate_high": 0.385,
    "eval/held_out/num_rollouts": 64.0,
}
STEP = {
    "reward/success_rate": 0.242,
    "reward/mean": 0.242,
    "loss/policy": -0.0511,
    "loss/kl_base": 0.0012,
    "policy/kl_sampling_training/mean": 0.0004,
    "optim/learning_rate": 2e-3,
    "time/tokens_per_s": 812.0,
    "rollout/num_faults": 1.0,
}
"""What the sample lines on the page show."""


def page() -> str:
    """The text of docs/metrics.md."""
    lines = [
        format_evaluation_line("Baseline", "held_out", EVALUATION),
        format_step_line(1, 24, STEP, TimeLeft(seconds=125.0, is_lower_bound=False)),
    ]
    rows = [f"| {label} | `{name}`: {METRICS[name]} |" for name, label, _ in STEP_FIELDS]
    rows += [
        "| Faults | `rollout/num_faults`, if any |",
        "| ETA | estimated remaining time, from the speed since the last start |",
    ]
    sections = [_section(area, title) for area, title in AREAS.items()]
    return HEAD.format(lines="\n".join(lines)) + "\n".join(rows) + "\n\n" + "\n".join(sections)


def _section(area: str, title: str) -> str:
    listed = {**METRICS, **FAMILIES}
    mine = {name: text.replace("|", "\\|") for name, text in listed.items() if name.split("/")[0] == area}
    rows = [f"| `{name}` | {text} |" for name, text in mine.items()]
    return "\n".join([f"## {title}", "", "| metric | meaning |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
