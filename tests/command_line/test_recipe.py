"""Exit status, messages and signals of recipes, each in a process of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cua_rl
from cua_rl.command_line.recipe import hide_secrets
from cua_rl.host.users import GUEST_UIDS, SystemUser, can_change_user
from tests.patience import patience

RECIPE = """
import asyncio, logging, os, sys
from contextlib import asynccontextmanager
import chz
from cua_rl.types.errors import TrainingError
from cua_rl.command_line.recipe import run_recipe

@chz.chz
class Config:
    mode: str = chz.field(default="done", doc="what to do")
    size: int = chz.field(default=1, doc="a number")

@asynccontextmanager
async def owned():
    try:
        yield
    finally:
        await asyncio.sleep(0)
        print("unwound", flush=True)

async def fail():
    raise TrainingError("expected a finite loss, got nan; lower the learning rate")

async def main(config):
    async with owned():
        print("running", os.environ.get("CUA_A"), os.environ.get("CUA_B"), flush=True)
        if config.mode == "fail":
            await fail()
        if config.mode == "fail_in_group":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
        if config.mode == "foreign_text":
            said = "\\x1b]0;title\\x07\\x1b[2Jkey " + os.environ["SITE_API_KEY"]
            logging.getLogger("cua_rl").warning(said)
            raise TrainingError(said)
        if config.mode == "bug":
            raise RuntimeError("a bug")
        if config.mode == "full_disk":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.to_thread(open("/dev/full", "w", buffering=1).write, "x\\n"))
        if config.mode == "inspected":
            looks = ("cat /proc/$PPID/environ", "head -c 1 /proc/$PPID/mem", "cat /proc/$PPID/status")
            print(*(os.system(f"({look}) > /dev/null 2>&1") for look in looks))
        if config.mode == "wait":
            await asyncio.Event().wait()

sys.exit(run_recipe(Config, main))
"""


def start(folder: Path, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RECIPE, *argv],
        cwd=folder,
        env={"CUA_A": "environment", "PATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_recipe_that_ends_has_status_0_and_reads_env_without_overriding(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("CUA_A=file\nCUA_B=file\n")

    process = start(tmp_path)
    output, errors = process.communicate()

    assert process.returncode == 0, errors
    assert output.splitlines() == ["running environment file", "unwound"]


def test_foreign_text_in_warnings_and_errors_commands_no_terminal_and_shows_no_secret(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("SITE_API_KEY=abcdefgh12345678\n")
    (tmp_path / ".env").chmod(0o600)

    process = start(tmp_path, "mode=foreign_text")
    _, errors = process.communicate()

    assert process.returncode == 1
    assert errors.splitlines() == ["key ***", "TrainingError: key ***"]


@pytest.mark.parametrize("recipe", ["train", "gym_command", "serve_monitor"])
def test_help_that_nobody_reads_to_the_end_leaves_no_traceback(recipe: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `head` does, only sooner
    with os.fdopen(write_end, "w") as nobody:
        done = subprocess.run(
            [sys.executable, "-m", f"cua_rl.recipes.{recipe}", "--help"],
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
        )

    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("arguments", "named", "not_named"),
    [
        (["monitor.project_token=tok-12345678"], "private file: monitor.project_token_file=PATH", "gbox"),
        (["--monitor.project-token", "tok-12345678"], "private file: monitor.project_token_file=PATH", "gbox"),
        (["base_url=http://me:tok-12345678@host"], "into the environment or .env (env.example)\n", "_file"),
    ],
)
def test_the_warning_of_a_secret_names_the_option_that_was_used(
    arguments: list[str], named: str, not_named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hide_secrets(arguments)

    warning = capsys.readouterr().err
    assert named in warning
    assert not_named not in warning
    assert "12345678" not in warning


def test_a_wrong_setting_has_status_2_a_message_in_parts_and_no_traceback(tmp_path: Path) -> None:
    process = start(tmp_path, "size=four")
    output, errors = process.communicate()

    assert process.returncode == 2
    assert output == ""
    assert errors.splitlines() == [
        "configuration error: expected size to be a whole number (a number)",
        "    got 'four'",
        "    for example size=1",
    ]


@pytest.mark.parametrize("mode", ["fail", "fail_in_group"])
def test_an_error_of_ours_has_status_1_and_no_traceback(tmp_path: Path, mode: str) -> None:
    process = start(tmp_path, f"mode={mode}")
    output, errors = process.communicate()

    assert process.returncode == 1
    assert output.splitlines()[-1] == "unwound"
    assert errors.splitlines() == [
        "TrainingError: expected a finite loss",
        "    got nan",
        "    lower the learning rate",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="others have no /dev/full")
def test_a_full_disk_has_status_1_and_names_a_folder(tmp_path: Path) -> None:
    process = start(tmp_path, "mode=full_disk")
    _, errors = process.communicate()

    assert process.returncode == 1
    first, got, do = errors.splitlines()[:3]
    assert first == f"DiskFullError: disk full: expected room in {str(tmp_path)!r}"
    assert "No space left on device" in got
    assert do.strip().startswith("free space there")


def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    process = start(tmp_path, "mode=bug")
    _, errors = process.communicate()

    assert process.returncode == 1
    assert "Traceback" in errors
    assert "RuntimeError: a bug" in errors


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_unwinds_the_recipe(tmp_path: Path, number: signal.Signals, status: int) -> None:
    process = start(tmp_path, "mode=wait")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("running")

    process.send_signal(number)
    output, errors = process.communicate()

    assert process.returncode == status
    assert output.splitlines() == ["unwound"]
    assert "Traceback" not in errors


def test_a_signal_unwinds_a_recipe_whose_errors_nobody_reads_any_more(tmp_path: Path) -> None:
    process = start(tmp_path, "mode=wait")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("running")
    process.stderr.close()  # as `2>&1 | tee` does when Ctrl-C ends it first

    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=patience(20.0))

    assert (process.returncode, output.splitlines()) == (130, ["unwound"])


SECRET_RECIPE = """
import asyncio, os, sys
import chz
from cua_rl.command_line.recipe import run_recipe

@chz.chz
class Config:
    gbox_api_key: str | None = chz.field(default=None, doc="a key")
    base_url: str | None = chz.field(default=None, doc="an address")
    mode: str = chz.field(default="wait", doc="what to do")

async def main(config):
    print("running", os.environ.get("CUA_B"), config.gbox_api_key == "key-of-a-test", sys.argv[1:], flush=True)
    if config.mode == "bug":
        raise RuntimeError(f"refused {config.gbox_api_key}")
    if config.mode == "wait":
        await asyncio.Event().wait()

sys.exit(run_recipe(Config, main))
"""


def start_with_secret(folder: Path, *argv: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SECRET_RECIPE, *argv],
        cwd=folder,
        env={"PATH": "", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="not Linux: its command lines cannot be changed")
@pytest.mark.parametrize(
    "arguments",
    [
        ("gbox_api_key=key-of-a-test",),
        ("--gbox-api-key", "key-of-a-test"),
        ("gbox_api_key=key-of-a-test", "base_url=http://bob:word-of-a-test@host/v1?token=third-of-a-test"),
    ],
)
def test_a_secret_among_the_arguments_is_hidden_with_a_warning(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    process = start_with_secret(tmp_path, *arguments)
    assert process.stdout is not None
    assert "of-a-test" not in process.stdout.readline()

    shown = Path(f"/proc/{process.pid}/cmdline").read_text()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()

    assert "of-a-test" not in shown
    assert "key=****" in shown.replace("\0", "=").replace("-", "_")
    assert errors.startswith("warning: every user of this machine could read a secret on this command line (")
    assert "of-a-test" not in errors


def test_a_secret_can_be_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("key-of-a-test\n")

    process = start_with_secret(tmp_path, "gbox_api_key_file=key", "mode=done")
    output, errors = process.communicate()

    assert (process.returncode, errors) == (0, "")
    assert output.startswith("running None True")


def test_a_secret_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    process = start_with_secret(tmp_path, "--gbox-api-key-file", "nowhere")
    _, errors = process.communicate()

    assert process.returncode == 2
    assert errors.startswith("configuration error: gbox_api_key_file: expected a file\n    got 'nowhere'")


def test_the_traceback_of_a_bug_shows_no_secret(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("key-of-a-test")

    process = start_with_secret(tmp_path, "gbox_api_key_file=key", "mode=bug")
    _, errors = process.communicate()

    assert process.returncode == 1
    assert errors.endswith("RuntimeError: refused ***\n")


def test_the_environment_file_of_a_parent_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("CUA_B=parent\n")
    (tmp_path / "inner").mkdir()

    output, _ = start_with_secret(tmp_path / "inner", "mode=done").communicate()

    assert output.startswith("running None ")


def test_a_variable_names_another_environment_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("CUA_B=here\n")
    (tmp_path / "named").write_text("CUA_B=named\n")

    output, _ = start_with_secret(tmp_path, "mode=done", CUA_RL_ENV_FILE="named").communicate()
    wrong = start_with_secret(tmp_path, CUA_RL_ENV_FILE="nowhere")
    _, errors = wrong.communicate()

    assert output.startswith("running named ")
    assert wrong.returncode == 2
    assert errors.startswith("configuration error: CUA_RL_ENV_FILE: expected a file of variables\n    got 'nowhere'")


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: only root can give files away")
def test_an_environment_file_that_another_user_put_into_the_folder_is_ignored(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("CUA_B=theirs\n")
    os.chown(tmp_path / ".env", 60_000, 60_000)

    output, errors = start_with_secret(tmp_path, "mode=done").communicate()

    assert output.startswith("running None ")
    assert ".env is ignored" in errors


def test_an_environment_file_with_secrets_that_all_may_read_causes_a_warning(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("OPENAI_API_KEY=key-of-a-test\n")
    (tmp_path / ".env").chmod(0o644)

    _, loud = start_with_secret(tmp_path, "mode=done").communicate()
    (tmp_path / ".env").chmod(0o600)
    _, quiet = start_with_secret(tmp_path, "mode=done").communicate()

    assert "chmod 600 .env" in loud
    assert quiet == ""


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc: command lines are overwritten on Linux only")
def test_programs_of_the_policy_find_no_expected_answer_in_the_command_line(tmp_path: Path) -> None:
    told = '[{"expected": "a \\"b\\", c", "n": 7}, {"answer":42}, {"expected" : [1, 2]}]'
    process = start_with_secret(tmp_path, f"base_url={told}")
    assert process.stdout is not None
    process.stdout.readline()

    shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    process.send_signal(signal.SIGTERM)
    process.communicate()

    left = shown[shown.index(b"base_url=") :].replace(b"*", b"").rstrip(b"\0")
    assert left == b'base_url=[{, "n": 7}, {}, {}]'


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_a_program_of_our_own_user_reads_neither_environment_nor_memory_of_a_recipe(tmp_path: Path) -> None:
    user = SystemUser(uid=GUEST_UIDS[-2]) if can_change_user() else SystemUser()
    command = user.command([sys.executable, "-c", RECIPE, "mode=inspected"])
    environment = {"PATH": os.defpath, "PYTHONPATH": str(Path(cua_rl.__path__[0]).parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=True)

    environ, memory, status = (int(word) for word in done.stdout.splitlines()[1].split())
    assert (environ != 0, memory != 0, status) == (True, True, 0)
