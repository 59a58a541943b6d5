"""One real vLLM, reached in all ways that the recipe knows: as base model, under adapters, and as plain endpoint."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cua_rl.command_line.fields import with_values
from cua_rl.recipes.evaluate import cli_main
from cua_rl.recipes.export_rollout import ExportConfig
from cua_rl.recipes.export_rollout import cli_main as export_page
from cua_rl.recipes.export_trajectories import ExportTrajectoriesConfig
from cua_rl.recipes.export_trajectories import cli_main as export_data
from cua_rl.run.evaluation_config import EvaluateConfig
from cua_rl.run.suite import SuiteConfig, run_suite
from cua_rl.sampling.address import split_address
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.server import VllmServer
from cua_rl.types.errors import ConfigError
from tests.real.evaluation.shown import fetch_rollouts, fetch_runs, get, open_monitor
from tests.run.test_evaluate_config import write_adapter

pytestmark = pytest.mark.timeout(600)


async def test_all_ways_to_a_model_give_judged_attempts_on_the_same_tasks(
    server: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDPOINT_API_KEY", server.api_key or "none")
    fresh, wild = write_adapter(tmp_path / "fresh", update=0.0), write_adapter(tmp_path / "wild", update=50.0)
    endpoint = {"model": server.model.name, "api_key_env": "ENDPOINT_API_KEY"}
    async with tcp_address(server) as base_url:
        config = EvaluateConfig(
            models=[
                {"name": "base"},
                {"name": "fresh", "adapter": str(fresh)},
                {"name": "wild", "adapter": str(wild)},
                {"name": "chat", "api": "chat", "base_url": base_url, "extra": {"tool_choice": "none"}, **endpoint},
                {"name": "responses", "api": "responses", "base_url": base_url, **endpoint},
            ],
            tasks={"source_type": "demo_eval", "tags": ["demo"]},
            num_tasks=16,
            max_tokens=48,
            server=ServerConfig(max_model_len=2048),
            base_url=server.base_url,
            log_path=str(tmp_path / "out"),
        )
        await cli_main(config)

    results = json.loads((tmp_path / "out" / "results.json").read_text())
    models = {model["name"]: model for model in results["models"]}
    assert all((model["num_rollouts"], model["num_faults"]) == (16, 0) for model in models.values())
    assert outcomes(tmp_path / "out", "fresh") == outcomes(tmp_path / "out", "base")
    assert models["base"]["num_successes"] > 0
    assert models["wild"]["num_successes"] < models["base"]["num_successes"]
    # a plain endpoint writes the first prompt as the gateway does, and greedy answers follow
    assert outcomes(tmp_path / "out", "chat", num_turns=1) == outcomes(tmp_path / "out", "base", num_turns=1)
    # of the Responses endpoint only judged attempts are asked: vLLM adds fields to the tools there, and the tiny model
    # has learned one way of writing them
    await assert_shown(tmp_path / "out", models)
    await assert_exported(tmp_path / "out", "fresh")


async def assert_shown(folder: Path, models: Mapping[str, Any]) -> None:
    """The monitor shows each model as a run, with the figures of results.json, and each rollout with its screens."""
    async with open_monitor(folder) as client:
        runs = await fetch_runs(client)
        assert set(runs) == {f"out@{name}" for name in models}
        for name, model in models.items():
            run = await get(client, f"/api/runs/{runs[f'out@{name}']['run_id']}")
            shown = run["last_eval"]
            assert (shown["num_rollouts"], shown["num_successes"]) == (16, model["num_successes"])
            assert (shown["rate"], shown["low"], shown["high"]) == (model["success_rate"], model["low"], model["high"])
            assert run["config"]["models"][0]["name"] == name
            (evaluation,) = run["evaluations"]
            assert (evaluation["status"], evaluation["num_groups"], evaluation["num_ended_groups"]) == (
                "completed",
                16,
                16,
            )
            assert evaluation["metrics"]["eval/held_out/success_rate"] == model["success_rate"]
            for item in await fetch_rollouts(client, run["run_id"]):
                rollout = await get(client, f"/api/runs/{run['run_id']}/rollouts/{item['rollout_id']}")
                assert rollout["run_name"] == f"out@{name}"
                assert rollout["validation"]["success"] == item["success"]
                has_tokens = name not in ("chat", "responses")
                assert all((turn["num_sampled_tokens"] > 0) == has_tokens for turn in rollout["turns"])
                image = await client.get(f"/api/screenshots/{rollout['turns'][0]['before']['sha256']}")
                assert image.content.startswith(b"\x89PNG")


async def assert_exported(folder: Path, model: str) -> None:
    """Rollouts of one model as a page and as a data set; the folder alone does not say of which."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    rollout_id = next(line["rollout_id"] for line in lines if line["model"] == model)
    page, data = folder.with_name("rollout.html"), folder.with_name("data")
    await export_page(ExportConfig(run=f"{folder}@{model}", rollout_id=rollout_id, out=str(page)), {})
    assert rollout_id in page.read_text()
    await export_data(ExportTrajectoriesConfig(run=f"{folder}@{model}", out=str(data), format="atif"), {})
    assert sum(rollout_id in path.read_text() for path in data.rglob("*.json")) == 1
    with pytest.raises(ConfigError, match="FOLDER@MODEL of an evaluation of several models, got none"):
        await export_page(ExportConfig(run=str(folder), rollout_id=rollout_id, out=str(page)), {})


async def test_a_worse_checkpoint_raises_an_alarm_that_the_monitor_shows_with_its_rollouts(
    server: VllmServer, tmp_path: Path
) -> None:
    wild, folder = write_adapter(tmp_path / "wild", update=1000.0), tmp_path / "phone"
    config = SuiteConfig(
        models=[{"name": "base"}],
        tasks={"source_type": "demo_eval", "tags": ["demo"]},
        num_tasks=64,
        fall=0.7,
        max_tokens=48,
        server=ServerConfig(max_model_len=2048),
        base_url=server.base_url,
        log_path=str(folder),
    )
    assert await run_suite(config) is None
    result = await run_suite(with_values(config, models=[{"name": "wild", "adapter": str(wild)}], accept=True))

    assert result is not None
    assert result.is_regression
    recorded = json.loads((folder / "suite.json").read_text())["results"][0]
    async with open_monitor(folder) as client:
        runs = {name: run["run_id"] for name, run in (await fetch_runs(client)).items()}
        suites = [await get(client, f"/api/runs/{run_id}/suite") for run_id in runs.values()]
        sets = [f"run_id={runs[f'phone@{name}']}&phase=eval" for name in ("base", "wild")]
        shown = await get(client, "/api/rollouts/compare", first=sets[0], second=sets[1])
    assert suites[0] == suites[1]
    (comparison,) = suites[0]["comparisons"]
    assert suites[0]["accepted"] == comparison["accepted"] == {"name": "base", "run_id": runs["phone@base"]}
    assert comparison["candidate"] == {"name": "wild", "run_id": runs["phone@wild"]}
    assert {name: comparison[name] for name in ("pair", "p_value", "power", "fall")} == {
        name: recorded[name] for name in ("pair", "p_value", "power", "fall")
    }
    # what the page lists by task comes from the rollouts, the verdict from the attempts
    assert (shown["num_pairs"], shown["difference"]) == (64, pytest.approx(result.pair.difference))
    assert (shown["num_worse"], shown["num_better"]) == (result.pair.num_only_first, result.pair.num_only_second)


@asynccontextmanager
async def tcp_address(server: VllmServer) -> AsyncGenerator[str]:
    """The server's address for clients that know no Unix socket."""
    _, socket_path = split_address(server.base_url)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_unix_connection(socket_path)
        async with asyncio.TaskGroup() as directions:
            directions.create_task(copy(reader, to_server))
            directions.create_task(copy(from_server, writer))

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(2**16):
            sink.write(data)
            await sink.drain()
        sink.close()

    listener = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"


def outcomes(folder: Path, model: str, num_turns: int | None = None) -> dict[int, bool]:
    """Success by place in the task set, of the attempts that took so many turns."""
    records: list[dict[str, Any]] = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    return {
        record["position"]: record["success"]
        for record in records
        if record["model"] == model and num_turns in (None, record["num_turns"])
    }
