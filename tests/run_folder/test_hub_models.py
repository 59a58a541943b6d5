"""A model that is named by its id on the hub: looking at it takes its settings, a run its weights."""

import asyncio
import hashlib
import json
import os
import sys
from asyncio.subprocess import PIPE
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cua_rl.host.http_server import serve_app
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.run_folder.model_folder import pinned_name

LOOK = """
from cua_rl.run_folder.model_folder import find_model
print(find_model("someone/tiny"))
"""
ONE_FILE = """
from huggingface_hub import hf_hub_download
print(hf_hub_download("someone/tiny", "config.json"))
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FETCH = """
import sys
from pathlib import Path
from cua_rl.run_folder.model_folder import fetch_weights, find_model
folder = find_model("someone/tiny")
fetch_weights("someone/tiny", folder)
fetch_weights("someone/tiny", folder)
print(folder)
"""


LATER = "fedcba9876543210fedcba9876543210fedcba98"


@dataclass
class Hub:
    """Serves the tiny model as the hub would, and keeps which files were fetched, of which commit."""

    fetched: list[str] = field(default_factory=list[str])
    commits: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": COMMIT})
    asked_for: set[str] = field(default_factory=set[str])

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/api/models/someone/tiny", self._info),
                Route("/api/models/someone/tiny/revision/{revision}", self._info),
                Route("/api/models/someone/tiny/tree/{revision}", self._tree),
                Route("/someone/tiny/resolve/{revision}/{name}", self._file, methods=["GET", "HEAD"]),
            ]
        )

    async def _info(self, request: Request) -> Response:
        siblings = [{"rfilename": file.name} for file in sorted(TINY_QWEN3_VL.iterdir()) if file.is_file()]
        commit = self._commit(request)
        return JSONResponse({"id": "someone/tiny", "sha": commit, "siblings": siblings, "private": False})

    def _commit(self, request: Request) -> str:
        revision = str(request.path_params.get("revision", "main"))
        return self.commits.get(revision, revision)

    async def _tree(self, request: Request) -> Response:
        files = [file for file in sorted(TINY_QWEN3_VL.iterdir()) if file.is_file()]
        entries = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40} for file in files]
        return JSONResponse(entries)

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        content = (TINY_QWEN3_VL / name).read_bytes()
        if request.method == "GET":
            self.fetched.append(name)
            self.asked_for.add(self._commit(request))
        headers = {"X-Repo-Commit": self._commit(request), "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        return Response(content, headers=headers, media_type="application/octet-stream")


async def run(hub_url: str, home: Path, *arguments: str) -> tuple[int | None, str, str]:
    """A Python program whose hub is the double."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        env={**os.environ, "HF_ENDPOINT": hub_url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "NO_PROXY": "*"},
        stdout=PIPE,
        stderr=PIPE,
    )
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_a_dry_run_downloads_settings_and_a_run_the_weights_once(tmp_path: Path) -> None:
    hub = Hub()
    small = ["max_model_len=2048", "max_tokens=48", "dry_run=true", f"log_path={tmp_path / 'run'}"]
    async with serve_app(hub.app(), "127.0.0.1", 0, grace_s=0) as url:
        command = ["-m", "cua_rl.recipes.train", "model_name=someone/tiny", *small]
        status, output, errors = await run(url, tmp_path / "home", *command)
        assert status == 0, errors
        looked_at = set(hub.fetched)
        fetched = await run(url, tmp_path / "home", "-c", FETCH)

    assert "config.json" in looked_at
    assert "tokenizer.json" in looked_at
    assert not [name for name in looked_at if name.endswith(".safetensors")]
    assert fetched[0] == 0, fetched[2]
    folder = Path(fetched[1].strip())
    assert json.loads(output)["model_path"] == str(folder)
    assert (folder / "model.safetensors").read_bytes() == (TINY_QWEN3_VL / "model.safetensors").read_bytes()
    assert hub.fetched.count("model.safetensors") == 1
    assert json.loads(output)["model_name"] == f"someone/tiny@{COMMIT}"


async def test_a_branch_that_moves_after_a_dry_run_does_not_part_a_run_from_its_weights(tmp_path: Path) -> None:
    hub = Hub()
    async with serve_app(hub.app(), "127.0.0.1", 0, grace_s=0) as url:
        looked = await run(url, tmp_path, "-c", LOOK)
        hub.commits["main"] = LATER
        fetched = await run(url, tmp_path, "-c", FETCH)

    folders = [Path(done[1].strip()) for done in (looked, fetched)]
    assert (folders[0], folders[1].name) == (folders[1], COMMIT), fetched[2]
    assert (folders[1] / "model.safetensors").is_file()
    assert hub.asked_for == {COMMIT}


async def test_a_cache_that_holds_one_file_is_completed_with_the_same_commit(tmp_path: Path) -> None:
    hub = Hub()
    async with serve_app(hub.app(), "127.0.0.1", 0, grace_s=0) as url:
        other = await run(url, tmp_path, "-c", ONE_FILE)
        hub.commits["main"] = LATER
        fetched = await run(url, tmp_path, "-c", FETCH)

    folder = Path(fetched[1].strip())
    assert folder == Path(other[1].strip()).parent
    assert {file.name for file in folder.iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors"}


async def test_a_revision_behind_the_name_is_the_one_that_is_used_and_recorded(tmp_path: Path) -> None:
    hub = Hub(commits={"main": LATER, "v1": COMMIT})
    async with serve_app(hub.app(), "127.0.0.1", 0, grace_s=0) as url:
        looked = await run(url, tmp_path, "-c", LOOK.replace("someone/tiny", "someone/tiny@v1"))
        pinned = await run(url, tmp_path, "-c", FETCH.replace("someone/tiny", f"someone/tiny@{COMMIT}"))

    assert looked[1] == pinned[1], pinned[2]
    assert hub.asked_for == {COMMIT}


def test_a_name_is_pinned_to_the_commit_of_its_folder_and_a_folder_stays_as_it_is(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)

    assert pinned_name("someone/tiny", snapshot) == f"someone/tiny@{COMMIT}"
    assert pinned_name("someone/tiny@v1", snapshot) == f"someone/tiny@{COMMIT}"
    assert pinned_name(str(snapshot), snapshot) == str(snapshot)
    assert pinned_name(None, TINY_QWEN3_VL) is None
