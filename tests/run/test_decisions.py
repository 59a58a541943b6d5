"""What a dry run begins with, before the JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cua_rl.models import TINY_QWEN3_VL


def dry_run(recipe: str, *arguments: str) -> tuple[list[str], dict[str, object]]:
    """Lines on stderr, and the JSON, of a process of its own."""
    command = [sys.executable, "-m", f"cua_rl.recipes.{recipe}", "dry_run=true", *arguments]
    environ = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    return done.stderr.splitlines(), json.loads(done.stdout)


def test_a_dry_run_of_the_demo_says_in_ten_lines_what_was_decided_and_plans_no_memory(tmp_path: Path) -> None:
    lines, settings = dry_run("train", f"log_path={tmp_path}/run", "max_steps=24", "eval_every=10")

    assert [line[:10].strip() for line in lines] == [
        *("model", "device", "tasks", "steps", "learning", "context", "memory", "folder", "cost", ""),
    ]
    said = "\n".join(lines)
    # 24 * 16 * 8 rollouts; evaluations before step 1 and after 10, 20 and 24
    assert "24 steps x 16 groups x 8 = 3,072 rollouts; synchronous" in said
    assert "at most 6,144 model responses and 4 evaluations of 64 rollouts" in said
    assert f"{tmp_path}/run; database of its own" in said
    assert "memory plan" not in said
    assert settings["log_path"] == f"{tmp_path}/run"
    # what nobody has set is chosen, and said together with what was set
    trainer, changed = settings["trainer"], settings["changed_from_defaults"]
    assert isinstance(trainer, dict)
    assert isinstance(changed, dict)
    assert trainer["micro_batch_tokens"] == changed["trainer.micro_batch_tokens"] == 16384
    assert (changed["max_steps"], changed["group_size"]) == (24, 8)
    assert "max_turns" not in changed


@pytest.mark.parametrize(
    ("recipe", "words"),
    [("sft", "100 steps, learning rate"), ("evaluate", "64 tasks, 1 attempt each, temperature 0.5")],
)
def test_other_recipes_do_the_same(recipe: str, words: str, tmp_path: Path) -> None:
    lines, settings = dry_run(recipe, f"log_path={tmp_path}/run")

    assert words in "\n".join(lines)
    assert f"folder    {tmp_path}/run" in lines
    assert "memory plan" not in "\n".join(lines)
    assert settings["log_path"] == f"{tmp_path}/run"


def test_a_named_model_gets_its_memory_plan_after_these_lines(tmp_path: Path) -> None:
    lines, _ = dry_run("train", f"model_name={TINY_QWEN3_VL}", f"log_path={tmp_path}/run", "max_model_len=2048",
                       "max_tokens=48")  # fmt: skip

    assert lines[0].startswith(f"model     {TINY_QWEN3_VL}, LoRA rank 32")
    assert lines[10].startswith("memory plan, GiB")
