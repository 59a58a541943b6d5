"""Is the trainer's memory flat over many steps, and what does each step encode: one JSON line.

    .venv/bin/python -m benchmarks.trainer_memory [--steps 100] [--turns 3] [--vision-cache-mib 4]

Every step brings screenshots that were never seen before, so features of old ones must go; the cache is set small
enough to be full after a few steps. Growth compares the mean resident size of the last fifth of the steps with that of
the second fifth.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.claims import require
from benchmarks.given_rollouts import SIZES, Workload, build_model, write_adapter
from benchmarks.trainer_against_trl import measure


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--vision-cache-mib", type=float, default=4.0)
    arguments = parser.parse_args()
    work = Workload(turns=arguments.turns, vocabulary=1024)
    with tempfile.TemporaryDirectory() as folder:
        model = build_model("tiny", Path(folder) / "tiny")
        write_adapter(model, model / "adapter")
        trainer = {"vision_cache_gib": arguments.vision_cache_mib / 1024}
        settings = {"workload": asdict(work), "steps": arguments.steps, "trainer": trainer}
        result = measure(sys.executable, "trainer_steps", model, settings)
    fifth = max(1, arguments.steps // 5)
    early, late = (statistics.mean(part) for part in (result["rss_gib"][fifth : 2 * fifth], result["rss_gib"][-fifth:]))
    account = result["account"]
    seen_mib = (
        arguments.steps * work.num_screenshots * work.image_tokens * 4 * SIZES["tiny"]["text"]["hidden_size"] / 2**20
    )
    require(
        "a trainer's memory",
        samples=(arguments.steps, len(result["rss_gib"])),
        cache_was_full_at_a_fifth_of_the_steps=(True, seen_mib / 5 > arguments.vision_cache_mib),
    )
    line = {
        "figure": "trainer_memory",
        "steps": arguments.steps,
        "rss_gib_early": round(early, 4),
        "rss_gib_late": round(late, 4),
        "growth_frac": round(late / early - 1, 4),
        "target_growth_frac": 0.05,
        "tokens_over_final_length": round(account["trainer/tokens"] / work.num_rollouts / work.final_length, 4),
        "target_tokens_over_final_length": 1.05,
        "encoded_images_per_step": account["trainer/encoded_images"],
        "distinct_images_per_step": work.num_screenshots,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
