import json
from pathlib import Path

import pytest

from cua_rl.renderers.renderer import make_renderer
from scripts.tiny_models import make_tiny_arithmetic_model
from scripts.tiny_models.make_tiny_model import TinyModelConfig, main


async def test_the_recipe_makes_a_whole_model_folder_from_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_path = tmp_path / "model"
    config = TinyModelConfig(
        output_path=output_path,
        grounding_steps=1,
        perfect_steps=2,
        imperfect_steps=1,
        batch_size=2,
        eval_lessons=2,
        num_threads=1,
    )
    await main(config)
    assert make_renderer(output_path).name == "qwen3_vl"
    assert {file.name for file in output_path.iterdir()} >= {
        "model.safetensors",
        "chat_template.jinja",
        "tokenizer_config.json",
        "preprocessor_config.json",
        "generation_config.json",
    }
    assert json.loads((output_path / "config.json").read_text())["model_type"] == "qwen3_vl"
    printed = capsys.readouterr().out
    assert "open_app=" in printed
    assert f"saved {output_path}" in printed


async def test_the_model_that_adds_is_the_same_each_time_it_is_made(tmp_path: Path) -> None:
    for name in ("one", "two"):
        config = make_tiny_arithmetic_model.TinyArithmeticModelConfig(output_path=tmp_path / name, num_steps=2)
        await make_tiny_arithmetic_model.main(config)
    assert make_renderer(tmp_path / "one").name == "qwen3_vl"
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
