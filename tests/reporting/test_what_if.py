"""What is printed about a step with other settings."""

import pytest

from cua_rl.reporting.what_if import RolloutChange, Variant, print_variants


def test_tasks_with_brackets_in_their_names_are_printed_under_them(capsys: pytest.CaptureFixture[str]) -> None:
    changes = [
        RolloutChange(rollout_id="r", task_id=name, success=True, advantage=1.0, change=2.0)
        for name in ("app[red]", "app[/open]")
    ]
    taken = Variant(settings={}, norm=1.0, relative_norm=1.0, cosine=1.0, gradient_cosine=1.0, rollouts=changes)

    print_variants([taken], step=3)

    printed = capsys.readouterr().out
    assert "app[red]" in printed
    assert "app[/open]" in printed
