"""Benchmarks: results of recipes.evaluate below the results folder."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

from fastapi import APIRouter, Request

from cua_rl.host.masking import mask_secrets
from cua_rl.monitor.answers import REFUSALS
from cua_rl.monitor.schemas import Benchmark, Benchmarks
from cua_rl.monitor.security import CanRead
from cua_rl.types.json_values import is_object

router = APIRouter(prefix="/api/benchmarks", tags=["benchmarks"], dependencies=[CanRead], responses=REFUSALS)
_MAX_RESULTS, _MAX_BYTES = 100, 4 * 2**20


@router.get("")
async def list_benchmarks(request: Request) -> Benchmarks:
    """Evaluations of models on task sets, newest first."""
    folder: Path | None = request.app.state.results_folder
    if folder is None:
        return Benchmarks(benchmarks=[], num_others=0)
    return await asyncio.to_thread(load_benchmarks, folder)


def load_benchmarks(folder: Path) -> Benchmarks:
    """The newest readable results.json in the folder and in the folders directly below it."""
    paths = [
        path
        for pattern in ("results.json", "*/results.json", "*/*/results.json")
        for path in folder.glob(pattern)
        if path.is_file()
    ]
    paths.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    found = [_load(path, folder) for path in paths[:_MAX_RESULTS]]
    shown = [benchmark for benchmark in found if benchmark is not None]
    return Benchmarks(benchmarks=shown, num_others=len(paths) - len(shown))


def _load(path: Path, folder: Path) -> Benchmark | None:
    try:
        results: object = None if path.stat().st_size > _MAX_BYTES else json.loads(path.read_text(encoding="utf-8"))
        if not is_object(results):
            return None
        page = path.with_suffix(".md")
        title = page.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ") if page.is_file() else None
        return Benchmark(
            name=path.parent.name,
            title=title,
            path=str(path.parent.relative_to(folder)),
            written_at=datetime.fromtimestamp(path.stat().st_mtime, UTC),
            results=mask_secrets(results),
        )
    except (OSError, ValueError, RecursionError):  # also closed to us, or gone meanwhile: the others are shown
        return None
