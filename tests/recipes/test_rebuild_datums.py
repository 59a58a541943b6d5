import json
from pathlib import Path

import pytest

from cua_rl.planning.plan_config import plan_presets
from cua_rl.recipes.export_model import ExportModelConfig, find_source
from cua_rl.recipes.rebuild_datums import RebuildConfig, cli_main
from cua_rl.types.errors import ConfigError


async def test_a_folder_that_is_not_of_a_training_run_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="run: expected the folder of a training run")
    with refused:
        await cli_main(RebuildConfig(run=tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"models": [], "run_name": "an evaluation"}))
    with refused:
        await cli_main(RebuildConfig(run=tmp_path))


async def test_a_run_with_cut_settings_is_refused_by_their_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_path": ')
    (tmp_path / "checkpoints.jsonl").write_text("")
    complaint = r"expected a run's settings in .*config.json.*JSONDecodeError"

    with pytest.raises(ConfigError, match=f"run: {complaint}"):
        await cli_main(RebuildConfig(run=tmp_path))
    with pytest.raises(ConfigError, match=f"run: {complaint}"):
        find_source(ExportModelConfig(run=tmp_path, out=tmp_path / "out"))
    with pytest.raises(ConfigError, match=f"from_run: {complaint}"):
        plan_presets({"from_run": [str(tmp_path)]})
