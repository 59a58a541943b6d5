"""What is written as on a command line is accepted in Python too, or refused in a sentence."""

from typing import Any

import pytest

from cua_rl.recipes.evaluate import EvaluateConfig
from cua_rl.recipes.train import CLIConfig
from cua_rl.types.errors import ConfigError


def test_json_tuples_and_names_of_groups_are_accepted_in_python() -> None:
    one, other = {"source_type": "demo_training"}, {"source_type": "ids", "task_ids": "train_02_enable_wifi"}

    assert CLIConfig(tasks='{"source_type": "demo_training"}').tasks == one
    assert CLIConfig(tasks=(one, other)).tasks == [one, other]
    assert CLIConfig(loss="ppo").loss.name == "ppo"
    assert CLIConfig(loss={"name": "ppo", "clip_low": 0.1}).loss.clip_low == 0.1
    assert CLIConfig(monitor=False).monitor.show is False
    assert CLIConfig(eval_tasks=None).eval_tasks is None
    # the demo's preset of the group still applies
    assert CLIConfig(loss="ppo").loss.normalisation == "token_mean"


@pytest.mark.parametrize(
    ("config_class", "given", "says"),
    [
        (CLIConfig, {"eval_tasks": "demo_eval"}, 'got \'demo_eval\'; for example {"source_type": "demo_eval"}'),
        (CLIConfig, {"tasks": "{"}, "the JSON breaks at character 2"),
        (CLIConfig, {"tasks": 5}, "tasks: expected a JSON dictionary .*, got 5"),
        (CLIConfig, {"tasks": [3]}, "each item a JSON dictionary, got .3."),
        (CLIConfig, {"loss": {"nam": "ppo"}}, "did you mean 'name'"),
        (CLIConfig, {"trainer": "fast"}, r"write trainer=TrainerConfig\(...\)"),
        (EvaluateConfig, {"models": "a,b"}, "models: expected a JSON list"),
    ],
)
def test_other_values_are_refused_with_what_was_expected(config_class: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config_class(**given)


def test_a_loss_that_only_imitates_is_not_offered_but_explained() -> None:
    with pytest.raises(ValueError, match=r"recipes\.sft"):
        CLIConfig(loss="cross_entropy")
