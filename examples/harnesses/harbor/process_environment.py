"""A Harbor environment without containers: a folder as `/`, and processes that see it beside the machine's programs.

Bubblewrap gives a trial its own files and, with `network_mode = "no-network"`, no network. That is all: its processes
have the kernel, programs and user of the harness, see what the harness sees of other processes, and have no limit of
memory or processors. So it isolates no more than the sandbox of the harness does. Of the Dockerfile, the instructions
WORKDIR, ENV, COPY and RUN are followed, FROM is ignored, and a task with any other is refused.
"""

import asyncio
import ctypes
import io
import os
import shlex
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, override

from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
from harbor.environments.capabilities import EnvironmentCapabilities

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FOLDERS = ("app", "logs/agent", "logs/verifier", "logs/artifacts", "tests", "solution", "root", "tmp", "var/tmp")
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "opt")
ROOT_OF_ITS_OWN = ("bwrap", "--unshare-user", "--uid", "0", "--gid", "0", "--unshare-ipc", "--die-with-parent")


def read_dockerfile(path: Path) -> list[tuple[str, str]]:
    """Its instructions and their arguments; raises `ValueError` for one that needs an image."""
    lines = [line.strip() for line in path.read_text().replace("\\\n", " ").splitlines()]
    steps = [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line)]
    for word, rest in steps:
        if word[0] != "#" and (word not in {"FROM", "WORKDIR", "ENV", "COPY", "RUN"} or rest.startswith(("[", "--"))):
            raise ValueError(
                f"expected only FROM, WORKDIR, ENV, COPY and RUN, without options, in {str(path)!r}, got "
                f"{word} {rest!r}: run the task in Docker"
            )
    return steps


def view(root: Path) -> list[str]:
    """What a trial sees as words of bubblewrap: its folder, and of the machine what is no one's data."""
    words = ["--bind", str(root), "/", "--dev", "/dev", "--proc", "/proc"]
    for name in SYSTEM:
        if Path(f"/{name}").is_symlink():
            words += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif Path(f"/{name}").is_dir():
            words += ["--ro-bind", f"/{name}", f"/{name}"]
    return words


def kill_members(namespace: str) -> None:
    """End all processes that see these files."""
    while True:
        found = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(folder / "ns" / "mnt") == namespace:
                    os.kill(int(folder.name), signal.SIGKILL)
                    found += 1
            except OSError:  # it has ended, or is not ours
                continue
        if not found:
            return
        time.sleep(0.02)


def pack(paths: dict[str, Path]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, path in paths.items():
            archive.add(path, name)
    return file.getvalue()


def contents(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir()}


class ProcessEnvironment(BaseEnvironment):
    """Named as `environment.import_path: process_environment:ProcessEnvironment`."""

    _pid = 0
    """Of a process that stays in it."""

    @staticmethod
    @override
    def type() -> str:
        return "process"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    @override
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        super().preflight(kwargs)
        for program in ("bwrap", "nsenter", "tar", "bash"):
            if not shutil.which(program):
                raise SystemExit(f"expected the program {program!r}, found none; install it, or run the task in Docker")
        tried = subprocess.run([*ROOT_OF_ITS_OWN, "--ro-bind", "/", "/", "true"], capture_output=True, text=True)
        if tried.returncode:
            why = tried.stderr.strip()
            raise SystemExit(f"expected bubblewrap to make namespaces, got {why!r}; permit them, or use Docker")

    @override
    def _validate_definition(self) -> None:
        self._steps = read_dockerfile(self.environment_dir / "Dockerfile")
        self._workdir = self.task_env_config.workdir or "/"
        self._variables = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"}

    @override
    async def start(self, force_build: bool) -> None:
        ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: processes of the trial have our user, and must not read us
        self._root = Path(tempfile.mkdtemp(prefix="harbor-"))
        for name in FOLDERS:
            (self._root / name).mkdir(parents=True, exist_ok=True)
        first = asyncio.create_task(self._begin())
        try:
            await asyncio.shield(first)
        except asyncio.CancelledError:  # out of time; bubblewrap that is killed as it begins leaves a process behind
            await first
            raise
        for word, rest in self._steps:
            await self._follow(word, rest)

    async def _begin(self) -> None:
        """Start the process that stays."""
        without = ["--unshare-net"] if self._network_disabled else []
        self._first = await asyncio.create_subprocess_exec(
            *(*ROOT_OF_ITS_OWN, *without, *view(self._root), "sh", "-c", "echo $$; exec sleep infinity"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": PATH},
        )
        assert self._first.stdout is not None
        assert self._first.stderr is not None
        line = await self._first.stdout.readline()
        if not line:
            said = (await self._first.stderr.read()).decode(errors="replace").strip()
            raise RuntimeError(f"expected bubblewrap to start, got {said!r}")
        self._pid = int(line)
        self._namespace = os.readlink(f"/proc/{self._pid}/ns/mnt")

    async def _follow(self, word: str, rest: str) -> None:
        match word:
            case "WORKDIR":
                self._workdir = os.path.join(self._workdir, rest)
                await self._need(["mkdir", "-p", self._workdir])
            case "ENV":
                self._variables |= dict(one.split("=", 1) for one in shlex.split(rest))
            case "COPY":
                *sources, target = shlex.split(rest)
                for path in (self.environment_dir / source for source in sources):
                    place = os.path.join(self._workdir, target)
                    await (self.upload_dir(path, place) if path.is_dir() else self.upload_file(path, place))
            case "RUN":
                await self._need(["bash", "-c", rest], self._workdir)
            case _:
                pass

    @override
    async def stop(self, delete: bool) -> None:
        if not self._pid:
            return
        await asyncio.to_thread(kill_members, self._namespace)
        await self._first.wait()
        if delete:
            await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """As its root, whoever `user` is: there are no other users in it."""
        variables = self._merge_env(env) or {}
        status, out, errors = await self._run(["bash", "-c", command], cwd, variables, timeout_s=timeout_sec)
        stdout, stderr = (text.decode(errors="replace") for text in (out, errors))
        return ExecResult(stdout=stdout, stderr=stderr, return_code=status)

    async def _run(
        self,
        argv: list[str],
        cwd: str | None = None,
        variables: dict[str, str] | None = None,
        *,
        timeout_s: float | None = None,
        given: bytes = b"",
    ) -> tuple[int, bytes, bytes]:
        """Its status, output and errors, which go to files: a process that it leaves behind may keep them open."""
        if any("\0" in word for word in argv):  # of the model: no program can be given it
            return 126, b"", b"expected a command without a null character\n"
        if self._first.returncode is not None:
            raise RuntimeError("expected the environment to run, it has ended")
        words = ["nsenter", f"--target={self._pid}", "--preserve-credentials", "--user", "--mount", "--ipc"]
        words += [*(["--net"] if self._network_disabled else []), "--", "env", "-i", "-C", cwd or self._workdir]
        words += [f"{name}={value}" for name, value in {**self._variables, **(variables or {})}.items()]
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            source.write(given)
            source.seek(0)
            process = await asyncio.create_subprocess_exec(
                *words, *argv, stdin=source, stdout=out, stderr=errors, start_new_session=True
            )
            try:
                await asyncio.wait_for(process.wait(), timeout_s)
            except TimeoutError:  # Harbor's Docker says it like this
                raise RuntimeError(f"Command timed out after {timeout_s} seconds") from None
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
            out.seek(0)
            errors.seek(0)
            return process.returncode or 0, out.read(), errors.read()

    async def _need(self, argv: list[str], cwd: str = "/", given: bytes = b"") -> bytes:
        """Its output; raises `RuntimeError` if it fails."""
        status, out, errors = await self._run(argv, cwd, given=given)
        if status:
            said = errors.decode(errors="replace").strip()
            raise RuntimeError(f"expected {shlex.join(argv)!r} to succeed, got status {status}: {said}")
        return out

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        folder, name = os.path.split(target_path)
        if not name or await self.is_dir(target_path):
            folder, name = target_path, Path(source_path).name
        await self._upload({name: Path(source_path)}, folder)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._upload(await asyncio.to_thread(contents, Path(source_dir)), target_dir)

    async def _upload(self, paths: dict[str, Path], folder: str) -> None:
        """Through tar, so that links which the agent made lead nowhere outside."""
        packed = await asyncio.to_thread(pack, paths)
        await self._need(["mkdir", "-p", folder])
        await self._need(["tar", "-x", "--no-same-owner", "-C", folder], given=packed)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await asyncio.to_thread(Path(target_path).write_bytes, await self._need(["cat", source_path]))

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        packed = await self._need(["tar", "-c", "-C", source_dir, "."])
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(target_dir, filter=transfer_tar_filter)
