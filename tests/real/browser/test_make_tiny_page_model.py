from pathlib import Path

import pytest

from cua_rl.renderers.renderer import make_renderer
from scripts.tiny_models.make_tiny_page_model import TinyPageModelConfig, main


async def test_the_recipe_makes_a_model_for_pages_from_the_one_for_phones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_path = tmp_path / "model"
    config = TinyPageModelConfig(
        output_path=output_path,
        num_screens=64,
        grounding_steps=1,
        perfect_steps=1,
        imperfect_steps=1,
        batch_size=2,
        text_lessons=1,
        num_threads=1,
    )
    await main(config)
    assert make_renderer(output_path).name == "qwen3_vl"
    printed = capsys.readouterr().out
    assert "screen=0/160" in printed
    assert "right=" in printed
    assert f"saved {output_path}" in printed
