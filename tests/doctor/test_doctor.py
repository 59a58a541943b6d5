"""The doctor's verdicts, table and file; checks run against stand-ins for server, trainer and driver."""

import asyncio
import io
import json
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rich.console import Console

from cua_rl.command_line.fields import with_values
from cua_rl.doctor.checks import check_driver, check_gpus, untested
from cua_rl.doctor.doctor import (
    CHECKS,
    about,
    attempt,
    check_backward,
    check_memory,
    check_parity,
    check_plan,
    check_publication,
    check_sampling,
    check_two_processes,
    plan_embedded,
    run_doctor,
    start_server,
)
from cua_rl.doctor.examination import Examination, long_datum
from cua_rl.host.http_server import serve_app
from cua_rl.machine.machine import find_machine
from cua_rl.machine.memory_parts import GIB
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.doctor import DoctorConfig, main
from cua_rl.renderers.qwen3_vl import load_qwen3_vl
from cua_rl.reporting.diagnosis import Diagnosis, Finding, Verdict
from cua_rl.types.errors import CuaError, ParityError, SamplingError
from cua_rl.types.rollout import AdapterRef, Datum
from tests.fakes import FakeTrainer
from tests.jumping_time import run_jumping
from tests.sampling.fake_vllm import FakeVllm

IDLE = "0, NVIDIA L4, 580.65.06, 8.9, 23034, 3\n1, NVIDIA L4, 580.65.06, 8.9, 23034, 3\n"
SPEED = {"trainer/tokens": 9000.0, "trainer/busy_s": 3.0, "trainer/matmul_frac": 0.3, "trainer/tflop_per_s": 30.0}


class DoctorsTrainer(FakeTrainer):
    """Says of the canary what the fake server says, and of its work what it is told."""

    metrics = SPEED

    async def forward(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        return [_canary_row(row, -1.75, datum) for row, datum in zip(self._rows(datums), datums, strict=True)]

    async def base_logprobs(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        return [_canary_row(row, -2.0, datum) for row, datum in zip(self._rows(datums), datums, strict=True)]

    async def save_weights_for_sampler(self, path: Path) -> AdapterRef:
        return AdapterRef(path=path, policy_version=self.policy_version)

    async def trainer_metrics(self) -> dict[str, float]:
        return dict(self.metrics)


def _canary_row(row: tuple[float, ...], logprob: float, datum: Datum) -> tuple[float, ...]:
    return (logprob,) * len(row) if datum.rollout_id == "canary" else row


def test_builds_for_a_device_count_as_the_tested_version() -> None:
    found = {"torch": "2.13.0+cu130", "peft": "0.22.0"}

    assert untested(found, {"torch": "2.13.0", "peft": "0.21.2 ; python_version > '3.10'"}) == ["peft"]
    assert untested(found, {}) == []


@pytest_asyncio.fixture
async def exam(tmp_path: Path) -> AsyncGenerator[Examination]:
    """With a server, and a trainer that agrees with it."""
    fake = FakeVllm(load_qwen3_vl(TINY_QWEN3_VL), max_model_len=2048)
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url, AsyncExitStack() as stack:
        config = DoctorConfig(base_url=url, max_concurrent_rollouts=4)
        exam = Examination(config=config, folder=tmp_path, stack=stack, ask_driver=lambda _: IDLE)
        assert (await check_plan(exam)).verdict == "ok"
        assert (await start_server(exam)).verdict == "ok"
        exam.trainer = DoctorsTrainer()  # type: ignore[assignment]
        exam.there.add("trainer")
        yield exam


async def test_server_and_trainer_that_agree_are_fine(exam: Examination) -> None:
    findings = [await check(exam) for check in (check_backward, check_publication, check_parity, check_sampling)]

    assert [finding.verdict for finding in findings] == ["ok"] * 4
    assert "3000 tokens/s, 30 % of a large matrix product" in findings[0].got
    assert int(str(findings[1].figures["num_answered"])) > 0
    assert findings[2].figures["policy/parity_image_mean_abs"] == 0.0
    assert "% of a large matrix product" in findings[3].got


async def test_a_trainer_that_disagrees_about_images_fails_with_the_difference(exam: Examination) -> None:
    exam.trainer = DoctorsTrainer(gap=0.3)  # type: ignore[assignment]
    diagnosis = Diagnosis(exam.folder)

    finding = await diagnosis.check("parity", lambda: check_parity(exam))

    assert finding.verdict == "fail"
    assert finding.got.startswith(ParityError.__name__)
    assert "got 0.3000" in finding.got


async def test_the_long_sequence_is_as_long_as_the_context_and_mostly_screenshots(exam: Examination) -> None:
    datum = await asyncio.to_thread(long_datum, exam, 1, 2048)

    assert datum.model_input.length == 2048
    assert 2048 // 8 <= datum.num_trained_tokens < 2048 // 4
    assert long_datum(exam, 2, 2048).model_input != datum.model_input


@pytest.mark.parametrize(("mfu", "retries", "verdict"), [(0.05, 0.0, "warn"), (0.3, 1.0, "warn"), (0.3, 0.0, "ok")])
async def test_a_slow_or_crowded_gpu_is_a_warning(exam: Examination, mfu: float, retries: float, verdict: str) -> None:
    exam.there.add("GPU")
    exam.trainer.metrics = SPEED | {"trainer/matmul_frac": mfu, "trainer/memory_retries": retries}  # type: ignore[attr-defined]

    assert (await check_backward(exam)).verdict == verdict


async def test_a_gpu_that_another_program_uses_is_named(exam: Examination) -> None:
    assert (await check_gpus(exam)).verdict == "ok"

    exam.ask_driver = lambda _: IDLE.replace("23034, 3\n1", "23034, 9000\n1")
    finding = await check_gpus(exam)

    assert finding.verdict == "warn"
    assert finding.got == "NVIDIA L4: 22.5 GiB, 8.8 in use, NVIDIA L4: 22.5 GiB, 0.0 in use"
    assert finding.do.startswith("other programs use GPU 0: ")


async def test_a_driver_that_hangs_is_a_finding_and_a_machine_without_gpus_is_none(exam: Examination) -> None:
    def hang(_: str) -> str:
        raise CuaError("nvidia-smi, which waits for the driver: TimeoutExpired")

    exam.ask_driver = hang
    finding = await Diagnosis(exam.folder).check("GPUs", lambda: check_gpus(exam))
    assert (finding.verdict, "TimeoutExpired" in finding.got) == ("fail", True)

    exam.ask_driver = lambda _: ""
    assert (await check_gpus(exam)).verdict == "not tried"
    assert "GPU" not in exam.there


async def test_a_refused_plan_leaves_the_rest_to_the_embedded_model(exam: Examination) -> None:
    served, refused = exam.config, DoctorConfig(model_name="/nowhere/a-model", base_url=exam.config.base_url)
    exam.config, exam.embedded, exam.there = refused, served, set()
    diagnosis = Diagnosis(exam.folder)

    for name, find, needs in CHECKS[4:7]:
        await diagnosis.check(name, partial(attempt, exam, find, needs))

    assert [finding.verdict for finding in diagnosis.findings.values()] == ["fail", "ok", "ok"]
    assert list(diagnosis.findings) == ["memory estimate", "embedded model", "model server"]
    assert "/nowhere/a-model" in diagnosis.findings["memory estimate"].got
    assert diagnosis.findings["embedded model"].figures["model_path"] == str(TINY_QWEN3_VL)
    assert diagnosis.findings["model server"].figures["logs"] is None
    assert diagnosis.failed() == ["memory estimate"]  # which makes the exit status 1
    assert (await plan_embedded(exam)).verdict == "not tried"  # one plan is enough


@pytest.mark.parametrize(("verdict", "is_told"), [("ok", False), ("not tried", False), ("warn", True), ("fail", True)])
def test_logs_are_told_of_warnings_too_with_those_of_long_before_the_end(
    tmp_path: Path, verdict: Verdict, is_told: bool
) -> None:
    (tmp_path / "logs").mkdir()
    early = ["INFO starts", "(EngineCore pid=7) WARNING 11-25 20:54:06 [cpu.py:2] slow", "x.py:138: FutureWarning: old"]
    lines = [*early, *(f"INFO route {index}" for index in range(120))]
    (tmp_path / "logs" / "vllm.log").write_text("\n".join(lines))
    diagnosis = Diagnosis(tmp_path, findings={"GPUs": Finding(verdict=verdict, got="")})

    assert about(DoctorConfig(), diagnosis)["logs"] == ({"vllm.log": [*early[1:], *lines[-100:]]} if is_told else {})


async def test_steps_of_unequal_lengths_are_reported_with_the_clocks_meanwhile(exam: Examination) -> None:
    unequal: Any = (await check_backward(exam)).figures["unequal"]

    assert unequal["lengths"] == [1024, 2048, 1280]  # of 2048: 3/8 is shorter than the least, then 8/8, 5/8
    assert unequal["trainer/tokens"] == 9000.0
    assert unequal["clocks"] or "nvidia-smi" in unequal["missing"]["clocks"]


async def test_no_second_trainer_is_asked_for_on_other_hosts(exam: Examination) -> None:
    elsewhere = with_values(exam.config.trainer, num_nodes=2)
    exam.prepared = replace(exam.prepared, config=with_values(exam.config, trainer=elsewhere))
    exam.grad_norm = 1.0

    assert (await check_two_processes(exam)).verdict == "not tried"
    assert {"server", "trainer"} <= exam.there  # both go on


@pytest.mark.parametrize(
    ("peak_gib", "used", "verdict", "do"),
    [
        (9.9, 20000, "ok", ""),
        (12.0, 20000, "warn", "the estimate is too low"),
        (9.9, 22900, "warn", "a GPU is nearly full"),
    ],
)
async def test_a_peak_above_the_plan_is_a_warning(
    exam: Examination, peak_gib: float, used: int, verdict: str, do: str
) -> None:
    machine = find_machine("2x22.5", {}, is_dry_run=True)
    planned = {"weights": 8 * GIB, "activations": 2 * GIB, "CUDA": 1 * GIB}
    exam.prepared = replace(exam.prepared, memory=replace(exam.prepared.memory, machine=machine, trainer=planned))
    exam.trained = {"trainer/peak_cuda_gib": peak_gib, "trainer/peak_reserved_gib": peak_gib + 0.4}
    exam.ask_driver = lambda _: IDLE.replace("23034, 3\n1", f"23034, {used}\n1")

    finding = await check_memory(exam)

    assert (finding.verdict, finding.figures["planned_gib"]) == (verdict, 10.0)
    assert f"{peak_gib + 0.4:.1f} reserved in steps of unequal lengths" in finding.got
    assert finding.do.startswith(do)


async def test_what_depends_on_a_failed_check_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    diagnosis = Diagnosis(tmp_path)
    said: list[str] = []

    nobody = DoctorConfig(base_url="http://127.0.0.1:9")

    await run_doctor(nobody, diagnosis, said.append, embedded=nobody)

    verdicts = {name: (finding.verdict, finding.got) for name, finding in diagnosis.findings.items()}
    assert list(verdicts) == [name for name, _, _ in CHECKS]
    assert verdicts["driver"] == verdicts["GPUs"] == verdicts["memory against estimate"] == ("not tried", "no GPU")
    assert diagnosis.failed() == ["memory estimate", "embedded model"]
    assert diagnosis.findings["memory estimate"].do.startswith("start one there, set ")
    assert verdicts["model server"] == verdicts["trainer"] == ("not tried", "no memory estimate")
    assert verdicts["canary"] == ("not tried", "the model server does not run")
    assert f"{CHECKS[-1][0]}: not tried (0.0 s)" in said
    refusal = next(line for line in said if line.startswith("memory estimate: fail"))
    assert "ConfigError: base_url: expected a vLLM server at" in refusal


async def test_what_set_up_says_of_the_driver_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$1" in *driver*) echo 470.57;; *cap*) echo 8.9;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    exam = Examination(config=DoctorConfig(), folder=tmp_path, stack=AsyncExitStack(), ask_driver=lambda _: IDLE)

    finding = await check_driver(exam)

    assert finding.verdict == "fail"
    assert "expected NVIDIA driver 580 or newer" in finding.got


def test_a_dry_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry_run=true", "machine=4x80"]) == 2
    assert "recipes.train dry_run=true" in capsys.readouterr().err


def test_a_place_for_the_findings_is_needed_before_the_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()

    assert main([f"log_path={tmp_path}/doctor", f"json={tmp_path}/file/doctor.json"]) == 2
    assert "log_path, json: expected places to write to" in capsys.readouterr().err


async def test_only_visible_gpus_are_examined(exam: Examination, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")

    assert [gpu[0] for gpu in exam.gpus()] == ["1"]


async def test_a_process_that_does_not_answer_is_asked_once(exam: Examination) -> None:
    async def hang(_: Examination) -> Finding:
        await asyncio.sleep(60)
        raise AssertionError("it should have been given up")

    first = await Diagnosis(exam.folder).check("long", lambda: attempt(exam, hang, ("trainer",), limit_s=0.01))
    second = await attempt(exam, check_backward, ("trainer",))

    assert (first.verdict, first.do) == ("fail", f"read {exam.folder / 'logs'}")
    assert (second.verdict, second.got) == ("not tried", "the trainer does not run")


async def test_a_process_that_loads_large_weights_from_a_slow_disk_is_not_given_up(
    exam: Examination, tmp_path: Path
) -> None:
    config = exam.prepared.config
    config = with_values(config, server=with_values(config.server, model_path=tmp_path))
    exam.prepared = replace(exam.prepared, config=config)
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(64 * 10**9)  # takes no room on the disk

    async def load(_: Examination) -> Finding:
        await asyncio.sleep(64e9 / 50e6 + 600)
        return Finding(verdict="ok", got="loaded")

    assert (await asyncio.to_thread(run_jumping, attempt(exam, load, ("plan",)))).got == "loaded"


async def test_the_first_of_several_failures_is_shown_and_any_exception_is_a_finding(tmp_path: Path) -> None:
    async def start() -> Finding:
        raise ExceptionGroup("unhandled errors in a TaskGroup", [RuntimeError("who knows"), ValueError("later")])

    finding = await Diagnosis(tmp_path).check("trainer", start)

    assert (finding.verdict, finding.got) == ("fail", "RuntimeError: who knows")
    assert "doctor.json" in finding.do


@pytest.mark.parametrize(
    ("said", "do"),
    [
        ("CUDA error: no kernel image is available for execution on the device", "compute capability"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "server.max_model_len"),
        ("ValueError: No available memory for the cache blocks.", "server.max_pixels"),
        ("The NVIDIA driver on your system is too old (found version 12020).", "update the driver"),
        ("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error", "--shm-size"),
        ("expected 1 GPU, got none; set trainer.gpus", "set trainer.gpus"),
    ],
)
async def test_known_failures_of_libraries_come_with_a_remedy(tmp_path: Path, said: str, do: str) -> None:
    async def start() -> Finding:
        raise SamplingError(said)

    assert do in (await Diagnosis(tmp_path).check("model server", start)).do


def test_the_table_shows_first_lines_and_the_file_everything_but_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-token-of-somebody")
    diagnosis = Diagnosis(tmp_path)
    diagnosis.findings["model server"] = Finding(
        verdict="fail", got="it ended [oom]\nTraceback of a-token-of-somebody", do="use less memory"
    )
    output = io.StringIO()

    diagnosis.show(Console(file=output, width=120))
    diagnosis.write(tmp_path / "new" / "doctor.json", {"config": {"gbox_api_key": "gk-123456"}})

    assert "it ended [oom]" in output.getvalue()
    assert "use less memory" in output.getvalue()
    assert "Traceback" not in output.getvalue()
    written = json.loads((tmp_path / "new" / "doctor.json").read_text())
    assert written["config"] == {"gbox_api_key": "***"}
    assert written["findings"] == [
        {
            "name": "model server",
            "verdict": "fail",
            "got": "it ended [oom]\nTraceback of ***",
            "do": "use less memory",
            "figures": {},
            "seconds": 0.0,
        }
    ]
