"""Settings in groups: their names on a command line, in a file and in Python, and what presets do to them."""

import json
import math
import re
from pathlib import Path
from typing import Any

import chz
import pytest

from cua_rl.command_line.parsing import load_config, make_config, parse_command_line
from cua_rl.command_line.plain_config import plain_config, stored_setting
from cua_rl.command_line.settings import SettingNames, explain_field, format_help, list_settings
from cua_rl.judge.config import JudgeConfig
from cua_rl.run.evaluation_config import EVALUATE_SECTIONS, EvaluateConfig
from cua_rl.run.rollout_config import AgentSettings
from cua_rl.run.sft_config import SFT_SECTIONS, SftConfig
from cua_rl.run.training_config import TRAIN_SECTIONS, CLIConfig, MonitorSettings
from cua_rl.sampling.config import ServerConfig
from cua_rl.training.config import LossConfig
from cua_rl.types.errors import ConfigError

# names that were documented before settings had groups, and where they are now
EARLIER_NAMES = {
    "loss": "loss.name",
    "clip_low": "loss.clip_low",
    "kl_loss_coef": "loss.kl_loss_coef",
    "force_untruncated": "loss.force_untruncated",
    "weight_decay": "adam.weight_decay",
    "grad_clip_norm": "adam.grad_clip_norm",
    "lora_alpha": "trainer.lora_alpha",
    "trainer_dtype": "trainer.dtype",
    "trainer_gpus": "trainer.gpus",
    "parity_limit": "trainer.parity_limit",
    "server_gpus": "server.gpus",
    "server_start_timeout_s": "server.start_timeout_s",
    "server_dtype": "server.dtype",
    "vllm_args": "server.vllm_args",
    "max_model_len": "server.max_model_len",
    "gateway_port": "gateway.port",
    "allowed_media_domains": "gateway.allowed_media_domains",
    "agent": "agent.name",
    "agent_command": "agent.command",
    "history": "agent.history",
    "turn_timeout_s": "devices.turn_timeout_s",
    "gym_base_url": "devices.gym_base_url",
    "judge": "judge.mode",
    "judge_model": "judge.model",
    "judge_min_precision": "judge.min_precision",
    "monitor": "monitor.show",
    "monitor_base_url": "monitor.base_url",
    "project_token": "monitor.project_token",
    "sampling_seed": "sampling.seed",
    "min_group_size": "sampling.min_group_size",
    "replay_successes": "curriculum.replay_successes",
    "num_eval_rollouts": "evaluation.num_eval_rollouts",
    "keep_checkpoints": "checkpoints.keep_checkpoints",
    "base_url": "base_url",
    "seed": "seed",
}
FIRST_USERS = (
    *("model_name", "lora_rank", "renderer_name", "load_checkpoint_path", "gbox_api_key", "tinker_api_key", "box_type"),
    *("max_turns", "tasks", "eval_tasks", "seed", "group_size", "groups_per_batch", "learning_rate", "max_tokens"),
    *("temperature", "kl_penalty_coef", "num_substeps", "max_steps_off_policy", "log_path", "log_dir", "wandb_project"),
    *("wandb_name", "eval_every", "save_every", "num_groups_to_log", "compute_post_kl", "behavior_if_log_dir_exists"),
    "base_url",
)


def parse(*argv: str) -> CLIConfig:
    return parse_command_line(CLIConfig, argv)


def test_the_names_of_the_first_users_lie_in_no_group() -> None:
    assert set(FIRST_USERS) <= set(chz.chz_fields(CLIConfig))


@pytest.mark.parametrize(("name", "path"), EARLIER_NAMES.items())
def test_every_earlier_name_still_means_its_setting(name: str, path: str) -> None:
    assert SettingNames(CLIConfig).find(name).name == path


def test_no_setting_has_lost_its_unique_name() -> None:
    names = SettingNames(CLIConfig)

    for setting in list_settings(CLIConfig):
        if setting.group is None:
            assert names.find(setting.name) == setting
            assert names.find(setting.name.replace(".", "_")) == setting


@pytest.mark.parametrize(
    "argv", [("clip_low=0.5",), ("--clip-low", "0.5"), ("loss.clip_low=0.5",), ("--loss.clip-low=0.5",)]
)
def test_a_setting_in_a_group_is_the_same_from_anywhere(argv: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("clip_low: 0.5\n")
    (tmp_path / "b.yaml").write_text("loss: {clip_low: 0.5}\n")

    expected = CLIConfig(loss=LossConfig(clip_low=0.5))

    assert parse(*argv) == expected
    assert load_config(CLIConfig, tmp_path / "a.yaml") == load_config(CLIConfig, tmp_path / "b.yaml") == expected
    assert make_config(CLIConfig, {"clip_low": 0.5}) == expected


def test_a_group_that_is_given_a_plain_value_takes_its_main_setting(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("loss: ppo\nagent: external\nmonitor: false\n")

    config = parse("loss=ppo", "agent=external", "monitor=false")

    assert config == load_config(CLIConfig, tmp_path / "run.yaml")
    assert config == CLIConfig(
        loss=LossConfig(name="ppo"), agent=AgentSettings(name="external"), monitor=MonitorSettings(show=False)
    )
    assert parse("--monitor").monitor.show


def test_losses_clip_as_their_papers_do_unless_another_clip_is_given() -> None:
    # GSPO: 3e-4 and 4e-4; CISPO: no lower bound of the weight, 5 at most; PPO: 0.2
    for name, clips in (("gspo", (3e-4, 4e-4)), ("cispo", (1.0, 4.0)), ("ppo", (0.2, 0.2))):
        for config in (
            parse(f"loss={name}"),
            CLIConfig(loss=LossConfig(name=name)),
            parse(f"loss={name}", "model_name=m"),
        ):
            assert (config.loss.clip_low, config.loss.clip_high) == clips
    given = parse("loss=gspo", "clip_high=0.1").loss
    assert (given.clip_low, given.clip_high) == (3e-4, 0.1)


def test_a_group_given_in_python_wins_over_a_file_and_a_group_may_be_empty_there(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("loss:\n  clip_low: 0.3\ntrainer:\n#  dtype: float32\n")

    assert load_config(CLIConfig, path).loss.clip_low == 0.3
    assert load_config(CLIConfig, path, loss=LossConfig(name="ppo", clip_low=0.5)).loss.clip_low == 0.5


def test_presets_reach_into_groups_and_give_way_to_what_is_said() -> None:
    # the embedded demo presets normalisation and context, whose defaults are constant and the model's
    assert (CLIConfig().loss.normalisation, CLIConfig().server.max_model_len) == ("token_mean", 2048)
    assert CLIConfig(loss=LossConfig(clip_low=0.5)).loss.normalisation == "token_mean"
    assert CLIConfig(loss=LossConfig(normalisation="constant")).loss.normalisation == "constant"
    assert parse("normalisation=constant") == CLIConfig(loss=LossConfig(normalisation="constant"))
    assert CLIConfig(server=ServerConfig(max_model_len=None)).server.max_model_len is None
    assert CLIConfig(model_name="m").loss == LossConfig()
    changed = chz.replace(CLIConfig(), seed=7)
    assert (changed.seed, changed.loss) == (7, CLIConfig().loss)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("gpus=1", "'gpus', which several groups have; choose among server.gpus, trainer.gpus"),
        ("port=1", "choose among server.port, gateway.port, monitor.port"),
        ("clip_lo=1", "did you mean 'loss.clip_low'?"),
        ("min_group_sie=3", "did you mean 'sampling.min_group_size'?"),
        ("eval_temperatue=1", "did you mean 'evaluation.eval_temperature'?"),
        ("keep_evey=2", "did you mean 'checkpoints.keep_every'?"),
        ("clip_low=2", "loss.clip_low: expected a number above 0.0 and at most 1.0, got 2.0"),
        ("loss.temperature=1", "expected the name of a setting, got 'loss.temperature'"),
        ("judge_votes=2", "judge.votes: expected an odd number"),
    ],
)
def test_names_and_values_in_groups_are_explained(argument: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argument)

    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_steps": "10"}, "max_steps: expected int, got '10'"),
        ({"learning_rate": math.nan}, "learning_rate: expected float, got nan"),
        ({"trace": "no"}, "trace: expected bool, got 'no'"),
        ({"preset": "h100"}, "preset: expected"),
        ({"trainer": {"gpu": [0]}}, "TrainerConfig, got {'gpu': [0]}; did you mean 'gpus'?"),
        ({"loss": LossConfig(clip_low="low")}, "loss.clip_low: expected float, got 'low'"),
    ],
)
def test_a_value_of_another_type_is_refused_in_python_too(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        CLIConfig(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"clip_low": 0.5}, "write CLIConfig(loss=LossConfig(clip_low=...))"),
        ({"judge_model": "m"}, "write CLIConfig(judge=JudgeConfig(model=...))"),
        ({"grup_size": 4}, "did you mean 'group_size'?"),
    ],
)
def test_a_name_that_moved_is_explained_in_python(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError) as caught:
        CLIConfig(**given)

    assert words in str(caught.value)
    assert words in explain_field(CLIConfig, next(iter(given)))


def test_help_shows_at_most_35_settings_one_group_or_everything(capsys: pytest.CaptureFixture[str]) -> None:
    recipes = [(CLIConfig, TRAIN_SECTIONS), (EvaluateConfig, EVALUATE_SECTIONS), (SftConfig, SFT_SECTIONS)]
    for config_class, sections in recipes:
        shown = [line for line in format_help(config_class, sections).splitlines() if line.startswith("  ")]
        assert sum("=" in line.split()[0] for line in shown) <= 35
    everything = format_help(CLIConfig, TRAIN_SECTIONS, topic="all")
    for setting in list_settings(CLIConfig):
        assert setting.group is not None or f"\n  {setting.name}=" in everything
    with pytest.raises(SystemExit):
        parse_command_line(CLIConfig, ["--help", "loss"], sections=TRAIN_SECTIONS)
    group = capsys.readouterr().out
    assert "  loss.clip_low=0.2" in group
    assert "group_size=" not in group
    with pytest.raises(ConfigError, match="expected a group of settings after --help, got 'los'"):
        parse("--help", "los")


def test_a_stored_configuration_is_read_in_its_earlier_form_too() -> None:
    config = CLIConfig(loss=LossConfig(kl_loss_coef=0.1), judge=JudgeConfig(base_url="http://j", model="m"))
    now = json.loads(json.dumps(plain_config(config)))
    before = {"kl_loss_coef": 0.1, "judge_model": "m", "min_group_size": 3}

    assert "temperature" not in now["loss"]  # the run fills it in
    for stored in (now, before):
        assert stored_setting(stored, "loss.kl_loss_coef") == 0.1
        assert stored_setting(stored, "judge.model") == "m"
    assert stored_setting(before, "sampling.min_group_size") == 3
    assert stored_setting({}, "sampling.min_group_size") is None
