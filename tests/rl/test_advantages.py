import pytest

from cua_rl.rl.advantages import group_advantages


def test_rewards_are_centred_in_their_group() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], "mean") == (0.5, -0.5, -0.5, 0.5)


def test_division_by_the_population_standard_deviation() -> None:
    # mean 1/4, centred 3/4 -1/4 -1/4 -1/4, variance (9 + 3) / 64 = 3/16, std sqrt(3)/4
    assert group_advantages([1.0, 0.0, 0.0, 0.0], "mean_std") == pytest.approx(
        (3 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5)
    )


@pytest.mark.parametrize("kind", ["mean", "mean_std"])
def test_a_constant_group_gets_exact_zeros_even_where_the_mean_is_rounded(kind: str) -> None:
    assert group_advantages([0.1] * 3, kind) == (0.0, 0.0, 0.0)  # type: ignore[arg-type]
