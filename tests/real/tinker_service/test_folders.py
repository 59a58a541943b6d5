"""Folders of weights: each stays for as long as somebody may use it, and no longer."""

import asyncio
import os
import shutil
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from cua_rl.tinker_service.store import Store
from tests.patience import patience
from tests.real.database.conftest import run_sql
from tests.real.tinker_service.conftest import Client, running
from tests.tinker_service.clients import text_pass


class StoppingStore(Store):
    """Stops after it has forgotten expired checkpoints, before their folders are deleted."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self.may_clean, self.has_cleaned, self.may_delete = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def clean(self, training_ids: Sequence[int], *, kept: datetime) -> list[str]:
        await self.may_clean.wait()
        folders = await super().clean(training_ids, kept=kept)
        self.has_cleaned.set()
        await self.may_delete.wait()
        return folders


async def save(client: Client, model_id: str, seq_id: int, **fields: object) -> dict[str, str]:
    body = {"model_id": model_id, "seq_id": seq_id, **fields}
    kind = "save_weights_for_sampler" if "sampling_session_seq_id" in fields else "save_weights"
    return (await client.result(await client.post(kind, body))).json()


async def load(client: Client, model_id: str, seq_id: int, name: str) -> dict[str, str]:
    body = {"model_id": model_id, "seq_id": seq_id, "path": f"tinker://{model_id}/weights/{name}", "optimizer": True}
    return (await client.result(await client.post("load_weights", body))).json()


async def gone(folder: Path) -> None:
    async with asyncio.timeout(patience(20.0)):
        while folder.exists():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("overwrites", [True, False])
async def test_a_checkpoint_that_is_saved_under_a_name_that_expires_just_now_is_kept(
    overwrites: bool, url: str, tmp_path: Path
) -> None:
    async with running(url, tmp_path, make_store=StoppingStore) as client:
        assert isinstance(client.store, StoppingStore)
        model_id = await client.create(await client.session())
        await save(client, model_id, 1, path="one", ttl_seconds=3600)
        (old,) = (Path(folder) for (folder,) in run_sql(url, "SELECT folder FROM tinker_checkpoints"))
        run_sql(url, "UPDATE tinker_checkpoints SET expires_at = now() - interval '1 second' RETURNING 1")
        client.store.may_clean.set()
        await client.store.has_cleaned.wait()
        assert "path" in await save(client, model_id, 2, path="one", overwrite=overwrites)
        client.store.may_delete.set()
        await gone(old)
        assert "error" not in await load(client, model_id, 3, "one")


async def test_a_checkpoint_that_was_overwritten_leaves_no_folder(client: Client, tmp_path: Path) -> None:
    model_id = await client.create(await client.session())
    await save(client, model_id, 1, path="one")
    await save(client, model_id, 2, path="one", overwrite=True)
    assert len(list(tmp_path.glob("weights/*/*"))) == 1
    assert "error" not in await load(client, model_id, 3, "one")


async def test_a_checkpoint_whose_folder_is_gone_fails_the_request_and_not_the_service(
    client: Client, tmp_path: Path
) -> None:
    model_id = await client.create(await client.session())
    await save(client, model_id, 1, path="one")
    for folder in tmp_path.glob("weights/*/*"):
        shutil.rmtree(folder)
    assert "No such file" in (await load(client, model_id, 2, "one"))["error"]
    await client.train(text_pass(model_id, 3))
    assert "metrics" in (await client.result(await client.step(model_id, 4))).json()


async def test_weights_of_samplers_that_moved_on_are_deleted_and_those_that_one_of_several_uses_are_not(
    url: str, tmp_path: Path
) -> None:
    async with running(url, tmp_path) as client:
        model_id = await client.create(await client.session())
        for number in range(2):  # both sample from the second
            await save(client, model_id, number + 1, sampling_session_seq_id=number, kind="inflight")
        await save(client, model_id, 3, sampling_session_seq_id=2)
    weights = tmp_path / "sampler_weights" / model_id.replace(":", ".")
    assert sorted(folder.name for folder in weights.iterdir()) == ["~1", "~2", "~3"]
    for folder in weights.iterdir():
        os.utime(folder, (time.time() - 7200,) * 2)
    run_sql(
        url,
        "UPDATE tinker_samplers SET used_at = now() - interval '2 hours' WHERE id LIKE '%:sample:0' RETURNING 1",
    )
    async with running(url, tmp_path):
        await gone(weights / "~1")
        async with asyncio.timeout(patience(20.0)):
            while run_sql(url, "SELECT count(*) FROM tinker_samplers") != [(2,)]:
                await asyncio.sleep(0.01)
    assert sorted(folder.name for folder in weights.iterdir()) == ["~2", "~3"]


async def test_answers_that_are_forgotten_already_are_not_written_again(url: str, tmp_path: Path) -> None:
    async with running(url, tmp_path) as client:
        model_id = await client.create(await client.session())
        await save(client, model_id, 1, path="one")
    columns = "SELECT seq_id, ctid::text FROM tinker_requests ORDER BY seq_id"
    run_sql(url, "UPDATE tinker_requests SET ended_at = ended_at - interval '3 hours', answer = NULL RETURNING 1")
    before = run_sql(url, columns)
    async with running(url, tmp_path) as client:
        await save(client, model_id, 2, path="two")  # and so the model comes back, and a snapshot is saved
    assert run_sql(url, columns)[0] == before[0]  # the other one is a part of this snapshot
