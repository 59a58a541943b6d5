"""What is looked for before a run starts, where it is there."""

import asyncio
import json
import re
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cua_rl.command_line.fields import with_values
from cua_rl.environments.device import Screen
from cua_rl.host.http_server import serve_app
from cua_rl.machine.machine import Machine
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.monitor.sender import MonitorAddress
from cua_rl.renderers.qwen3_vl import load_qwen3_vl
from cua_rl.run.preflight import (
    choose_history,
    most_screenshots,
    plan_max_images,
    require_model_server,
    require_monitor,
    require_room,
    wait_for_servers,
    wait_until_it_answers,
)
from cua_rl.run.prepared_training import prepare_training
from cua_rl.run.resolve import resolve, rounding_limit
from cua_rl.run.rollout_config import AgentSettings
from cua_rl.run.training_config import CLIConfig, MonitorSettings
from cua_rl.run_folder.model_folder import make_image_renderer
from cua_rl.sampling.config import ServerConfig
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import ConfigError, DatabaseError
from tests.sampling.fake_vllm import FakeVllm

PHONE = Screen(kind="android", width_px=192, height_px=320)


def test_the_last_prompt_shows_one_screenshot_a_turn_unless_history_drops_some() -> None:
    assert most_screenshots(CLIConfig(), 7) == 7
    assert most_screenshots(CLIConfig(agent=AgentSettings(history="last_n", history_images=3)), 7) == 3
    assert most_screenshots(CLIConfig(agent=AgentSettings(history="block_drop", history_images=8)), 7) == 7
    assert plan_max_images(CLIConfig(), 40) == 40
    assert plan_max_images(CLIConfig(server=ServerConfig(max_images=64)), 40) == 64
    # other agents may show several a turn
    assert plan_max_images(CLIConfig(agent=AgentSettings(name="external", url="http://a")), 4) == 32


def test_room_is_counted_to_the_token() -> None:
    renderer = load_qwen3_vl(TINY_QWEN3_VL)
    config = CLIConfig(max_turns=5, max_tokens=48)
    with pytest.raises(ConfigError) as refused:
        require_room(config, renderer, PHONE, num_turns=9, max_model_len=64)
    # 192 x 320 pixels are 6 x 10 image tokens and two marks; at most max_turns of them
    assert "5 screenshots of at least 62" in str(refused.value)
    needed = int(str(refused.value).split("at least ")[1].split()[0])

    require_room(config, renderer, PHONE, num_turns=9, max_model_len=needed)
    with pytest.raises(ConfigError):
        require_room(config, renderer, PHONE, num_turns=9, max_model_len=needed - 1)


def test_screens_that_do_not_fit_are_dropped_in_blocks_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    renderer = load_qwen3_vl(TINY_QWEN3_VL)
    config = CLIConfig(max_turns=20, max_tokens=256, agent=AgentSettings(history_images=12))
    full_hd = Screen(kind="android", width_px=1080, height_px=2400)

    roomy = choose_history(config, full_hd, [(renderer, 65536)], 20)
    tight = choose_history(config, full_hd, [(renderer, 65536), (renderer, 8192)], 20)

    assert roomy.agent.history == "full"
    # 8,192 less 20 answers of 200, a last one of 256 and the instructions hold three screens of 21 x 47 + 2 tokens
    assert (tight.agent.history, tight.agent.history_images) == ("block_drop", 3)
    assert "20 turns, each with a screenshot of 989 tokens, do not fit into max_model_len=8192" in caplog.text
    require_room(tight, renderer, full_hd, num_turns=20, max_model_len=8192)


def test_a_history_that_was_set_stays() -> None:
    config = CLIConfig(agent=AgentSettings(history="full"))

    assert choose_history(config, PHONE, [(load_qwen3_vl(TINY_QWEN3_VL), 64)], 20) is config
    # an agent that takes its own screenshots edits its own history
    assert choose_history(CLIConfig(), None, [], 20).agent.history == "full"


async def test_a_server_that_holds_all_this_is_taken() -> None:
    renderer = load_qwen3_vl(TINY_QWEN3_VL)
    fake = FakeVllm(renderer, max_model_len=2048, max_images=4)
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url:
        for address in (url, f"{url}/v1"):
            await require_model_server(address, renderer, max_model_len=2048, num_images=4)


async def test_a_server_that_scales_screenshots_otherwise_is_refused() -> None:
    limit = 512 * 512
    smaller = make_image_renderer(TINY_QWEN3_VL, None, limit)
    fake = FakeVllm(load_qwen3_vl(TINY_QWEN3_VL), max_model_len=2048)
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url:
        # 1080x2400 pixels become 672x1504, 21 x 47 tokens, and 320x736, 10 x 23 tokens
        with pytest.raises(ConfigError, match=r'pixels in 230 tokens, .* got 987 from .*{"max_pixels": 262144}'):
            await require_model_server(url, smaller, max_model_len=2048, num_images=4)


async def test_what_a_resumed_run_waits_for_is_said_at_once_and_every_30_s(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]

    async def ask() -> None:
        now[0] += 10
        if now[0] < 100:
            raise DatabaseError("refused")

    await wait_until_it_answers("the database", ask, retry_s=0, clock=lambda: now[0])

    said = capsys.readouterr().err.splitlines()
    assert said == [f"waiting for the database, {after} so far: refused" for after in ("10s", "30s", "1m00s", "1m30s")]


async def test_a_server_that_never_comes_ends_the_wait_with_its_own_error() -> None:
    now = [0.0]

    async def ask() -> None:
        now[0] += 100
        raise DatabaseError(f"refused at {now[0]:.0f}")

    with pytest.raises(DatabaseError, match="refused at 700"):  # 600 s are over
        await wait_until_it_answers("the database", ask, retry_s=0, clock=lambda: now[0])


async def test_a_model_server_that_starts_later_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = CLIConfig(base_url=f"http://127.0.0.1:{port}")
    waiting = asyncio.create_task(wait_for_servers(config, {}))
    said = ""
    while not said:
        await asyncio.sleep(0.01)
        said = capsys.readouterr().err
    async with serve_app(FakeVllm(load_qwen3_vl(TINY_QWEN3_VL)).app(), "127.0.0.1", port, grace_s=0):
        await waiting

    assert re.match(
        rf"waiting for the model server http://127.0.0.1:{port}, \d+s so far: base_url: expected a vLLM", said
    )


async def test_what_answers_and_is_no_model_server_is_not_waited_for() -> None:
    async with serve_app(Starlette(), "127.0.0.1", 0, grace_s=0) as url:
        with pytest.raises(ConfigError, match="expected a vLLM server"):
            await wait_for_servers(CLIConfig(base_url=url), {})


@pytest.mark.parametrize(("status", "refused"), [(422, None), (404, "status 404"), (403, "project_token")])
async def test_a_monitor_that_asks_for_more_than_an_empty_batch_is_one(status: int, refused: str | None) -> None:
    async def take(_: Request) -> Response:
        return Response("", status)

    async with serve_app(
        Starlette(routes=[Route("/api/ingest/batch", take, methods=["POST"])]), "127.0.0.1", 0, grace_s=0
    ) as url:
        with nullcontext() if refused is None else pytest.raises(ConfigError, match=refused):
            await require_monitor(MonitorAddress(base_url=url, token="token"))


async def test_a_run_that_goes_on_may_begin_while_its_monitor_is_away(tmp_path: Path) -> None:
    config = CLIConfig(
        log_path=str(tmp_path / "run"), monitor=MonitorSettings(base_url="http://127.0.0.1:9", project_token="token")
    )
    with pytest.raises(ConfigError, match=r"monitor\.base_url: expected a monitor that answers"):
        await prepare_training(config, {})
    (tmp_path / "run" / "monitor_spool").mkdir(parents=True)

    plan = await prepare_training(config, {})

    assert plan.monitor is not None


@pytest.mark.parametrize(
    ("model_type", "usual", "half"), [("qwen3_vl", 0.02, 0.1), ("qwen3_5", 0.1, 0.1), ("qwen3_vl_moe", 0.02, 0.2)]
)
def test_what_rounding_explains_depends_on_precision_and_family(
    tmp_path: Path, model_type: str, usual: float, half: float
) -> None:
    """Without a GPU, where vLLM serves Qwen3.5 in bfloat16 only."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    config = CLIConfig(server=ServerConfig(model_path=tmp_path))

    assert rounding_limit(config) == usual
    assert rounding_limit(with_values(config, trainer=TrainerConfig(dtype="bfloat16"))) == half


@pytest.mark.parametrize("given", [None, 0.3])
def test_a_limit_that_nobody_has_chosen_is_what_rounding_explains(given: float | None) -> None:
    machine = Machine(gpus=(), gpu_gib=None, host_gib=8.0)

    # 0.3 is more than the embedded demo's preset
    config, _ = resolve(CLIConfig(trainer=TrainerConfig(parity_limit=given)), machine, TINY_QWEN3_VL)

    assert config.trainer.parity_limit == (given or 0.02)
