import ast
import asyncio
import logging
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, cast

import pytest

import cua_rl
from cua_rl.host.guest_account import claim_guest_account
from cua_rl.host.masking import is_secret_name
from cua_rl.host.processes import OwnedProcess
from cua_rl.host.users import (
    GUEST_UIDS,
    MAX_GUEST_THREADS,
    SERVICE_UIDS,
    SystemUser,
    bare_environment,
    can_change_user,
    claim_user,
    computing_environment,
    computing_prefix,
    processes_of,
    public_copy,
    remove_tree,
)
from tests.patience import IdleClock

needs_root = pytest.mark.skipif(not can_change_user(), reason="not root: only root can give programs other users")
PASSED = (Path(cua_rl.__path__[0]) / "host/passed_variables.txt").read_text().splitlines()
FAMILIES = (
    *(
        "VLLM_",
        "XDG_",
        "PYTHON",
        "LD_",
        "DYLD_",
        "LC_",
        "HF_",
        "HF_HUB_",
        "CUA_RL_",
        "CONDA_",
        "TRANSFORMERS_",
        "TORCH",
    ),
    *("TOKENIZERS_", "PYTORCH_", "TRITON_", "FLASHINFER_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TP_", "HIP_", "HSA_"),
    *(
        "ROC",
        "OMP_",
        "MKL_",
        "KMP_",
        "GOMP_",
        "OPENBLAS_",
        "MALLOC_",
        "ATEN_",
        "DNNL_",
        "ONEDNN_",
        "PATH",
        "LANG",
        "TZ",
    ),
)
RARE_UIDS = GUEST_UIDS[-60:-30]
"""Which other tests do not get, since the lowest free number is taken."""
CLAIMER = """
import sys, time
from cua_rl.host.users import GUEST_UIDS, claim_user
user = claim_user(GUEST_UIDS[-60:-30])
print(user.uid, flush=True)
time.sleep(60)
"""


def output_of(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_program_gets_no_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("LC_TIME", "C")

    environment = bare_environment(tmp_path, {"DISPLAY": ":1"})

    assert "HF_TOKEN" not in environment
    assert environment["HOME"] == str(tmp_path)
    assert (environment["LC_TIME"], environment["DISPLAY"], environment["PATH"]) == ("C", ":1", os.environ["PATH"])


def test_no_name_that_only_begins_like_a_known_one_reaches_a_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    canaries = {f"{family}CANARY": f"secret of {family}" for family in FAMILIES}
    for name, secret in canaries.items():
        monkeypatch.setenv(name, secret)

    assert not set(canaries.values()) & set(computing_environment(canaries).values())
    assert not set(canaries.values()) & set(bare_environment(tmp_path).values())


def test_what_users_of_clusters_set_reaches_the_model_server() -> None:
    names = (
        "NCCL_DEBUG NCCL_IB_HCA NCCL_SOCKET_IFNAME NCCL_P2P_DISABLE NCCL_TOPO_FILE CUDA_VISIBLE_DEVICES CUDA_HOME "
        "CUDA_MPS_PIPE_DIRECTORY VLLM_LOGGING_LEVEL VLLM_USE_DEEP_GEMM HF_HOME HF_HUB_CACHE LD_LIBRARY_PATH PYTHONPATH "
        "PYTORCH_ALLOC_CONF TORCH_LOGS TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR OMP_NUM_THREADS TOKENIZERS_PARALLELISM"
    )
    environment = dict.fromkeys(names.split(), "set")

    assert computing_environment(environment).items() >= environment.items()


@pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM, whose settings these are")
def test_all_settings_of_the_installed_vllm_are_passed_but_secrets_and_addresses() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    tree = ast.parse(Path(folder, "envs.py").read_text())
    settings = {
        ast.literal_eval(key)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if key is not None
    }
    own = {name for name in settings if name.startswith("VLLM_")}

    assert len(own) > 200
    assert {name for name in own if not is_secret_name(name) and not name.endswith("_URL")} - set(PASSED) == set()


def test_no_secret_is_among_the_names_that_are_passed() -> None:
    names = [line for line in PASSED if line and not line.startswith("#")]

    assert len(names) == len(set(names))
    assert [name for name in names if is_secret_name(name) or name.endswith("_URL")] == []


def test_a_user_names_more_but_no_secret_and_the_log_names_what_is_withheld(caplog: pytest.LogCaptureFixture) -> None:
    environment = {
        "CUA_RL_PASS_ENVIRONMENT": "NCCL_NEW_KNOB, MY_TOKEN",
        "NCCL_NEW_KNOB": "1",
        "MY_TOKEN": "hidden",
        "NCCL_OTHER": "shy",
    }
    with caplog.at_level(logging.INFO, logger="cua_rl.host.users"):
        passed = [computing_environment(environment) for _ in range(2)]

    assert passed[0] == passed[1]
    assert passed[0].keys() & environment.keys() == {"NCCL_NEW_KNOB"}
    (said,) = [record.getMessage() for record in caplog.records]
    assert "CUA_RL_PASS_ENVIRONMENT MY_TOKEN NCCL_OTHER" in said
    assert "hidden" not in said
    assert "shy" not in said


def test_a_program_of_our_own_user_cannot_gain_privileges() -> None:
    status = output_of(SystemUser().command(["cat", "/proc/self/status"]))

    assert "NoNewPrivs:\t1" in status


@needs_root
def test_users_differ_and_have_neither_groups_nor_capabilities() -> None:
    with claim_user(GUEST_UIDS) as one, claim_user(GUEST_UIDS) as other, claim_user(SERVICE_UIDS) as service:
        assert len({one.uid, other.uid, service.uid, 0}) == 4
        status = output_of(one.command(["cat", "/proc/self/status"]))
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Uid"].split() == fields["Gid"].split() == [str(one.uid)] * 4
        assert fields["Groups"].split() == []
        assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert fields["NoNewPrivs"] == "1"


@needs_root
def test_a_model_server_of_root_keeps_the_rights_on_files_and_memory_alone() -> None:
    fields = output_of([*computing_prefix(), "grep", "-E", "CapBnd|CapEff|CapPrm|NoNewPrivs", "/proc/self/status"])

    held = {int(line.split()[1], 16) for line in fields.splitlines() if line.startswith("Cap")}
    # linux/capability.h: chown, dac_override, dac_read_search, fowner, ipc_lock, sys_nice, sys_resource
    allowed = sum(1 << number for number in (0, 1, 2, 3, 14, 23, 24))
    assert held
    assert all(each | allowed == allowed and each & 0b10 for each in held)
    assert fields.split()[-1] == "1"


@needs_root
def test_a_guest_that_forks_without_end_is_stopped_and_a_service_is_not_limited() -> None:
    with claim_user(GUEST_UIDS) as guest, claim_user(SERVICE_UIDS) as service:
        assert output_of(guest.command(["bash", "-c", "ulimit -u; ulimit -c"])).split() == [str(MAX_GUEST_THREADS), "0"]
        assert output_of(service.command(["bash", "-c", "ulimit -u"])) == output_of(["bash", "-c", "ulimit -u"])


@needs_root
@pytest.mark.skipif(shutil.which("ipcmk") is None, reason="no ipcmk (util-linux)")
def test_a_guest_leaves_no_shared_memory_to_the_next_of_its_number() -> None:
    with claim_user(GUEST_UIDS) as guest:
        output_of(guest.command(["sh", "-c", "ipcmk --shmem 4096; ipcmk --queue; ipcmk --semaphore 1"]))
        held = [str(guest.uid) in Path(f"/proc/sysvipc/{kind}").read_text().split() for kind in ("shm", "msg", "sem")]

    left = [str(guest.uid) in Path(f"/proc/sysvipc/{kind}").read_text().split() for kind in ("shm", "msg", "sem")]
    assert (held, left) == ([True] * 3, [False] * 3)


@needs_root
def test_a_user_is_free_again_after_its_release_and_not_before() -> None:
    with claim_user(RARE_UIDS) as first, claim_user(RARE_UIDS, wanted=first.uid) as second:
        assert second.uid != first.uid
    with claim_user(RARE_UIDS, wanted=first.uid) as third:
        assert third.uid == first.uid


@needs_root
def test_a_killed_process_loses_its_claim_to_the_next_which_ends_what_it_left(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CLAIMER], stdout=subprocess.PIPE, text=True) as claimer:
        assert claimer.stdout is not None
        uid = int(claimer.stdout.readline())
        with claim_user(RARE_UIDS, wanted=uid) as other:
            assert other.uid != uid
        # started by nobody who would end it: it lost its parent
        left = f"setpriv --reuid={uid} --regid={uid} --clear-groups setsid sh -c 'touch /tmp/left-{uid}; sleep 60' &"
        subprocess.run(["sh", "-c", left], check=True, cwd="/")
        clock = IdleClock()
        while not Path(f"/tmp/left-{uid}").exists() and clock.look() < 30:
            time.sleep(0.02)
        claimer.kill()
    assert processes_of(uid)

    with claim_user(RARE_UIDS, wanted=uid) as user:
        assert user.uid == uid
        assert processes_of(uid) == []
        assert not Path(f"/tmp/left-{uid}").exists()


@needs_root
def test_the_home_of_a_guest_is_gone_before_the_next_one_can_have_its_number() -> None:
    account = claim_guest_account(("true",), "agent")
    lock, was_there = account.user.lock, list[bool]()
    assert lock is not None

    class Watched(FileIO):
        def close(self) -> None:
            if not self.closed:
                was_there.append(account.home.exists())
            super().close()

    watched = Watched(os.dup(lock.fileno()), "ab")
    lock.close()
    replace(account, user=replace(account.user, lock=cast("BinaryIO", watched))).release()

    assert was_there == [False]


@needs_root
async def test_a_guard_keeps_the_claim_until_its_command_has_ended(tmp_path: Path) -> None:
    user = await asyncio.to_thread(claim_user, RARE_UIDS)
    assert user.uid is not None
    assert user.lock is not None
    script = "id -u; ls -l /proc/self/fd; sleep 60"
    async with OwnedProcess(["sh", "-c", script], name="guest", log_path=tmp_path / "log", user=user) as process:
        while "total" not in process.log_tail():
            await asyncio.sleep(0.02)
        user.lock.close()  # as if the controller had died
        with claim_user(RARE_UIDS, wanted=user.uid) as other:
            assert other.uid != user.uid
    assert process.log_tail().startswith(f"{user.uid}\n")
    assert "cua_rl/users" not in process.log_tail()  # a guest could free it
    with claim_user(RARE_UIDS, wanted=user.uid) as other:
        assert other.uid == user.uid


@needs_root
def test_a_user_reads_its_own_folder_and_no_other() -> None:
    # not in `tmp_path`: every session of pytest that starts closes the folder of all of them to other users
    with TemporaryDirectory() as name, claim_user(GUEST_UIDS) as one, claim_user(GUEST_UIDS) as other:
        home = Path(name) / "home"
        home.parent.chmod(0o711)
        one.make_folder(home)
        output_of(one.command(["touch", str(home / "file")]))
        listing = subprocess.run(other.command(["ls", str(home)]), capture_output=True, text=True)
        assert "Permission denied" in listing.stderr


@needs_root
def test_programs_that_only_root_can_reach_are_copied_for_all(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "package" / "bin").mkdir(parents=True)
    program = tmp_path / "package" / "bin" / "hello"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o700)

    (tmp_path / "package.libs").mkdir()

    copy = public_copy(tmp_path / "package", tmp_path / "package.libs")

    try:
        assert public_copy(tmp_path / "package", tmp_path / "package.libs") == copy
        assert public_copy(copy) == copy
        assert copy.with_name("package.libs").exists()
        with claim_user(GUEST_UIDS) as user:
            assert output_of(user.command([str(copy / "bin" / "hello")])) == "hello\n"
    finally:
        remove_tree(copy.parent)
