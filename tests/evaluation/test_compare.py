from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from cua_rl.evaluation.attempts import Attempt
from cua_rl.evaluation.evaluate import compare_models
from cua_rl.reporting.comparison import PairRow, format_markdown, pair_sentence, print_comparison, write_comparison
from cua_rl.reporting.plots import write_comparison_plot


def attempt(model: str, position: int, success: bool | None, number: int = 0) -> Attempt:
    return Attempt(
        model=model,
        position=position,
        task_id=f"task_{position}",
        seed=position,
        attempt=number,
        category="app" if position % 2 else "settings",
        difficulty="easy",
        success=success,
        reward=None if success is None else float(success),
        num_turns=2,
        stop_reason="finished",
        num_faults=3 if success is None else 0,
        duration_s=0.1,
    )


def singles(model: str, successes: str) -> list[Attempt]:
    """One attempt per task: 1 solved, 0 not, - given up."""
    return [attempt(model, at, None if mark == "-" else mark == "1") for at, mark in enumerate(successes)]


def test_single_attempts_are_tested_by_mcnemar_on_the_tasks_both_have() -> None:
    comparison = compare_models([*singles("base", "1000000-"), *singles("new", "01111101")], ["base", "new"])

    (pair,) = comparison.pairs
    # worse at 1, better at 5, the last task has no pair: 2 * (1 + 6) / 2^6
    assert (pair.num_tasks, pair.num_only_first, pair.num_only_second) == (7, 1, 5)
    assert pair.p_value == pytest.approx(0.21875)
    assert pair.difference == pytest.approx(4 / 7)
    assert pair.low < pair.difference < pair.high
    assert pair.test == "McNemar's test, exact"
    assert [model.num_faults for model in comparison.models] == [3, 0]


def test_several_attempts_are_tested_by_a_permutation_over_tasks() -> None:
    base = [attempt("base", at, number == 0 and at == 0, number) for at in range(8) for number in range(2)]
    new = [attempt("new", at, number == 0 or at > 3, number) for at in range(8) for number in range(2)]

    (pair,) = compare_models([*base, *new], ["base", "new"]).pairs

    # rates 0.5 0 0 0 ... against 0.5 0.5 0.5 0.5 1 1 1 1
    assert pair.difference == pytest.approx((0 + 3 * 0.5 + 4 * 1.0) / 8)
    assert pair.test == "sign-flip permutation test over tasks"
    assert pair.p_value == 2 / 2**7


def test_the_report_says_it_in_words_and_figures(tmp_path: Path) -> None:
    comparison = compare_models([*singles("base", "10000000"), *singles("a|b", "11111101")], ["base", "a|b"])

    page = format_markdown(comparison, title="8 tasks")
    write_comparison(tmp_path, comparison, title="8 tasks", settings={"seed": 0})
    write_comparison_plot(tmp_path / "results.png", comparison, title="8 tasks")

    # 1 of 8, as R's prop.test(1, 8) has it
    assert "| base | 12.5 % | 0.7 % to 53.3 % | 8 | 8 | 0 | 2.0 |" in page
    assert "| a/b | 87.5 % |" in page
    assert "## Success by category" in page
    assert "## Success by difficulty" not in page
    assert "better at 6 tasks, worse at 0, p = 0.031 (McNemar's test, exact)" in page
    assert (tmp_path / "results.md").read_text() == page
    assert '"p_value": 0.03125' in (tmp_path / "results.json").read_text()
    assert Image.open(tmp_path / "results.png").size[0] > 500


def test_the_terminal_gets_the_same_table() -> None:
    output = StringIO()
    attempts = [attempt("only", 0, True, number) for number in range(2)]
    print_comparison(compare_models(attempts, ["only"]), title="1 task", console=Console(file=output, width=120))

    assert "pass@2" in output.getvalue()
    assert "100.0 %" in output.getvalue()


def test_a_model_with_brackets_in_its_name_is_printed_under_it(capsys: pytest.CaptureFixture[str]) -> None:
    name = "base[red][/v2]"  # to a terminal's markup the end of what never began

    print_comparison(compare_models([attempt(name, 0, True)], [name]), title="1 task [v2]")

    printed = capsys.readouterr().out
    assert name in printed
    assert "1 task [v2]" in printed


def test_the_page_says_why_pass_at_k_is_left_out() -> None:
    attempts = [attempt("only", place, place == 0, number) for place in range(2) for number in range(2)]
    attempts[0] = replace(attempts[0], success=None, reward=None, num_faults=3)

    page = format_markdown(compare_models(attempts, ["only"]), title="2 tasks")

    assert "pass@2 of only is left out: faults left fewer than 2 attempts at 1 of its tasks" in page
    assert "| only | 50.0 % |" in page  # a success in one attempt, none in two: not 1 of 3


def test_a_difference_that_rounds_to_nothing_has_no_minus_and_one_task_no_plural() -> None:
    pair = PairRow(
        first="a", second="b", num_tasks=1, difference=-1e-9, low=-1e-9, high=0.5, p_value=1.0,
        num_only_first=0, num_only_second=1, test="McNemar's test, exact",
    )  # fmt: skip

    assert pair_sentence(pair) == (
        "b against a on 1 task: +0.0 points (95 % interval +0.0 to +50.0), better at 1 task, worse at 0, p = 1 "
        "(McNemar's test, exact)"
    )
