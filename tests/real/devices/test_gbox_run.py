"""The training recipe on GBox boxes: real model server, real trainer, real database, the real SDK."""

from pathlib import Path

import pytest

from tests.doubles.gbox_server import KEY
from tests.doubles.gbox_service import serve_gbox_in_thread
from tests.real.end_to_end.runs import Run

pytestmark = pytest.mark.timeout(600)


def test_a_run_trains_on_boxes_and_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_gbox_in_thread() as gbox:
        gbox.double.faults.rate = 0.01
        monkeypatch.setenv("GBOX_API_KEY", KEY)
        monkeypatch.setenv("GBOX_CLIENT_BASE_URL", gbox.base_url)

        run = Run(tmp_path / "run", "device=gbox", "max_steps=1", "eval_tasks=None", "max_concurrent_rollouts=8")

        assert run.finish() == 0, run.output()
        assert gbox.double.alive == []
        assert gbox.double.most_alive <= 8
    (step,) = run.steps()
    assert step["rollout/num_rollouts"] == 16
    assert step["rollout/prompt_mismatches"] == 0
    assert step["rollout/retokenised_tokens"] == 0
    assert step.get("policy/parity_mean_abs", 0.0) <= 0.005
    assert step["device/num_leases"] >= 16
    written = "".join(path.read_text(errors="replace") for path in run.folder.glob("*.json*"))
    written += "".join(path.read_text(errors="replace") for path in (run.folder / "logs").glob("*.log"))
    assert KEY not in written + run.output()
