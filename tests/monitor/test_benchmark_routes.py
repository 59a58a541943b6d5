"""Benchmarks on disk, among files of all kinds."""

import json
from pathlib import Path

from cua_rl.monitor.benchmark_routes import load_benchmarks


def test_one_file_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    for name in ("good", "deep", "latin", "gone"):
        (tmp_path / name).mkdir()
    (tmp_path / "good/results.json").write_text(json.dumps({"models": []}))
    (tmp_path / "deep/results.json").write_text('{"a":' * 100_000)
    (tmp_path / "latin/results.json").write_text("{}")
    (tmp_path / "latin/results.md").write_bytes(b"# r\xe9sultats")
    (tmp_path / "gone/results.json").symlink_to(tmp_path / "nowhere")

    found = load_benchmarks(tmp_path)
    assert [benchmark.name for benchmark in found.benchmarks] == ["good"]
    assert found.num_others == 2


def test_results_beyond_the_newest_hundred_are_counted(tmp_path: Path) -> None:
    for number in range(103):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}/results.json").write_text(json.dumps({"models": []}))

    found = load_benchmarks(tmp_path)

    assert (len(found.benchmarks), found.num_others) == (100, 3)
