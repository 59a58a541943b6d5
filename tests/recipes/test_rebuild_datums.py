import json
from pathlib import Path

import pytest

from cua_rl.errors import ConfigError
from cua_rl.recipes.rebuild_datums import RebuildConfig, cli_main


async def test_a_folder_that_is_not_of_a_training_run_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="log_path: expected the folder of a training run")
    with refused:
        await cli_main(RebuildConfig(log_path=tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"models": [], "run_name": "an evaluation"}))
    with refused:
        await cli_main(RebuildConfig(log_path=tmp_path))
