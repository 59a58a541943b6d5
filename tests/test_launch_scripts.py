"""scripts/train_*.sh, their presets, and Slurm's jobs, as far as a machine without GPUs can tell."""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from cua_rl.command_line.parsing import parse_command_line
from cua_rl.machine.machine import find_machine
from cua_rl.run.prepared_training import check_learning
from cua_rl.run.resolve import resolve
from cua_rl.run.training_config import CLIConfig

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "tests" / "machine" / "model_configs"
SIX_GPUS = ("server.gpus=0,1", "server.tensor_parallel=2", "trainer.gpus=2,3,4,5")


def launch(script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """What the script would run, and the GPUs that it would see."""
    seen = {key: value for key, value in os.environ.items() if key not in ("CUDA_VISIBLE_DEVICES", "CONFIG", "LOADER")}
    shown = ROOT / "tests" / "doubles" / "show_arguments.sh"
    return subprocess.run(
        [str(ROOT / "scripts" / script), *arguments],
        env={**seen, "PYTHON": str(shown), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("script", ["train.sh", "scripts/train_multi.sh"])
def test_a_script_started_elsewhere_reads_the_repositorys_variables_and_says_so(script: str, tmp_path: Path) -> None:
    repository, elsewhere = tmp_path / "repository", tmp_path / "elsewhere"
    (repository / "scripts").mkdir(parents=True)
    (repository / ".venv" / "bin").mkdir(parents=True)
    elsewhere.mkdir()
    copy = repository / script
    shutil.copy(ROOT / script, copy)
    python = repository / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "file=$CUA_RL_ENV_FILE"\n')
    python.chmod(0o700)
    (repository / ".env").write_text("A=1\n")

    def started(**more: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": os.environ["PATH"], **more}
        return subprocess.run([str(copy)], cwd=elsewhere, env=environ, capture_output=True, text=True, check=True)

    first = started()
    assert (first.stdout, first.stderr) == (f"file={repository}/.env\n", f"variables from {repository}/.env\n")
    assert started(CUA_RL_ENV_FILE="mine").stdout == "file=mine\n"
    (elsewhere / ".env").write_text("A=2\n")
    assert started().stdout == "file=\n"


def test_one_gpu_trains_with_the_preset_for_one() -> None:
    done = launch("train_single.sh", "--loader", "hf", "max_steps=3")

    assert done.stdout.split() == [
        "gpus=0",
        *("-m", "cua_rl.recipes.train", "--config", str(ROOT / "configs" / "grpo_single_gpu.yaml"), "max_steps=3"),
    ]


def test_several_gpus_are_the_first_of_those_that_are_visible() -> None:
    assert launch("train_multi.sh", "--gpus", "4").stdout.split()[0] == "gpus=0,1,2,3"
    assert launch("train_multi.sh", "--gpus", "2", CUDA_VISIBLE_DEVICES="5,3,1").stdout.split()[0] == "gpus=5,3"
    assert launch("train_multi.sh", "--gpus", "0", CUDA_VISIBLE_DEVICES="5,3,1").stdout.split()[0] == "gpus="


@pytest.mark.parametrize("script", ["train_single.sh", "train_multi.sh"])
def test_another_loader_is_a_setting_of_the_trainer(script: str) -> None:
    assert launch(script, "--loader", "unsloth", "max_steps=3").stdout.split()[-2:] == [
        "trainer.loader=unsloth",
        "max_steps=3",
    ]
    assert "trainer.loader=unsloth" in launch(script, LOADER="unsloth").stdout.split()


def test_six_gpus_are_two_for_sampling_and_four_for_training_unless_they_are_set() -> None:
    words = launch("train_multi.sh", "--gpus", "6", "trainer.gpus=1").stdout.split()

    assert words[-4:] == [*SIX_GPUS, "trainer.gpus=1"]  # the last one wins


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "none"), "--gpus: expected a number of GPUs, got 'none'"),
        (("--gpus",), "--gpus: expected a value, got none"),
        (("--gpus", "3"), "--gpus: expected at most 2, the GPUs of CUDA_VISIBLE_DEVICES, got 3"),
        (("--loader", "tensorflow"), "--loader: expected hf or unsloth, got 'tensorflow'"),
    ],
)
def test_what_cannot_be_launched_is_refused(arguments: Sequence[str], message: str) -> None:
    done = launch("train_multi.sh", *arguments, CUDA_VISIBLE_DEVICES="0,1")

    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("preset", "machine", "settings"),
    [
        ("grpo_single_gpu", "1x79.6", ()),
        ("grpo_multi_gpu", "6x79.6", SIX_GPUS),
        ("grpo_multi_gpu", "4x79.6", ()),
        ("grpo_multi_gpu", "8x79.6", ()),
    ],
)
def test_a_preset_fits_on_its_machine(preset: str, machine: str, settings: Sequence[str]) -> None:
    path = ROOT / "configs" / f"{preset}.yaml"
    config = parse_command_line(CLIConfig, ["--config", str(path), "dry_run=true", f"machine={machine}", *settings])
    assert config.model_name is not None

    _, plan = resolve(config, find_machine(machine, {}, is_dry_run=True), MODELS / Path(config.model_name).name)

    check_learning(config)
    assert plan.gpus.is_shared == (machine == "1x79.6")
    assert (config.group_size, config.kl_penalty_coef, config.lora_rank) == (4, 0.01, 16)


SLURM = {
    "bin/scontrol": '[ "$1" != show ] || exec printf "node1\\nnode2\\n"; echo "scontrol $*" >>log',
    "bin/srun": 'echo "srun" >>log; echo $$ >server; exec tail -f /dev/null',
    "bin/scancel": 'echo "scancel $*" >>log; kill "$(cat server)"',
    "bin/curl": "until [ -s server ]; do :; done",
    "scripts/train_multi.sh": (
        "trap 'echo \"run: TERM\" >>log; exit 143' TERM\n"
        'echo "run: $*" >>log; echo ready >ready; tail -f /dev/null & wait'
    ),
}
"""What a job script finds in a cluster, and its run, which ends when it is told to."""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("name", ["one_node", "two_nodes"])
def test_a_slurm_job_whose_time_is_nearly_up_ends_its_run_and_is_queued_again(name: str, tmp_path: Path) -> None:
    for file, body in SLURM.items():
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o700)
    os.mkfifo(tmp_path / "ready")
    environ = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        **{"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"},
    }
    script = ROOT / "deploy" / "slurm" / f"{name}.sbatch"
    job = subprocess.Popen(["bash", str(script), "max_steps=3"], env=environ, start_new_session=True)
    try:
        (tmp_path / "ready").read_text()
        job.send_signal(signal.SIGUSR1)

        assert job.wait() == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    log = (tmp_path / "log").read_text().splitlines()
    runs = [line for line in log if line.startswith("run: -")]
    assert len(runs) == 1
    assert "log_path=runs/7 behavior_if_log_dir_exists=resume max_steps=3" in runs[0]
    assert ("base_url=http://node2:8000" in runs[0]) == (name == "two_nodes")
    after = ["run: TERM", "scontrol requeue 7"]
    assert log[log.index(runs[0]) + 1 :] == (after if name == "one_node" else [*after, "scancel --signal=TERM 7.0"])
    assert "#SBATCH --signal=B:USR1@300\n" in script.read_text()
