import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from cua_rl.tinker_service.store import Store
from tests.real.database.conftest import run_sql
from tests.real.tinker_service.conftest import PROTOBUF, Client, running
from tests.tinker_service.clients import DEADLY, text_pass


class LosingStore(Store):
    """Loses its connection once, after a request is stored and before it learns that."""

    is_losing = False

    async def add_request(self, row: Mapping[str, object]) -> None:
        await super().add_request(row)
        if self.is_losing:
            self.is_losing = False
            raise OperationalError("COMMIT", {}, ConnectionError("the server closed the connection"))


async def weight_of(client: Client, model_id: str, seq_id: int) -> float:
    """The weight of a model in the trainer, after a request that changes nothing."""
    await client.result(await client.train(text_pass(model_id, seq_id, forward_only=True)))
    return client.host.models[model_id.replace(":", ".")].weight


@pytest.mark.parametrize("num_requests", range(7))
async def test_a_service_that_is_killed_after_any_request_goes_on_and_takes_no_step_twice(
    num_requests: int, url: str, tmp_path: Path
) -> None:
    # three steps of a pass and an optimizer step each, weights 3 * 0.5; the client sends what was not answered again
    async with running(url, tmp_path) as client:
        model_id = await client.create(await client.session())
        for seq_id in range(1, num_requests + 1):
            future = await (client.train(text_pass(model_id, seq_id)) if seq_id % 2 else client.step(model_id, seq_id))
            if seq_id < num_requests:
                await client.result(future)
    async with running(url, tmp_path) as client:
        for seq_id in range(max(1, num_requests), 7):
            future = await (client.train(text_pass(model_id, seq_id)) if seq_id % 2 else client.step(model_id, seq_id))
            assert "error" not in (await client.result(future)).text
        assert await weight_of(client, model_id, 7) == 4.5
    assert run_sql(url, "SELECT num_completed_steps FROM trainings") == [(3,)]
    assert run_sql(url, "SELECT num_steps FROM tinker_models") == [(3,)]


async def test_a_request_of_which_the_service_does_not_learn_that_it_is_stored_is_carried_out_when_it_is_repeated(
    url: str, tmp_path: Path
) -> None:
    async with running(url, tmp_path, make_store=LosingStore) as client:
        assert isinstance(client.store, LosingStore)
        model_id = await client.create(await client.session())
        client.store.is_losing = True
        lost = await client.send("POST", "forward_backward", content=text_pass(model_id, 1), headers=PROTOBUF)
        assert lost.status_code == 500
        again = await asyncio.gather(*(client.train(text_pass(model_id, 1)) for _ in range(3)))
        stepped = await client.result(await client.step(model_id, 2))
        assert "metrics" in stepped.json(), stepped.text
        for one in again:
            assert "error" not in (await client.result(one)).text
        assert await weight_of(client, model_id, 3) == 1.5


async def test_requests_that_waited_for_an_earlier_one_still_wait_for_it_after_a_kill(url: str, tmp_path: Path) -> None:
    async with running(url, tmp_path) as client:
        model_id = await client.create(await client.session())
        stepped = await client.step(model_id, 2)
    async with running(url, tmp_path) as client:
        await client.train(text_pass(model_id, 1))
        assert "metrics" in (await client.result(stepped)).json()
        assert await weight_of(client, model_id, 3) == 1.5


async def test_a_pass_that_failed_fails_again_when_it_is_repeated(url: str, tmp_path: Path) -> None:
    async with running(url, tmp_path) as client:
        model_id = await client.create(await client.session())
        await client.train(text_pass(model_id, 1))
        await client.result(await client.train(text_pass(model_id, 2, 222.0)))
        await client.result(await client.train(text_pass(model_id, 3, 2.0)))
    async with running(url, tmp_path) as client:
        await client.result(await client.step(model_id, 4))
        assert await weight_of(client, model_id, 5) == 3.0  # 0.5 * 6: only the pass after the failed one


async def test_a_request_of_which_the_trainer_dies_fails_alone_with_its_gradients_and_is_not_carried_out_again(
    url: str, tmp_path: Path
) -> None:
    async with running(url, tmp_path) as client:
        session_id = await client.session()
        model_id, other_id = [await client.create(session_id, number) for number in range(2)]
        await client.train(text_pass(model_id, 1))
        await client.train(text_pass(other_id, 1))
        died = (await client.result(await client.train(text_pass(model_id, 2, DEADLY / 3)))).json()
        assert died["category"] == "server"
        assert "the trainer died" in died["error"]
        assert "Traceback" not in died["error"]
        assert "no gradient" in (await client.result(await client.step(model_id, 3))).json()["error"]
        assert "metrics" in (await client.result(await client.step(other_id, 2))).json()
        await client.result(await client.train(text_pass(model_id, 4, 2.0)))
        assert client.host.done.count("revive") == 1
    async with running(url, tmp_path) as client:
        assert "metrics" in (await client.result(await client.step(model_id, 5))).json()
        assert await weight_of(client, model_id, 6) == 3.0  # 0.5 * 6: only the pass after the one that was deadly
        assert await weight_of(client, other_id, 3) == 1.5
        assert f"forward_backward {DEADLY:g}" not in client.host.done


async def test_a_step_whose_snapshot_finds_no_room_counts_and_is_there_after_a_kill(url: str, tmp_path: Path) -> None:
    async with running(url, tmp_path) as client:
        model_id = await client.create(await client.session())
        (model,) = client.host.models.values()
        model.is_disk_full = True
        await client.train(text_pass(model_id, 1))
        assert "metrics" in (await client.result(await client.step(model_id, 2))).json()
    async with running(url, tmp_path) as client:
        await client.train(text_pass(model_id, 3))
        assert "metrics" in (await client.result(await client.step(model_id, 4))).json()
        assert await weight_of(client, model_id, 5) == 3.0  # two steps of 0.5 * 3


async def test_a_model_whose_snapshot_found_no_room_does_not_need_the_checkpoint_that_it_has_loaded(
    url: str, tmp_path: Path
) -> None:
    async with running(url, tmp_path) as client:
        model_id = await client.create(await client.session())
        (model,) = client.host.models.values()
        await client.train(text_pass(model_id, 1))
        await client.step(model_id, 2)
        await client.result(await client.post("save_weights", {"model_id": model_id, "seq_id": 3, "path": "one"}))
        model.is_disk_full = True
        body = {"model_id": model_id, "seq_id": 4, "path": f"tinker://{model_id}/weights/one", "optimizer": True}
        assert "error" not in (await client.result(await client.post("load_weights", body))).text
        await client.send("DELETE", f"training_runs/{model_id}/checkpoints/weights/one")
    async with running(url, tmp_path) as client:
        await client.train(text_pass(model_id, 5))
        assert "metrics" in (await client.result(await client.step(model_id, 6))).json()
        assert await weight_of(client, model_id, 7) == 3.0  # the loaded 1.5, and a step of 0.5 * 3


async def test_answers_samplers_and_checkpoints_survive(url: str, tmp_path: Path) -> None:
    async with running(url, tmp_path) as client:
        session_id = await client.session()
        model_id = await client.create(session_id)
        trained = await client.train(text_pass(model_id, 1))
        await client.step(model_id, 2)
        await client.result(await client.post("save_weights", {"model_id": model_id, "seq_id": 3, "path": "one"}))
        body = {"model_id": model_id, "seq_id": 4, "sampling_session_seq_id": 0}
        saved = await client.result(await client.post("save_weights_for_sampler", body))
        sampler_id = saved.json()["sampling_session_id"]
        before = (await client.result(trained)).content
    async with running(url, tmp_path) as client:
        assert (await client.result(trained)).content == before
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        body = {"sampling_session_id": sampler_id, "seq_id": 0, "prompt": prompt, "sampling_params": {}}
        await client.result(await client.post("asample", body))
        _, _, adapter = client.server.asked[0]
        assert adapter is not None
        assert (adapter.path / "adapter.json").read_text() == "1.5"
        body = {"model_id": model_id, "seq_id": 5, "path": f"tinker://{model_id}/weights/one", "optimizer": True}
        await client.result(await client.post("load_weights", body))
        assert await weight_of(client, model_id, 6) == 1.5


async def test_a_model_does_not_need_the_checkpoint_that_it_has_loaded(url: str, tmp_path: Path) -> None:
    async with running(url, tmp_path) as client:
        session_id = await client.session()
        model_id = await client.create(session_id)
        await client.train(text_pass(model_id, 1))
        await client.step(model_id, 2)
        await client.result(await client.post("save_weights", {"model_id": model_id, "seq_id": 3, "path": "one"}))
        path = f"tinker://{model_id}/weights/one"
        body = {"session_id": session_id, "model_seq_id": 1, "path": path, "optimizer": False}
        other_id = (await client.result(await client.post("load_weights", body))).json()["model_id"]
        await client.result(await client.train(text_pass(other_id, 1)))
        await client.send("DELETE", f"training_runs/{model_id}/checkpoints/weights/one")
    async with running(url, tmp_path) as client:
        await client.result(await client.step(other_id, 2))
        assert await weight_of(client, other_id, 3) == 3.0
