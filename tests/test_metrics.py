"""Metric names and means."""

import re
from pathlib import Path

import pytest

from cua_rl import metrics
from cua_rl.metrics import FAMILIES, METRICS, Mean, check_names, mean_of, meaning, merge_metrics

TRAINING_AREAS = {"curriculum", "reward", "replay", "rollout", "loss", "policy", "optim"}
AREAS = TRAINING_AREAS | {"progress", "time", "device", "stop", "eval", "async", "trainer", "judge"}
OPEN_FAMILIES = {
    "time/x_s",
    "rollout/worker_faults/",
    "eval/x",
    "eval/x/x",
    "trainer/x",
    "trainer/x_tflop",
}  # prefixes, and names that their modules put together


def test_every_name_begins_with_a_known_area_and_has_a_meaning() -> None:
    for name, text in {**METRICS, **FAMILIES}.items():
        assert name.split("/")[0] in AREAS, name
        assert text, name


def test_a_family_covers_its_members_and_nothing_else() -> None:
    assert meaning("eval/held-out_v1.2/success_rate") == FAMILIES["eval/<suite>/success_rate"]
    assert meaning("stop/max_turns") is not None
    assert meaning("stop") is None
    assert meaning("eval/a/b/c/success_rate") is None
    assert meaning("eval/held_out/sucess_rate") is None


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="reward/maen"):
        check_names({"reward/mean": 1.0, "reward/maen": 1.0})


def test_a_metric_that_two_places_write_is_refused_by_name() -> None:
    assert merge_metrics({"loss/total": 1.0}, {}, {"reward/mean": 2.0}) == {"loss/total": 1.0, "reward/mean": 2.0}
    with pytest.raises(ValueError, match="policy/entropy_estimate"):
        merge_metrics({"policy/entropy_estimate": 0.028}, {"loss/total": 1.0}, {"policy/entropy_estimate": 0.057})


def test_adding_means_is_the_mean_of_all_values() -> None:
    short, long = mean_of([1.0]), mean_of([0.0, 0.0, 0.0])

    # (1 + 0 + 0 + 0) / 4, where the mean of the two means would say 0.5
    assert (short + long).value == 0.25
    assert Mean().value == 0.0


def test_every_metric_name_in_the_code_is_listed_with_its_meaning() -> None:
    package = Path(metrics.__file__).parent
    literal = re.compile(r'"((?:' + "|".join(sorted(AREAS)) + r')/[\w./{}-]+)"')
    names = {
        re.sub(r"\{[^}]*\}", "x", name)  # what an f-string fills in stands for any one part
        for path in package.rglob("*.py")
        for name in literal.findall(path.read_text())
    }

    assert "reward/success_rate" in names
    assert [name for name in sorted(names) if name not in OPEN_FAMILIES and meaning(name) is None] == []
