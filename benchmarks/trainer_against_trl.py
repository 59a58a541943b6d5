"""Our trainer against TRL's GRPOTrainer on the same rollouts, side by side in one run: one JSON line per figure.

    benchmarks/setup_trl.sh                                # once: TRL in an environment of its own
    .venv/bin/python -m benchmarks.trainer_against_trl     # --cells tiny:3:merged tiny:3:per_turn medium:10:merged

A cell is SIZE:TURNS:FEED. TRL is fed one sample per turn (per_turn: what trainers do with image rollouts from outside)
or one per rollout (merged), scores completion positions only, and keeps its activations. Both start from the same
weights, so the gradient norms of the first step must agree: that is the check that both do the same work.

Each step is timed as wall time and as the time that the process computed; the latter hardly depends on what else the
machine is doing. `limit_s` is the step's floating-point operations at the speed of one large matrix product.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.claims import require
from benchmarks.given_rollouts import SIZES, Workload, build_model, write_adapter

ROOT = Path(__file__).parents[1]
FEEDS = ("per_turn", "merged")
TARGETS = {"tiny:10:per_turn": 15.0, "tiny:3:merged": 1.3, "tiny:10:merged": 1.3, "medium:10:merged": 2.5}
"""How many times the rollouts per second of TRL, by cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is compared."""

    size: str
    turns: int
    feed: str

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """From SIZE:TURNS:FEED."""
        size, turns, feed = text.split(":")
        if size not in SIZES or feed not in FEEDS:
            raise SystemExit(f"expected SIZE:TURNS:FEED of {list(SIZES)} and {list(FEEDS)}, got {text!r}")
        return cls(size=size, turns=int(turns), feed=feed)

    @property
    def workload(self) -> Workload:
        return Workload(turns=self.turns, vocabulary=SIZES[self.size]["text"]["vocab_size"])


def measure(python: str, name: str, model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run one trainer in a process of its own; what it printed last."""
    paths = str(model), str(model / "adapter")
    command = [python, "-W", "ignore", "-m", f"benchmarks.{name}", *paths, json.dumps(settings)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks.{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def typical(seconds: Sequence[float]) -> float:
    """The median without the first step, which warms up; the first if there is no other."""
    return statistics.median(seconds[1:] or seconds)


def require_equal_work(cell: Cell, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Refuse figures unless both trained on the same rollouts, with the same gradients in the first step."""
    norms = ours["first_grad_norm"], theirs["first_grad_norm"]
    require(
        "two trainers on the same rollouts",
        difference_of_gradients_is_below_a_thousandth=(True, abs(norms[0] / norms[1] - 1) < 1e-3),
        tokens_of_merged_rollouts=(
            cell.workload.num_rollouts * cell.workload.final_length if cell.feed == "merged" else theirs["tokens"],
            theirs["tokens"],
        ),
    )


def figures(cell: Cell, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """One line of results."""
    account, num_rollouts = ours["account"], cell.workload.num_rollouts
    tflop = sum(account[f"trainer/{part}_tflop"] for part in ("language", "vision", "lora", "head"))
    peak = account["trainer/tflop_per_s"] / account["trainer/matmul_frac"]
    return {
        "figure": "trainer_against_trl",
        **asdict(cell),
        "ratio_cpu": round(typical(theirs["cpu_s"]) / typical(ours["cpu_s"]), 2),
        "ratio_wall": round(typical(theirs["wall_s"]) / typical(ours["wall_s"]), 2),
        "target": TARGETS.get(f"{cell.size}:{cell.turns}:{cell.feed}"),
        "ours_cpu_s": round(typical(ours["cpu_s"]), 2),
        "trl_cpu_s": round(typical(theirs["cpu_s"]), 2),
        "ours_wall_s": round(typical(ours["wall_s"]), 2),
        "trl_wall_s": round(typical(theirs["wall_s"]), 2),
        "ours_rollouts_per_s": round(num_rollouts / typical(ours["wall_s"]), 3),
        "trl_rollouts_per_s": round(num_rollouts / typical(theirs["wall_s"]), 3),
        "grad_norms": [ours["first_grad_norm"], theirs["first_grad_norm"]],
        "ours_tokens": account["trainer/tokens"],
        "tokens_over_final_length": round(account["trainer/tokens"] / num_rollouts / cell.workload.final_length, 4),
        "trl_padded_tokens": theirs["padded_tokens"],
        "ours_encoded_images": account["trainer/encoded_images"],
        "trl_encoded_images": theirs["encoded_images"],
        "ours_peak_rss_gib": round(ours["peak_rss_gib"], 2),
        "trl_peak_rss_gib": round(theirs["peak_rss_gib"], 2),
        "tflop": round(tflop, 4),
        "peak_tflop_per_s": round(peak, 4),
        "limit_s": round(tflop / peak, 2),
        "trl_steps": len(theirs["cpu_s"]),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure the cells that were asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", nargs="+", default=["tiny:3:merged", "tiny:3:per_turn", "medium:10:merged"])
    parser.add_argument("--trl-python", default=str(ROOT / ".venv-trl/bin/python"))
    parser.add_argument("--steps", type=int, default=3, help="steps of ours; the first warms up")
    parser.add_argument("--trl-steps", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=2, help="TRL: samples of one forward pass")
    arguments = parser.parse_args()
    if not Path(arguments.trl_python).exists():
        raise SystemExit(f"expected TRL at {arguments.trl_python}, found none: run benchmarks/setup_trl.sh")
    with tempfile.TemporaryDirectory() as folder:
        for cell in map(Cell.parse, arguments.cells):
            model = Path(folder) / cell.size
            if not model.exists():
                write_adapter(build_model(cell.size, model), model / "adapter")
            work = asdict(cell.workload)
            ours = measure(sys.executable, "trainer_steps", model, {"workload": work, "steps": arguments.steps})
            settings = {
                "workload": work,
                "steps": arguments.trl_steps,
                "feed": cell.feed,
                "micro_batch": arguments.micro_batch,
            }
            theirs = measure(arguments.trl_python, "trl_steps", model, settings)
            require_equal_work(cell, ours, theirs)
            print(json.dumps(figures(cell, ours, theirs)), flush=True)


if __name__ == "__main__":
    main()
