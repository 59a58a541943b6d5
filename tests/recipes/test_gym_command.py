"""`train.sh`: short flags of a gym run, as settings of the training recipe."""

import asyncio
import json
import os
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cua_rl.command_line.parsing import parse_command_line
from cua_rl.host.http_server import serve_app
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.gym_command import FLAGS, format_flags, translate
from cua_rl.run.training_config import CLIConfig
from cua_rl.types.errors import ConfigError
from tests.agent.gym_bench import open_gym

ROOT = Path(__file__).parents[2]


def parse(*argv: str, **environ: str) -> CLIConfig:
    return parse_command_line(CLIConfig, translate(argv, environ))


def test_every_flag_says_a_setting() -> None:
    flags = {
        "--gym": "http://gym:5010",
        "--gym-id": "my_gym",
        "--gbox-mini-url": "http://mini:3000",
        "--gbox-agent": "qwen3-vl",
        "--standard-action-space": "pc",
        "--model-base-url": "http://vllm:8000/v1",
        "--model-name": "some/model",
        "--monitor-base-url": "https://monitor.example.com",
        "--project-id": "7",
        "--project-token": "token",
        "--batch-size": "4",
        "--max-concurrent-rollouts": "16",
        "--limit-mm-per-prompt": '{"image": 64}',
        "--max-turns": "30",
        "--max-task-time": "600",
        "--max-step-time": "120",
        "--gym-train-ratio": "0.9",
        "--gym-seed": "42",
        "--gym-limit": "10",
        "--gym-tags": '["easy"]',
    }

    config = parse(*(word for pair in flags.items() for word in pair))

    assert config == parse(*(f"{flag}={value}" for flag, value in flags.items()))
    agent, devices = config.agent, config.devices
    assert (devices.gym_base_url, devices.gym_id, agent.name) == (
        "http://gym:5010",
        "my_gym",
        "mini_agent",
    )
    assert (agent.gbox_mini_agent_base_url, agent.gbox_mini_agent_agent) == (
        "http://mini:3000",
        "qwen3-vl",
    )
    assert agent.gbox_mini_agent_standard_action_space == "pc"
    assert (config.base_url, config.model_name) == ("http://vllm:8000/v1", "some/model")
    assert (config.monitor.base_url, config.monitor.project_id, config.monitor.project_token) == (
        "https://monitor.example.com", "7", "token",
    )  # fmt: skip
    assert (config.groups_per_batch, config.max_concurrent_rollouts, config.server.max_images) == (4, 16, 64)
    assert (config.max_turns, devices.task_timeout_s, devices.turn_timeout_s) == (30, 600.0, 120.0)
    assert config.tasks == {"source_type": "gym", "train_ratio": 0.9, "seed": 42, "limit": 10, "tags": ["easy"]}
    assert config.eval_tasks == config.tasks


def test_other_arguments_pass_and_what_stands_last_wins() -> None:
    config = parse(
        "--batch-size", "4", "groups_per_batch=2", "learning_rate=1e-4", "agent=gbox", "gym_id=a", MODEL_NAME="m"
    )

    assert (config.groups_per_batch, config.learning_rate) == (2, 1e-4)
    assert (config.agent.name, config.devices.gym_id) == ("gbox", "a")
    assert config.model_name == "m"
    assert parse("--batch-size", "4", BATCH_SIZE="8").groups_per_batch == 4
    assert parse("--tasks", '{"source_type": "demo_all"}', "agent=gbox").tasks == {"source_type": "demo_all"}
    assert parse("rollout.max_concurrent_rollouts=8", "model_base_url=http://a/v1").base_url == "http://a/v1"


def test_settings_of_a_file_are_not_overruled_by_what_a_gym_run_is(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("agent: gbox\ntasks: {source_type: gym, limit: 3}\n")

    config = parse("--config", str(tmp_path / "run.yaml"), "--gym-limit", "5")

    assert (config.agent.name, config.tasks) == ("gbox", {"source_type": "gym", "limit": 5})


def test_wrong_flags_are_explained() -> None:
    with pytest.raises(ConfigError, match="expected a value after '--gym'"):
        parse("--gym", "--gym-id", "a")
    with pytest.raises(ConfigError, match="limit_mm_per_prompt: expected a limit of images"):
        parse("--limit-mm-per-prompt", "64")
    with pytest.raises(ConfigError, match=r"did you mean 'devices\.gym_id'"):
        parse("--gym-ids", "a")


def test_help_lists_every_flag() -> None:
    text = format_flags()

    for flags in FLAGS.values():
        for flag in flags:
            assert f"--{flag.replace('_', '-')}" in text


async def test_the_script_finds_tasks_and_model_by_two_addresses(tmp_path: Path) -> None:
    """The command of the first users, dry: a gym server, and a model server that says what it serves."""

    async def models(request: Request) -> Response:
        card = {"id": "base", "root": str(TINY_QWEN3_VL), "parent": None, "max_model_len": 4096}
        return JSONResponse({"data": [card]})

    server = Starlette(routes=[Route("/v1/models", models)])
    async with open_gym() as (_, gym_url), serve_app(server, "127.0.0.1", 0, grace_s=0) as model_url:
        process = await asyncio.create_subprocess_exec(
            *(ROOT / "train.sh", "--gym", gym_url, "--gym-id", "phones", "--model-base-url", f"{model_url}/v1"),
            *("--gbox-mini-url", gym_url),  # any server that answers
            *(
                "--batch-size",
                "2",
                "max_model_len=4096",
                "max_tokens=64",
                "dry_run=true",
                f"log_path={tmp_path / 'run'}",
            ),
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if name != "DATABASE_URL"},
            stdout=PIPE,
            stderr=PIPE,
        )
        output, errors = await process.communicate()

    assert process.returncode == 0, errors.decode()
    effective = json.loads(output)
    assert (effective["model_path"], effective["agent"]["name"]) == (str(TINY_QWEN3_VL), "mini_agent")
    assert (effective["groups_per_batch"], effective["max_concurrent_rollouts"]) == (2, 8)
