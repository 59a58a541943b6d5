"""Write docs/metrics.md out of `cua_rl/metrics.py`: `python -m scripts.metrics_page`."""

from collections.abc import Mapping
from pathlib import Path

from cua_rl.metrics import FAMILIES, METRICS
from cua_rl.reporting.step_line import STEP_FIELDS, format_evaluation_line, format_step_line

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
AREAS: Mapping[str, str] = {
    "progress": "How far the run is",
    "reward": "Rewards and success of the step's training rollouts",
    "eval": "Evaluations, which run on held-out tasks",
    "judge": "Verdicts of a judge",
    "curriculum": "Which groups and tasks teach",
    "replay": "Replayed successes",
    "rollout": "Rollouts, their turns and tokens",
    "stop": "How rollouts end",
    "policy": "The policy: agreement with the sampler, ratios, entropy, distance from the base model",
    "loss": "Losses",
    "optim": "The optimizer step",
    "async": "The pipeline of asynchronous runs",
    "trainer": "What the trainer computed",
    "time": "Durations and speeds",
    "device": "Devices",
}

HEAD = """# Metrics and log lines

Every metric of a run has its meaning here; the code that writes metrics refuses a name that is not on this page. A
name is `area/name[/stat]`; endings are units (`_s` seconds, `_tokens`, `_gib`, `_frac` a share from 0 to 1). A part in
angle brackets stands for any word: `eval/<suite>/success_rate` is `eval/held_out/success_rate` in the train recipe.

The same numbers are in `metrics.jsonl` of the run's folder (a line per step and evaluation), in TensorBoard, in Weights
& Biases if `wandb_project` names a project, in the database (`steps.metrics`, `evals.metrics`) and in the monitor.
Which of them a line has depends on the run: `async/...` only in asynchronous runs, `replay/...` only with
`replay_successes=true`, and so on.

This page is written by `python -m scripts.metrics_page`; change the texts in `cua_rl/metrics.py`.

## Log lines

Each step and each evaluation is one line on the console:

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
        format_step_line(1, 48, STEP, eta_s=250.0),
    ]
    rows = [f"| {label} | `{name}`: {METRICS[name]} |" for name, label, _ in STEP_FIELDS]
    rows += ["| Faults | `rollout/num_faults`, if there are any |", "| ETA | time left, at the pace of this attempt |"]
    sections = [_section(area, title) for area, title in AREAS.items()]
    return HEAD.format(lines="\n".join(lines)) + "\n".join(rows) + "\n\n" + "\n".join(sections)


def _section(area: str, title: str) -> str:
    listed = {**METRICS, **FAMILIES}
    mine = {name: text.replace("|", "\\|") for name, text in listed.items() if name.split("/")[0] == area}
    rows = [f"| `{name}` | {text} |" for name, text in mine.items()]
    return "\n".join([f"## {title}", "", "| metric | meaning |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
