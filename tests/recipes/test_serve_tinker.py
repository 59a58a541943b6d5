import asyncio
import json
from pathlib import Path

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from cua_rl.command_line.fields import with_values
from cua_rl.command_line.plain_config import plain_config
from cua_rl.host.http_server import serve_app
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.serve_tinker import (
    ServeTinkerConfig,
    base_model_name,
    cli_main,
    once_there,
    prepare,
    require_same_models,
)
from cua_rl.run.prepared_training import prepare_training
from cua_rl.run.training_config import CLIConfig
from cua_rl.sampling.config import ServerConfig
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import ConfigError


def stored(config: ServeTinkerConfig) -> dict[str, object]:
    return json.loads(json.dumps(plain_config(config)))


def test_a_folder_keeps_what_its_models_are_made_of() -> None:
    before = stored(ServeTinkerConfig())
    require_same_models(before, plain_config(with_values(ServeTinkerConfig(), port=0, max_models=2)))
    for changed in (
        ServeTinkerConfig(model_name="org/other"),
        ServeTinkerConfig(trainer=TrainerConfig(lora_alpha=16)),
        ServeTinkerConfig(trainer=TrainerConfig(lora_modules=("language", "vision"))),
    ):
        with pytest.raises(ConfigError, match="as when the models in log_path were made"):
            require_same_models(before, plain_config(changed))


async def test_what_is_left_open_is_chosen_before_anything_starts() -> None:
    prepared = await prepare(ServeTinkerConfig(lora_rank=8), {})
    assert prepared.config.server.model_path == prepared.config.trainer.model_path == TINY_QWEN3_VL
    assert prepared.config.server.max_lora_rank >= 8
    assert prepared.config.server.max_num_seqs is not None
    assert prepared.folder.name == "tinker-tiny"


async def test_a_context_that_does_not_hold_the_proof_of_adapters_is_refused_before_anything_starts() -> None:
    # 64 image tokens, and a token per byte of what the included model has no words for
    needed = "server.max_model_len: expected at least 154, for the prompt that proves adapters"
    with pytest.raises(ConfigError, match=f"{needed}, got 153; raise it"):
        await prepare(with_values(ServeTinkerConfig(), server=ServerConfig(max_model_len=153)), {})
    await prepare(with_values(ServeTinkerConfig(), server=ServerConfig(max_model_len=154)), {})
    run = with_values(CLIConfig(), max_tokens=32, server=ServerConfig(max_model_len=153))
    with pytest.raises(ConfigError, match=needed):
        await prepare_training(run, {})


def test_clients_name_a_folder_by_its_absolute_path_and_a_model_of_the_hub_without_a_revision(tmp_path: Path) -> None:
    assert base_model_name(None, TINY_QWEN3_VL) == str(TINY_QWEN3_VL)
    assert base_model_name(str(tmp_path), tmp_path) == str(tmp_path)
    assert base_model_name("Qwen/Qwen3-VL-4B-Instruct@main", tmp_path / "snapshot") == "Qwen/Qwen3-VL-4B-Instruct"


async def test_a_short_key_in_the_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="TINKER_API_KEY: expected at least 16 characters, got 5"):
        await cli_main(ServeTinkerConfig(), {"TINKER_API_KEY": "short"})


async def test_requests_wait_while_the_service_starts() -> None:
    app: asyncio.Future[ASGIApp] = asyncio.get_running_loop().create_future()
    async with serve_app(once_there(app), "127.0.0.1", 0) as address, httpx.AsyncClient(base_url=address) as client:
        asked = [asyncio.create_task(client.get("/api/v1/healthz", timeout=60.0)) for _ in range(3)]
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/api/v1/healthz", timeout=0.2)
        assert not any(each.done() for each in asked)
        app.set_result(JSONResponse({"status": "ok"}))
        assert [(await each).json() for each in asked] == [{"status": "ok"}] * 3
