"""Every bad configuration ends at once with a message that says expected, got and what to do, before anything loads."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.train import main
from cua_rl.renderers.qwen3_vl import load_qwen3_vl
from tests.builders import NO_TENSORS
from tests.sampling.fake_vllm import FakeVllm


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with things that bad configurations can point at; port 45871 or another one is taken."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "thesis.txt").write_text("years of work")
    (folder / "empty_model").mkdir()
    (folder / "text_model").mkdir()
    (folder / "text_model" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "text_model" / "tokenizer.json").write_bytes((TINY_QWEN3_VL / "tokenizer.json").read_bytes())
    (folder / "text_model" / "tokenizer_config.json").write_bytes(
        (TINY_QWEN3_VL / "tokenizer_config.json").read_bytes()
    )
    (folder / "text_model" / "model.safetensors").write_bytes(NO_TENSORS)
    shutil.copytree(TINY_QWEN3_VL, folder / "no_weights", ignore=shutil.ignore_patterns("*.safetensors"))
    for name, file in (("cut_weights", "model.safetensors"), ("cut_tokens", "tokenizer.json")):
        shutil.copytree(TINY_QWEN3_VL, folder / name)
        (folder / name / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 9000000\n")
    (folder / "tasks.txt").write_text("train_01_open_settings\ntrain_99_fly\n")
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text("{}")
    (folder / "run" / "metrics.jsonl").write_text('{"step": 0}\n')
    (folder / "run" / "checkpoints.jsonl").write_text("")
    (folder / "file").write_text("not a folder")
    return folder


@pytest.fixture(scope="module")
def servers() -> Generator[dict[str, str]]:
    """A model server that takes 4 images and 3,000 tokens, and a monitor that knows nobody's token."""
    fake = FakeVllm(load_qwen3_vl(TINY_QWEN3_VL), max_model_len=3000, max_images=4)
    monitor = Starlette(routes=[Route("/api/ingest/batch", lambda _: Response(status_code=401), methods=["POST"])])
    with serving_in_thread(fake.app()) as server_url, serving_in_thread(monitor) as monitor_url:
        yield {"server": server_url, "monitor": monitor_url}


BAD = [
    (["grup_size=4"], "did you mean 'group_size'"),
    (["gpus=0"], "choose among server.gpus, trainer.gpus"),
    (["loss=cross_entropy"], "expected loss to be one of importance_sampling, ppo"),
    (["server_gpus=0,0"], "server.gpus: expected"),
    (["trainer_sharding=full", "trainer_num_processes=1"], "trainer.sharding: expected 'replicated'"),
    (["trainer.context_parallel=2"], "trainer.context_parallel: expected a divisor of the 1 trainer processes"),
    (["trainer_sharding=hybrid"], "trainer.sharding: expected 'full' on one machine"),
    (["trainer.loader=unsloth"], "trainer.loader=unsloth: expected the package unsloth, got none"),
    (["trainer.kernels=liger"], "expected trainer.kernels to be one of torch, compiled"),
    (
        ["trainer.loader=unsloth", "trainer.sharding=full"],
        "trainer.sharding: expected 'replicated' with trainer.loader",
    ),
    (["trainer.num_nodes=2"], "trainer.num_nodes: expected the address of a Ray cluster in RAY_ADDRESS"),
    (["trainer.num_nodes=0"], "trainer.num_nodes: expected at least 1"),
    (["group_size=1"], "group_size: expected at least 2"),
    (["min_group_size=5", "group_size=4"], "sampling.min_group_size: expected at most group_size=4"),
    (["turn_timeout_s=0"], "turn_timeout_s: expected a number above 0"),
    (["device=gbox", "gbox_api_key=", "model_name={tiny}"], "gbox_api_key: expected the key of a GBox account"),
    (["adb_serials=emulator-5554"], "adb_serials: expected it only with device=adb"),
    (["adb_snapshot=clean"], "adb_snapshot: expected it only with device=adb"),
    (["record_devices=true"], "record_devices: expected it only with device=gbox"),
    (["project_token=t"], "project_token: expected monitor.base_url"),
    (["project_id=7"], "project_id: expected monitor.base_url"),
    (["group_size=four"], "expected group_size to be a whole number"),
    (["groups_per_batch=0"], "groups_per_batch: expected at least 1"),
    (["learning_rate=-0.001"], "learning_rate: expected at least 0"),
    (["temperature=0"], "temperature: expected a number above 0"),
    (["screen_scale=1000"], "devices.screen_scale: expected a number above 0 and at most 16"),
    (["max_tokens=0"], "max_tokens: expected at least 1"),
    (["max_tokens=4000", "max_model_len=2048"], "max_tokens: expected less than max_model_len"),
    (["max_model_len=10000000"], "max_model_len: expected at most"),
    (["lora_rank=0"], "lora_rank: expected at least 1"),
    (["lora_rank=1024"], "lora_rank: expected at most 512"),
    (["num_substeps=0"], "num_substeps: expected at least 1"),
    (["loss=reinforce"], "expected loss to be"),
    (["normalisation=mean"], "expected normalisation to be"),
    (["dual_clip=3"], "dual_clip: expected loss=ppo"),
    (["loss=ppo", "dual_clip=1"], "dual_clip: expected more than 1"),
    (["tis_cap=0"], "tis_cap: expected more than 0"),
    (["icepop_low=2"], "icepop_low: expected 0 to 1"),
    (["kl_loss_coef=0.1", "kl_penalty_coef=0.1"], "kl_loss_coef: expected 0 where"),
    (["warmup_steps=24"], "warmup_steps: expected less than max_steps=24"),
    (["adam_beta2=1"], "adam_beta2"),
    (["reward=shapd"], "did you mean 'shaped'"),
    (["reward=no_such_module:reward"], "ModuleNotFoundError"),
    (["eval_attempts=0"], "eval_attempts: expected at least 1"),
    (["max_steps_off_policy=2"], "force_untruncated=true"),
    (["num_substeps=2"], "expected one that clips where num_substeps=2, got importance_sampling"),
    (["num_substeps=2", "tis_cap=2"], "expected one that clips where num_substeps=2, got importance_sampling"),
    (["replay_successes=true"], "expected one that bounds the ratio where replay_successes=True"),
    (["replay_successes=true", "loss=decoupled_ppo"], "got decoupled_ppo without tis_cap or icepop_high"),
    (["max_steps_off_policy=2", "loss=decoupled_ppo"], "decoupled_ppo without tis_cap or icepop_high"),
    (["load_checkpoint_path={place}/run"], "to continue that run, drop it and set log_path="),
    (["vllm_args=--block-size '32"], "server.vllm_args: expected options of vLLM's server"),
    (["base_url={server}", "vllm_args=--block-size 32"], "with base_url, whose server has been started already"),
    (["server_dtype=float16"], "expected server_dtype to be one of auto, float32, bfloat16"),
    (["server_start_timeout_s=0"], "server.start_timeout_s: expected a number above 0"),
    (["box_type=linux", "device=simulator"], "box_type: expected 'android'"),
    (["renderer_name=llama3"], "renderer"),
    (["model_name={place}/nowhere"], "model_name: expected"),
    ([f"model_name={'long' * 64}"], "check its permissions: OSError"),
    ([f"log_path={{place}}/{'long' * 64}"], "choose another: OSError"),
    (["model_name={place}/empty_model"], "without config.json"),
    (["model_name={place}/text_model"], "a model that sees screenshots"),
    (["load_checkpoint_path={place}/weights/000080"], "load_checkpoint_path: expected"),
    (['tasks={{"source_type": "demo_trainig"}}'], "demo_training"),
    (['tasks={{"source_type": "ids", "task_ids": ["train_02_enable_wfi"]}}'], "train_02_enable_wifi"),
    (['tasks={{"source_type": "file", "file_path": "{place}/no_tasks.txt"}}'], "no_tasks.txt"),
    (['tasks={{"source_type": "file", "file_path": "{place}/tasks.txt"}}'], "train_99_fly"),
    (["gateway_port=45", "monitor_port=45"], "monitor.port: expected another port than gateway.port"),
    (["server_port={port}"], "server.port: expected a free port"),
    (["log_path={place}/foreign"], "expected log_path to be a new folder"),
    (["log_path={place}/run"], "behavior_if_log_dir_exists"),
    (["log_path={place}/file/run"], "log_path"),
    (["lora_modules=[]"], "trainer.lora_modules: expected parts of the model to adapt, got none"),
    (["model_name={place}/no_weights"], "expected a model folder with all its weights"),
    (["wandb_project=phones"], "wandb_project: expected the package wandb"),
    (["device=adb", "model_name={tiny}"], "device: expected the program adb on the PATH"),
    (["model_name={place}/cut_weights"], "cut_weights/model.safetensors is cut short"),
    (["model_name={place}/cut_tokens"], "cut_tokens/tokenizer.json is not JSON"),
    (["base_url=http://127.0.0.1:{dead}"], "base_url: expected a vLLM server"),
    (["base_url=http://[::1"], "base_url: expected a vLLM server"),
    (["base_url={server}", "max_model_len=4096"], "max_model_len: expected at most 3000, the context of the server"),
    (["base_url={server}", "max_turns=9", "tasks.source_type=demo_all"], "At most 4 image(s)"),
    (
        ["monitor_base_url=http://127.0.0.1:{dead}", "project_token=t"],
        "monitor.base_url: expected a monitor that answers",
    ),
    (["monitor_base_url=http://[::1", "project_token=t"], "monitor.base_url: expected an address"),
    (["judge_base_url=http://[::1/v1", "judge_model=m"], "judge.base_url: expected an address"),
    (["monitor_base_url={monitor}", "project_token=wrong"], "project_token: expected the token of a project"),
    (["monitor_base_url={server}", "project_token=t"], "monitor.base_url: expected a monitor that accepts runs"),
    (["max_model_len=700", "tasks.source_type=demo_all"], "max_model_len: expected at least"),
    (["max_images=3", "tasks.source_type=demo_all"], "max_images: expected at least"),
    (
        ["screen_scale=4", "history=full", "tasks.source_type=demo_all"],
        "or drop old screenshots with history=block_drop",
    ),
    (['tasks={{"source_type": "miniwob"}}'], "model_name: expected the name of a model for miniwob"),
    (['tasks={{"source_type": "desktop"}}'], "model_name: expected the name of a model for desktop"),
    (
        [
            'tasks={{"source_type": "gym", "gym_base_url": "http://127.0.0.1:{dead}"}}',
            "model_name={tiny}",
            "max_model_len=4096",
            "agent=mini_agent",
        ],
        "check gym_base_url",
    ),
    (["agent=external", "agent.url=http://127.0.0.1:{dead}/run"], "agent.url: expected a server that answers"),
    (["device=gbox", "gbox_api_key=key"], "model_name: expected the name of a model for gbox"),
    (
        ["device=adb", 'tasks={{"source_type": "desktop"}}', "model_name={tiny}"],
        "device: expected none, got 'adb', but tasks of desktop bring their own devices",
    ),
]


@pytest.mark.parametrize("mode", ["run", "dry_run"])
@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_a_bad_configuration_is_refused_before_anything_loads(
    arguments: list[str],
    message: str,
    mode: str,
    place: Path,
    servers: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(place))  # no adb
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {"place": place, "tiny": TINY_QWEN3_VL, "port": taken.getsockname()[1], "dead": free_port(), **servers}
        filled = [text.format(**names) for text in arguments]
        if not any(text.startswith("log_path") for text in filled):
            filled.append(f"log_path={place}/new")
        if mode == "dry_run":
            filled.append("dry_run=true")
        started = time.process_time()

        status = main(filled)

    stderr = capsys.readouterr().err
    assert status == 2, stderr
    assert time.process_time() - started < 3  # the clock adds two seconds for a server that does not answer
    assert len(stderr.splitlines()) >= 3, f"expected / got / do: {stderr}"
    assert message in stderr.replace("\n    ", ", ")
    assert "Traceback" not in stderr
    assert not (place / "new").exists()
    assert (place / "foreign" / "thesis.txt").read_text() == "years of work"


def test_an_unreachable_database_is_refused_and_its_password_not_shown(place: Path) -> None:
    done = run_program([f"log_path={place}/new"], DATABASE_URL="postgresql://somebody:s3cret-word@127.0.0.1:1/training")

    assert done.returncode == 2, done.stderr
    assert "expected a Postgres server" in done.stderr
    assert "s3cret-word" not in done.stderr


def test_refusing_a_configuration_loads_no_model_library(place: Path) -> None:
    done = run_program([f"model_name={place}/text_model", f"log_path={place}/new"], PYTHONPROFILEIMPORTTIME="1")

    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == 2, done.stderr
    assert "cua_rl" in imported
    assert not imported & {"torch", "vllm", "transformers", "peft"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving_in_thread(app: Starlette) -> Generator[str]:
    """Serve beside a recipe, which has an event loop of its own."""
    server = uvicorn.Server(uvicorn.Config(app, port=free_port(), log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.config.port}"
    finally:
        server.should_exit = True
        thread.join()


def run_program(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cua_rl.recipes.train", *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
