"""The doctor on this machine: real vLLM, real trainer, the tiny model; on its GPUs if it has some."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cua_rl.machine.gpus import ask_nvidia_smi
from cua_rl.models import TINY_QWEN3_VL

pytestmark = pytest.mark.timeout(900)
GPU_ONLY = {"driver", "GPUs", "memory against estimate"}
NOT_NEEDED = {"embedded model"}  # the settings are those of the embedded model


def test_a_healthy_machine_passes_all_that_it_can_try(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "cua_rl.recipes.doctor",
        f"log_path={tmp_path / 'run'}",
        "server.max_model_len=1024",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    done = subprocess.run(
        [*command, f"json={tmp_path / 'report' / 'doctor.json'}", "max_concurrent_rollouts=4"],
        env=environment | {"GBOX_API_KEY": "gk-never-written-anywhere", "VLLM_API_KEY": "vk-never-written-anywhere"},
        capture_output=True,
        text=True,
        check=False,
    )

    text = (tmp_path / "report" / "doctor.json").read_text()
    report = json.loads(text)
    found = {finding["name"]: finding for finding in report["findings"]}
    verdicts = {name: finding["verdict"] for name, finding in found.items()}
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["long backward pass"]["figures"]["tokens_per_s"] > 0
    if not ask_nvidia_smi():
        assert {name for name, verdict in verdicts.items() if verdict == "not tried"} == GPU_ONLY | NOT_NEEDED
        assert {verdict for name, verdict in verdicts.items() if name not in GPU_ONLY | NOT_NEEDED} == {"ok"}
        two = found["two trainer processes"]["figures"]
        assert two["two"] == pytest.approx(two["one"], rel=1e-4)
        assert found["parity with images"]["figures"]["policy/parity_image_mean_abs"] < 1e-4
        facts = found["machine"]["figures"]
        assert (
            facts["topology"] is facts["clocks"] is found["long backward pass"]["figures"]["unequal"]["clocks"] is None
        )
        assert set(facts["missing"]) == {"topology", "clocks", "driver_cuda"}
        served = found["model server"]["figures"]["logs"]["vllm.log"]
        text_config = json.loads((TINY_QWEN3_VL / "config.json").read_text())["text_config"]
        # float32 keys and values of every layer
        layers, heads, size = (text_config[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
        assert served["kv_cache_tokens"] == served["kv_cache_gib"] * 2**30 / (2 * layers * heads * size * 4)
        assert (served["model_runner"], served["vision_attention"]) == ("V1", "TORCH_SDPA")
        assert set(served["missing"]) == {"attention", "flash_attention_version"}  # a CPU has one, which is not named
    assert report["config"]["server"]["max_model_len"] == 1024
    assert "never-written-anywhere" not in text
    assert found["machine"]["figures"]["variables"]["VLLM_API_KEY"] == "***"
    assert all(name in done.stdout for name in ("canary", "for a bug report"))
