"""Models that can be trained, and with which adapters."""

from pathlib import Path

import pytest

from cua_rl.run_folder.model_folder import require_trainable
from cua_rl.types.errors import ConfigError


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_a_mixture_of_experts_gets_adapters_on_its_language_model_alone(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    require_trainable(tmp_path, 8)
    with pytest.raises(ConfigError, match=r"lora_modules: expected only language for a model of type"):
        require_trainable(tmp_path, 8, ("language", "vision"))
