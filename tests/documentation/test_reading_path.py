"""How much a newcomer reads to have seen the algorithm, from README.md to the loss."""

from tests.documentation.examples import ROOT

READING_PATH = (
    "README.md",
    "cua_rl/types/rollout.py",
    "cua_rl/recipes/rl_minimal.py",
    "cua_rl/rl/sync_loop.py",
    "cua_rl/rollout/run.py",
    "cua_rl/training/losses.py",
)


def num_lines(path: str) -> int:
    return len((ROOT / path).read_text(encoding="utf-8").splitlines())


def test_the_minimal_recipe_fits_on_a_page() -> None:
    assert num_lines("cua_rl/recipes/rl_minimal.py") <= 200


def test_the_algorithm_can_be_read_in_one_sitting() -> None:
    lengths = {path: num_lines(path) for path in READING_PATH}

    assert sum(lengths.values()) <= 950, lengths
