"""One real vLLM, reached in all ways that the recipe knows: as base model, under adapters, and as plain endpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from cua_rl.recipes.evaluate import cli_main
from cua_rl.run.evaluation_config import EvaluateConfig
from cua_rl.run.rollout_config import ServerSettings
from cua_rl.sampling.server import VllmServer
from tests.run.test_evaluate_config import write_adapter

pytestmark = pytest.mark.timeout(600)


async def test_all_ways_to_a_model_give_judged_attempts_on_the_same_tasks(server: VllmServer, tmp_path: Path) -> None:
    fresh, wild = write_adapter(tmp_path / "fresh", update=0.0), write_adapter(tmp_path / "wild", update=50.0)
    endpoint = {"base_url": f"{server.base_url}/v1", "model": server.model.name}
    config = EvaluateConfig(
        models=[
            {"name": "base"},
            {"name": "fresh", "adapter": str(fresh)},
            {"name": "wild", "adapter": str(wild)},
            {"name": "chat", "api": "chat", "extra": {"tool_choice": "none"}, **endpoint},
            {"name": "responses", "api": "responses", **endpoint},
        ],
        tasks={"source_type": "demo_eval", "tags": ["demo"]},
        num_tasks=16,
        max_tokens=48,
        server=ServerSettings(max_model_len=2048),
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


def outcomes(folder: Path, model: str, num_turns: int | None = None) -> dict[int, bool]:
    """Success by place in the task set, of the attempts that took so many turns."""
    records: list[dict[str, Any]] = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    return {
        record["position"]: record["success"]
        for record in records
        if record["model"] == model and num_turns in (None, record["num_turns"])
    }
