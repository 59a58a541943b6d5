"""Recipes of tinker-cookbook, unmodified and in an environment of their own, on our Tinker service."""

import asyncio
import json
import subprocess
import sys
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from random import Random

import pytest
from PIL import Image, ImageOps

from cua_rl.database.postgres import read_own_database
from cua_rl.models import TINY_QWEN3_VL
from tests.patience import patience
from tests.real.database.conftest import run_sql
from tests.real.tinker.conftest import COOKBOOK, ENVIRONMENT, ROOT, serving

CLASSES = ("cyan", "lime", "pink", "teal")
NUM_EPOCHS = 10


def run(command: list[str | Path], cwd: Path = ROOT) -> None:
    environment = {**ENVIRONMENT, "HF_HOME": str(cwd / "hub")} if cwd != ROOT else ENVIRONMENT
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=environment, timeout=patience(300)
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def read_metrics(path: Path, name: str) -> list[float]:
    """The values of a metric in a file of one JSON object a line, in order."""
    records = map(json.loads, path.read_text().splitlines())
    return [record[name] for record in records if name in record]


def draw_picture(name: str, random: Random) -> Image.Image:
    """Blocks in a class's colour and others; left and right are the same, as the cookbook flips half of them."""
    picture = Image.new("RGB", (96, 64), name)
    for x in range(0, 48, 16):
        for y in range(0, 64, 16):
            if random.random() < 0.4:
                picture.paste(tuple(random.randrange(256) for _ in range(3)), (x, y, x + 16, y + 16))
    picture.paste(ImageOps.mirror(picture.crop((0, 0, 48, 64))), (48, 0))
    return picture


def write_pictures(folder: Path) -> None:
    """The same pictures as the cookbook reads them, and as conversations for our own recipe."""
    random, lines = Random(0), list[str]()
    for name in CLASSES:
        for number in range(4):
            picture, encoded = draw_picture(name, random), BytesIO()
            for split in ("train", "test"):
                path = folder / f"dpdl-benchmark/oxford_flowers102/{split}/{name}/{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                picture.save(path)
            picture.save(encoded, "JPEG")  # as the cookbook sends it
            url = f"data:image/jpeg;base64,{b64encode(encoded.getvalue()).decode()}"
            asked = {"type": "text", "text": "What is the name of the subject in this photo?"}
            messages = [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, asked]},
                {"role": "assistant", "content": f"The subject in this photo is: {name}\n"},
            ]
            lines.append(json.dumps({"messages": messages}))
    (folder / "pictures.jsonl").write_text("\n".join(lines))


async def seed_of_the_model(folder: Path) -> int:
    """The seed that the service has chosen for the weights of its only model: the cookbook sends none."""
    async with read_own_database(folder) as url:
        ((seed,),) = run_sql(url, "SELECT seed FROM tinker_models")
    return int(str(seed))


def test_supervised_steps_on_pictures_lower_the_loss_as_our_own_recipe_does(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    # all pictures in every step, so that their order does not matter
    size = len(CLASSES) * 4
    how = ["lora_rank=16", f"batch_size={size}", "learning_rate=2e-3"]
    with serving(tmp_path, "server.max_model_len=512") as address:
        settings = ["dataset=flowers102", "renderer_name=qwen3_vl_instruct", "lr_schedule=constant", *how]
        settings += [f"num_epochs={NUM_EPOCHS}", "run_sampling_evaluator=False", "run_nll_evaluator=False"]
        places = [f"base_url={address}", f"model_name={TINY_QWEN3_VL}", f"experiment_dir={tmp_path / 'cookbook'}"]
        run([COOKBOOK, "-m", "tinker_cookbook.recipes.vlm_classifier.train", *settings, *places], tmp_path)
        seed = asyncio.run(seed_of_the_model(tmp_path / "run"))
    data = [f"data={tmp_path / 'pictures.jsonl'}", "num_eval_conversations=0", f"max_steps={NUM_EPOCHS}"]
    # the cookbook does not clip gradients
    same = [f"seed={seed}", "learning_rate_schedule=constant", "adam.grad_clip_norm=0", *how]
    run([sys.executable, "-m", "cua_rl.recipes.sft", f"log_path={tmp_path / 'ours'}", *data, *same])

    (metrics,) = (tmp_path / "cookbook").glob("*/metrics.jsonl")
    theirs = read_metrics(metrics, "train_mean_nll")
    ours = read_metrics(tmp_path / "ours/metrics.jsonl", "loss/cross_entropy")
    assert len(theirs) == len(ours) == NUM_EPOCHS
    assert theirs == pytest.approx(ours, rel=1e-4)
    assert theirs[-1] < theirs[0] / 2


def test_reinforcement_learning_of_sums_reaches_nine_tenths_of_the_reward(tmp_path: Path) -> None:
    model, logs = tmp_path / "model", tmp_path / "cookbook"
    run([sys.executable, "-m", "scripts.tiny_models.make_tiny_arithmetic_model", f"output_path={model}"])
    with serving(tmp_path, f"model_name={model}", "server.max_model_len=512") as address:
        settings = "env=arithmetic renderer_name=qwen3_instruct lora_rank=16 learning_rate=6e-4 group_size=8 "
        settings += "groups_per_batch=16 max_tokens=6 max_steps=80 save_every=0 eval_every=0"
        places = [f"base_url={address}", f"model_name={model}", f"log_path={logs}"]
        run([COOKBOOK, "-m", "tinker_cookbook.recipes.math_rl.train", *settings.split(), *places])
    rewards = read_metrics(logs / "metrics.jsonl", "env/all/reward/total")
    assert len(rewards) == 80
    assert sum(rewards[:3]) / 3 < 0.6
    assert sum(rewards[-5:]) / 5 >= 0.9
