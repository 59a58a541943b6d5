"""How people name weights that a run has saved."""

import json
from pathlib import Path

from cua_rl.run_folder.checkpoints import find_saved


def test_weights_are_named_by_their_folder_by_their_run_or_by_run_and_step(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    steps = [{"step": step, "sampler_path": f"sampler_weights/{step:06d}"} for step in (10, 20)]
    (run / "checkpoints.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))

    assert find_saved(f"{run}/sampler_weights/000010", "sampler_weights") == run / "sampler_weights/000010"
    assert find_saved(str(run), "sampler_weights") == run / "sampler_weights/000020"
    assert find_saved(f"{run}@10", "sampler_weights") == run / "sampler_weights/000010"
    assert find_saved(f"{run}@10", "weights") == run / "weights/000010"
    # a run to train on from is resumed, or its step is named
    assert find_saved(str(run), "weights") == run


def test_a_folder_whose_name_ends_like_a_step_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "weights@2"
    folder.mkdir()

    assert find_saved(str(folder), "sampler_weights") == folder
