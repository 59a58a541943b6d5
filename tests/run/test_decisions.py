"""What a dry run begins with, before the JSON."""

import json
from pathlib import Path
from typing import Protocol

import pytest

from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.evaluate import main as evaluate
from cua_rl.recipes.sft import main as sft
from cua_rl.recipes.train import main as train


class DryRun(Protocol):
    """Lines on stderr, and the JSON."""

    def __call__(self, recipe: str, *arguments: str) -> tuple[list[str], dict[str, object]]: ...


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> DryRun:
    monkeypatch.delenv("DATABASE_URL", raising=False)

    def run(recipe: str, *arguments: str) -> tuple[list[str], dict[str, object]]:
        status = {"train": train, "sft": sft, "evaluate": evaluate}[recipe](["dry_run=true", *arguments])
        said = capsys.readouterr()
        assert status == 0, said.err
        return said.err.splitlines(), json.loads(said.out)

    return run


def test_a_dry_run_of_the_demo_says_in_ten_lines_what_was_decided_and_plans_no_memory(
    dry_run: DryRun, tmp_path: Path
) -> None:
    lines, settings = dry_run("train", f"log_path={tmp_path}/run", "max_steps=24", "eval_every=10")

    assert [line[:10].strip() for line in lines] == [
        *("model", "device", "tasks", "steps", "learning", "context", "memory", "folder", "cost", ""),
    ]
    said = "\n".join(lines)
    # 24 * 16 * 8 rollouts; evaluations before step 1 and after 10, 20 and 24
    assert "24 steps x 16 groups x 8 = 3,072 rollouts; synchronous" in said
    assert "at most 6,144 model responses and 4 evaluations of 64 rollouts" in said
    assert f"{tmp_path}/run; database of its own" in said
    assert "memory estimate" not in said
    assert settings["log_path"] == f"{tmp_path}/run"
    # what nobody has set is chosen, and said together with what was set
    changed = settings["changed_from_defaults"]
    assert isinstance(changed, dict)
    assert changed["trainer.micro_batch_tokens"] == 16384
    assert (changed["max_steps"], changed["group_size"]) == (24, 8)
    assert "max_turns" not in changed


@pytest.mark.parametrize(
    ("recipe", "words", "database"),
    [
        ("sft", "100 steps, learning rate", ""),
        ("evaluate", "64 tasks, 1 attempt each, temperature 0.5", "; database of its own"),
    ],
    ids=["sft", "evaluate"],
)
def test_other_recipes_do_the_same(recipe: str, words: str, database: str, dry_run: DryRun, tmp_path: Path) -> None:
    lines, settings = dry_run(recipe, f"log_path={tmp_path}/run")

    assert words in "\n".join(lines)
    assert f"folder    {tmp_path}/run{database}" in lines
    assert "memory estimate" not in "\n".join(lines)
    assert settings["log_path"] == f"{tmp_path}/run"


def test_a_named_model_gets_its_memory_plan_after_these_lines(dry_run: DryRun, tmp_path: Path) -> None:
    lines, _ = dry_run("train", f"model_name={TINY_QWEN3_VL}", f"log_path={tmp_path}/run", "max_model_len=2048",
                       "max_tokens=48")  # fmt: skip

    assert lines[0].startswith(f"model     {TINY_QWEN3_VL}, LoRA rank 32")
    assert lines[10].startswith("memory estimate, GiB")
