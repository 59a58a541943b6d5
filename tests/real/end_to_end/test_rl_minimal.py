from itertools import pairwise
from pathlib import Path

from safetensors.numpy import load_file

from cua_rl.recipes import rl_minimal


def test_the_algorithm_fits_on_a_page() -> None:
    assert len(Path(rl_minimal.__file__).read_text().splitlines()) <= 200


async def test_the_minimal_recipe_trains_the_adapter_that_the_server_samples_from(tmp_path: Path) -> None:
    success = await rl_minimal.train(tmp_path, num_steps=2, groups_per_batch=4)

    assert 0.1 < success <= 1.0  # the tiny model succeeds in a quarter of its tries; a broken server in none
    adapters = [load_file(tmp_path / f"policy-{step}" / "adapter_model.safetensors") for step in range(3)]
    up_projections = [name for name in adapters[0] if "lora_B" in name]
    assert all(not adapters[0][name].any() for name in up_projections)  # a fresh adapter changes nothing
    for before, after in pairwise(adapters):
        assert any((before[name] != after[name]).any() for name in up_projections)
