"""What a resumed run keeps of the groups that an earlier attempt left, and with which settings it goes on."""

from pathlib import Path

import pytest

from cua_rl.command_line.plain_config import plain_config
from cua_rl.database.progress import Progress, UntrainedGroup
from cua_rl.errors import ConfigError
from cua_rl.run.log_directory import Checkpoint, prepare_log_directory
from cua_rl.run.resume import plan_start, require_same_policy
from cua_rl.run.sft_config import SftConfig
from cua_rl.run.training_config import CLIConfig, SamplingSettings, TrainerSettings
from tests.builders import group, rollout


def test_a_group_that_lost_too_many_members_is_not_trained_after_a_resume_either() -> None:
    survivors = [rollout(reward=1.0, rollout_id="a"), rollout(reward=0.0, rollout_id="b")]
    progress = Progress(
        done_indices=(),
        untrained=(UntrainedGroup(group=group(*survivors), last_step=2),),
        newest_steps={0: 0},
        evaluated_steps=frozenset(),
    )

    kept = [
        plan_start(CLIConfig(max_steps_off_policy=2, sampling=SamplingSettings(min_group_size=least)), progress, 1)
        .kept_groups[0]
        .scored.group
        for least in (2, 3)
    ]

    assert [entry.is_constant for entry in kept] == [False, True]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (CLIConfig(trainer=TrainerSettings(lora_alpha=64)), "trainer.lora_alpha: expected 32 as when the run in"),
        (CLIConfig(lora_rank=8), "lora_rank: expected 16 .* got 8; go on with the same"),
        (CLIConfig(model_name="Qwen/Qwen3-VL-4B-Thinking", lora_rank=16), "model_name: expected None"),
    ],
    ids=["alpha", "rank", "model"],
)
def test_weights_are_not_resumed_as_another_policy(other: CLIConfig, words: str, tmp_path: Path) -> None:
    with prepare_log_directory(tmp_path / "run", "resume") as folder:
        folder.write_config(plain_config(CLIConfig()))
        require_same_policy(other, folder)  # nothing has been trained yet
        folder.record_checkpoint(
            Checkpoint(step=1, state_path=folder.state_path(1), sampler_path=folder.sampler_path(1))
        )

        require_same_policy(CLIConfig(learning_rate=1e-3, seed=7), folder)
        with pytest.raises(ConfigError, match=words):
            require_same_policy(other, folder)


def test_a_supervised_run_is_not_resumed_as_reinforcement_learning(tmp_path: Path) -> None:
    with prepare_log_directory(tmp_path / "run", "resume") as folder:
        folder.write_config(plain_config(SftConfig()))

        with pytest.raises(ConfigError, match=r"log_path: expected a run of recipes\.train to resume"):
            require_same_policy(CLIConfig(), folder)


def test_a_run_goes_on_with_the_same_model_in_another_folder(tmp_path: Path) -> None:
    with prepare_log_directory(tmp_path / "run", "resume") as folder:
        folder.write_config(plain_config(CLIConfig(model_name="Qwen/Qwen3-VL-4B-Instruct")))
        folder.record_checkpoint(
            Checkpoint(step=1, state_path=folder.state_path(1), sampler_path=folder.sampler_path(1))
        )

        require_same_policy(CLIConfig(model_name="/models/Qwen3-VL-4B-Instruct/"), folder)
