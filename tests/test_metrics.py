"""Metric names and means."""

import pytest

from cua_rl.metrics import FAMILIES, METRICS, Mean, check_names, mean_of, meaning

AREAS = {"progress", "reward", "rollout", "loss", "policy", "optim", "time", "device", "stop", "eval"}


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


def test_adding_means_is_the_mean_of_all_values() -> None:
    short, long = mean_of([1.0]), mean_of([0.0, 0.0, 0.0])

    # (1 + 0 + 0 + 0) / 4, where the mean of the two means would say 0.5
    assert (short + long).value == 0.25
    assert Mean().value == 0.0
