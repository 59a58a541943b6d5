"""Screenshots in a folder or an object store: the same records, hashes and pixels as in the database."""

import asyncio
import logging
import stat
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.rebuild import load_groups
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.screenshots import STORE_VARIABLE, ScreenshotStore, StoreError
from cua_rl.database.session import find_database
from cua_rl.recipes.prune import PruneConfig, cli_main
from cua_rl.types.errors import ConfigError
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, make_group, source_events, start, step_end
from tests.real.database.test_prune import ENDED, images_of, successes_of
from tests.real.database.test_recorder import record


@pytest.fixture(params=["folder", "object store"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What runs find in their environment; fsspec's file system in memory stands for an object store."""
    url = f"file://{tmp_path}/screens" if request.param == "folder" else f"memory://{uuid4().hex}/screens"
    monkeypatch.setenv(STORE_VARIABLE, url)
    return url


def files_in(store_url: str) -> dict[str, bytes]:
    """Contents by the names of files."""
    files, root = fsspec.url_to_fs(store_url)
    return {path.rpartition("/")[2]: files.cat_file(path) for path in files.find(root)}


async def test_a_run_is_rebuilt_from_the_store_and_the_database_holds_no_pixels(
    url: str, session: AsyncSession, store_url: str
) -> None:
    group = make_group(1)

    await record(url, start(), *source_events(group), step_end(group), ENDED)

    assert run_sql(url, "SELECT count(*) FROM screenshots WHERE data IS NOT NULL") == [(0,)]
    stored = files_in(store_url)
    assert stored.keys() == images_of([*group.rollouts, *group.faulty])
    assert all(sha256(data).hexdigest() == name for name, data in stored.items())
    sizes = {str(sha): size for sha, size in run_sql(url, "SELECT sha256, size_bytes FROM screenshots")}
    assert sizes == {name: len(data) for name, data in stored.items()}
    assert await load_groups(session, 1, 1) == [group]


async def test_what_is_pruned_is_gone_from_the_store(url: str, session: AsyncSession, store_url: str) -> None:
    group = make_group(1)
    await record(url, start(), *source_events(group), step_end(group), ENDED)

    await cli_main(PruneConfig(run="run", dry_run=False), {"DATABASE_URL": url})

    kept = successes_of([group], success=False)
    assert files_in(store_url).keys() == images_of(kept)
    again = start()
    await record(url, again, *source_events(group), step_end(group), ENDED)
    assert files_in(store_url).keys() == images_of([*group.rollouts, *group.faulty])
    assert await load_groups(session, 1, 1) == [group]


async def test_screenshots_of_earlier_runs_stay_in_the_database_and_are_found_there(
    url: str, session: AsyncSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = make_group(1, "first"), make_group(2, "second")
    await record(url, start(), *source_events(first), step_end(first))
    monkeypatch.setenv(STORE_VARIABLE, f"file://{tmp_path}/screens")
    await record(url, start(2), *source_events(second, 2), step_end(second, 2))

    assert [await load_groups(session, 1, step) for step in (1, 2)] == [[first], [second]]
    monkeypatch.delenv(STORE_VARIABLE)
    with pytest.raises(StoreError, match=f"expected {STORE_VARIABLE} in the environment for screenshots outside of"):
        await load_groups(session, 1, 2)


async def test_a_store_that_is_away_is_tried_again_and_nothing_is_lost(
    url: str, session: AsyncSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "screens"
    monkeypatch.setenv(STORE_VARIABLE, f"file://{root}")
    group = make_group(1)
    caplog.set_level(logging.WARNING)

    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        root.rename(tmp_path / "elsewhere")
        root.write_text("in the way")
        for event in (start(), *source_events(group), step_end(group)):
            await recorder.record(event)
        while "cannot write screenshots" not in caplog.text:
            await asyncio.sleep(0.01)
        root.unlink()
        await recorder.flush()

    assert await load_groups(session, recorder.scope.training_id or 0, 1) == [group]


def test_files_are_private_whole_and_checked(tmp_path: Path) -> None:
    store = ScreenshotStore(f"file://{tmp_path}/screens")
    data = b"pixels"
    digest = sha256(data).hexdigest()

    store.write({digest: data})
    path = tmp_path / "screens" / digest[:2] / digest
    assert path.read_bytes() == data
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [one.name for one in path.parent.iterdir()] == [digest]
    assert store.read([digest]) == {digest: data}
    path.write_bytes(b"others")
    with pytest.raises(StoreError, match="got other bytes under its name"):
        store.read([digest])
    store.remove([digest, "0" * 64])
    with pytest.raises(StoreError, match="expected these screenshots in"):
        store.read([digest])


@pytest.mark.parametrize("name", ["../../victim", "/victim", "a/../../../victim", "..", ""])
def test_a_name_in_a_database_leads_to_no_file_outside_the_store(tmp_path: Path, name: str) -> None:
    store = ScreenshotStore(f"file://{tmp_path}/store/screens")
    store.write({"0" * 64: b"pixels"})
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")

    for attack in (store.remove, store.read, lambda names: store.write(dict.fromkeys(names, b"theirs"))):
        with pytest.raises(StoreError, match="expected hashes as names of screenshots"):
            attack([name])
    assert victim.read_bytes() == b"precious"


async def test_a_url_without_a_driver_or_a_folder_is_refused_before_a_run_starts(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"{STORE_VARIABLE}: expected the URL of a folder or an object store"):
        await find_database({STORE_VARIABLE: "nosuchstore://bucket"})
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(STORE_VARIABLE, f"file://{tmp_path}/file")
    with pytest.raises(StoreError, match="cannot write screenshots to"):
        await record(url, start())
