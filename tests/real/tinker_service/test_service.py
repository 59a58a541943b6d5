import asyncio
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from cua_rl.sampling.generation import Generated
from cua_rl.tinker_service.messages import numbers, parse_message
from tests.real.database.conftest import run_sql
from tests.real.monitor.conftest import Monitor
from tests.real.tinker_service.conftest import BASE_MODEL, KEYS, PROTOBUF, Client, running
from tests.tinker_service.clients import IMAGE_TOKEN, FakeModel, Picture, add_datum, make_pass, png, text_pass

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}


def only(client: Client) -> FakeModel:
    (model,) = client.host.models.values()
    return model


async def test_a_model_is_trained_and_its_loss_and_logprobs_come_back(client: Client) -> None:
    model_id = await client.create(await client.session())
    first = await client.train(text_pass(model_id, 1))
    stepped = await client.step(model_id, 2)
    output = parse_message("ForwardBackwardOutput", (await client.result(first)).content)
    assert output.metrics["loss:sum"] == 3.0  # three targets of weight 1, as the fake trainer sums them
    assert output.metrics["policy_entropy:mean"] == 0.5
    assert list(numbers(output.loss_fn_outputs[0].fields["logprobs"].data, "f")) == [0.0, 0.0, 0.0]
    assert (await client.result(stepped)).json() == {"metrics": {"grad_norm:mean": 3.0}}
    assert only(client).weight == 1.5  # 0.5 * 3


async def test_requests_are_carried_out_by_their_numbers_although_the_first_arrives_last(client: Client) -> None:
    model_id = await client.create(await client.session())
    stepped = await client.step(model_id, 3, 0.125)
    second = await client.train(text_pass(model_id, 2, 2.0))
    assert client.host.done == [f"create {model_id.replace(':', '.')}"]
    await client.train(text_pass(model_id, 1, 1.0))
    await client.result(second)
    await client.result(stepped)
    assert client.host.done[1:] == ["forward_backward 3", "forward_backward 6", "optim_step 0.125"]


async def test_requests_that_have_no_room_in_memory_wait_in_the_database_for_their_turn(
    url: str, tmp_path: Path
) -> None:
    async with running(url, tmp_path, room=100) as client:
        model_id = await client.create(await client.session())
        later = [await client.train(text_pass(model_id, seq_id, float(seq_id))) for seq_id in (4, 3, 2)]
        await client.train(text_pass(model_id, 1))
        await client.result(later[0])
        assert client.host.done[1:] == [f"forward_backward {3 * seq_id}" for seq_id in (1, 2, 3, 4)]


async def test_prompts_of_a_key_on_their_way_have_room_and_take_none_of_another_key(url: str, tmp_path: Path) -> None:
    never = asyncio.Event()

    async def generate(*prompt: object, **how: object) -> Generated:
        await never.wait()
        raise AssertionError("it is cancelled before")

    async with running(url, tmp_path, room=2**18) as client:  # for two
        client.server.generate = generate  # type: ignore[method-assign]
        body = {"base_model": BASE_MODEL, "prompt": PROMPT, "sampling_params": {}}
        futures = [await client.post("asample", body) for _ in range(2)]
        assert (await client.send("POST", "asample", json=body)).status_code == 429
        client.key = KEYS[1]
        await client.post("asample", body)
        client.key = KEYS[0]
        await client.post("cancel_future", {"request_id": futures[0]["request_id"]})
        await client.send("POST", "retrieve_future", json={"request_id": futures[0]["request_id"]})
        await client.post("asample", body)


async def test_a_request_that_is_sent_again_is_carried_out_once(client: Client) -> None:
    session_id = await client.session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    created = [await client.post("create_model", body) for _ in range(2)]
    model_id = created[0]["model_id"]
    trained = await asyncio.gather(*(client.train(text_pass(model_id, 1)) for _ in range(3)))
    await client.result(trained[0])
    stepped = [await client.step(model_id, 2) for _ in range(2)]
    await client.result(stepped[1])
    assert created[0] == created[1]
    assert trained[0] == trained[1] == trained[2]
    assert client.host.done[1:] == ["forward_backward 3", "optim_step 0.5"]
    again = await client.send("POST", "forward_backward", content=text_pass(model_id, 1, 9.0), headers=PROTOBUF)
    assert again.status_code == 400
    assert "another request has" in again.json()["error"]


async def test_a_refused_request_changes_nothing_and_its_number_is_passed_over(client: Client) -> None:
    model_id = await client.create(await client.session())
    refused = await client.send(
        "POST", "optim_step", json={"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": "fast"}}
    )
    assert refused.status_code == 400
    await client.result(await client.train(text_pass(model_id, 2)))
    assert client.host.done[1:] == ["forward_backward 3"]


async def test_a_pass_that_fails_says_why_and_the_next_step_begins_anew(client: Client) -> None:
    model_id = await client.create(await client.session())
    await client.train(text_pass(model_id, 1))
    failed = await client.result(await client.train(text_pass(model_id, 2, 222.0)))
    assert failed.json() == {"error": "expected a finite loss, got nan", "category": "server"}
    assert "no gradient" in (await client.result(await client.step(model_id, 3))).json()["error"]
    await client.train(text_pass(model_id, 4))
    await client.result(await client.step(model_id, 5))
    assert only(client).weight == 1.5


async def test_a_forward_pass_leaves_the_gradient_as_it_is(client: Client) -> None:
    model_id = await client.create(await client.session())
    await client.train(text_pass(model_id, 1))
    await client.result(await client.train(text_pass(model_id, 2, 7.0, forward_only=True)))
    await client.result(await client.step(model_id, 3))
    assert only(client).weight == 1.5


async def test_an_answer_that_takes_long_is_asked_for_again(url: str, tmp_path: Path) -> None:
    async with running(url, tmp_path, wait_s=0.01) as client:
        model_id = await client.create(await client.session())
        stepped = await client.step(model_id, 2)
        answer = await client.send("POST", "retrieve_future", json={"request_id": stepped["request_id"]})
        assert answer.json()["type"] == "try_again"
        assert answer.json()["queue_state"] == "active"


async def test_the_monitor_shows_what_a_step_was_trained_on_with_its_images(client: Client, url: str) -> None:
    # two answers to one prompt with a picture, with advantages 0.5 and -0.5, and a text of two answers
    model_id = await client.create(await client.session())
    message = make_pass(model_id, 1)
    for answer, weight in ((7, 0.5), (8, -0.5)):
        inputs = {"target_tokens": [0, 0, 2, answer, 9], "weights": [0, 0, 0, weight, weight]}
        add_datum(message, [[1], Picture(), [2, answer]], inputs)
    add_datum(message, [[1, 2, 3, 4]], {"target_tokens": [2, 3, 4, 5], "weights": [1, 0, 0, 1]})
    await client.train(message.SerializeToString())
    await client.result(await client.step(model_id, 2))

    columns = "group_index, member_index, advantage, success, reward, turn_index, text, prompt_token_ids, before_sha256"
    query = f"SELECT {columns} FROM rollouts JOIN turns ON rollout_pk = rollouts.id ORDER BY 1, 2, 6"
    screen = sha256(png()).hexdigest()
    assert run_sql(url, query) == [
        (0, 0, 0.5, None, None, 0, "7 9", [1, IMAGE_TOKEN, IMAGE_TOKEN, 2], screen),
        (0, 1, -0.5, None, None, 0, "8 9", [1, IMAGE_TOKEN, IMAGE_TOKEN, 2], screen),
        (1, 0, 1.0, None, None, 0, "2", [1], None),
        (1, 0, 1.0, None, None, 1, "5", [1, 2, 3, 4], None),
    ]
    assert run_sql(url, "SELECT status, num_groups, num_ended_groups FROM steps") == [("completed", 2, 2)]


async def test_samples_come_from_the_weights_that_were_saved_for_them(client: Client) -> None:
    session_id = await client.session()
    model_id = await client.create(session_id)
    await client.train(text_pass(model_id, 1))
    await client.step(model_id, 2)
    saved = await client.post(
        "save_weights_for_sampler", {"model_id": model_id, "seq_id": 3, "sampling_session_seq_id": 0}
    )
    sampler_id = (await client.result(saved)).json()["sampling_session_id"]
    await client.train(text_pass(model_id, 4))
    await client.result(await client.step(model_id, 5))
    asked = {"sampling_session_id": sampler_id, "seq_id": 0, "num_samples": 2, "prompt": PROMPT}
    asked |= {"sampling_params": {"max_tokens": 4, "seed": 5, "stop": [7]}, "prompt_logprobs": True}
    future = await client.post("asample", asked)
    response = parse_message("SampleResponse", (await client.result(future)).content)
    assert len(future["sample_sequence_ids"]) == len(response.sequences) == 2
    assert list(numbers(response.sequences[0].logprobs, "f")) == [1.5, 1.5]  # of the first step, not the second
    assert len(numbers(response.prompt_logprobs, "f")) == 3
    _, params, adapter = client.server.asked[0]
    assert (params.n, params.seed, params.stop_token_ids, params.ignores_end_of_turn) == (2, 5, (7,), True)
    assert adapter is not None
    assert adapter.name == f"{model_id.replace(':', '.')}-000003"
    assert (await client.post("asample", asked)) == future
    assert len(client.server.asked) == 1
    shown = await client.get(f"samplers/{sampler_id}")
    assert shown == {"sampler_id": sampler_id, "base_model": BASE_MODEL, "model_path": None}


async def test_inflight_samplers_move_on_to_what_their_model_saves_later(client: Client) -> None:
    session_id = await client.session()
    model_id = await client.create(session_id)

    async def save(seq_id: int, number: int) -> str:
        body = {"model_id": model_id, "seq_id": seq_id, "sampling_session_seq_id": number, "kind": "inflight"}
        saved = await client.post("save_weights_for_sampler", body)
        return (await client.result(saved)).json()["sampling_session_id"]

    sampler_id = await save(1, 0)
    await client.train(text_pass(model_id, 2))
    await client.step(model_id, 3)
    await save(4, 1)
    asked = {"sampling_session_id": sampler_id, "seq_id": 0, "prompt": PROMPT, "sampling_params": {"stop": []}}
    await client.result(await client.post("asample", asked))
    _, params, adapter = client.server.asked[0]
    assert adapter is not None
    assert adapter.policy_version == 4
    assert params.ignores_end_of_turn


async def test_a_sample_that_the_process_does_not_know_is_gone_so_that_the_client_asks_again(client: Client) -> None:
    answer = await client.send("POST", "retrieve_future", json={"request_id": f"{'0' * 32}:sample:0:7"})
    assert answer.status_code == 410


async def test_a_checkpoint_is_continued_from_listed_published_and_deleted(client: Client, tmp_path: Path) -> None:
    session_id = await client.session()
    model_id = await client.create(session_id)
    await client.train(text_pass(model_id, 1))
    await client.step(model_id, 2)
    labels = {"why": "test"}
    saved = await client.post(
        "save_weights", {"model_id": model_id, "seq_id": 3, "path": "one", "user_metadata": labels, "ttl_seconds": 3600}
    )
    path = (await client.result(saved)).json()["path"]
    assert path == f"tinker://{model_id}/weights/one"
    loaded = await client.post(
        "load_weights", {"session_id": session_id, "model_seq_id": 1, "path": path, "optimizer": True}
    )
    other_id = (await client.result(loaded)).json()["model_id"]
    assert other_id == f"{session_id}:train:1"
    assert client.host.models[other_id.replace(":", ".")].weight == 1.5
    info = await client.post("get_info", {"model_id": other_id})
    assert (info["lora_rank"], info["model_data"]["model_name"]) == (8, BASE_MODEL)

    (listed,) = (await client.get(f"training_runs/{model_id}/checkpoints"))["checkpoints"]
    assert (listed["tinker_path"], listed["checkpoint_id"], listed["user_metadata"]) == (path, "weights/one", labels)
    assert listed["size_bytes"] > 0
    assert listed["expires_at"] is not None
    runs = await client.get("training_runs?limit=1")
    assert (len(runs["training_runs"]), runs["cursor"]["total_count"]) == (1, 2)
    assert (await client.get(f"training_runs/{model_id}"))["last_checkpoint"]["tinker_path"] == path
    assert (await client.post("weights_info", {"tinker_path": path}))["train_unembed"] is False
    where = f"training_runs/{model_id}/checkpoints/weights/one"

    stranger = replace(client, key=KEYS[1])
    assert (await stranger.send("POST", "weights_info", json={"tinker_path": path})).status_code == 404
    assert (await client.send("POST", f"{where}/publish")).status_code == 200
    assert (await stranger.send("POST", "weights_info", json={"tinker_path": path})).status_code == 200
    assert (await stranger.send("DELETE", where)).status_code == 403
    assert (await client.send("PUT", f"{where}/ttl", json={"ttl_seconds": None})).status_code == 200
    (listed,) = (await client.get("checkpoints"))["checkpoints"]
    assert (listed["expires_at"], listed["public"]) == (None, True)
    assert (await client.send("DELETE", where)).status_code == 200
    assert (await client.get("checkpoints"))["checkpoints"] == []
    assert list(tmp_path.glob("weights/*/one")) == []


async def test_a_name_that_exists_is_overwritten_only_on_demand(client: Client) -> None:
    model_id = await client.create(await client.session())

    async def save(seq_id: int, **fields: bool) -> dict[str, str]:
        body = {"model_id": model_id, "seq_id": seq_id, "path": "one", **fields}
        return (await client.result(await client.post("save_weights", body))).json()

    assert "path" in await save(1)
    assert (await save(2))["category"] == "user"
    assert "path" in await save(3, overwrite=True)


async def test_a_key_sees_only_what_was_made_with_it(client: Client) -> None:
    session_id = await client.session()
    model_id = await client.create(session_id)
    future = await client.train(text_pass(model_id, 1))
    stranger = replace(client, key=KEYS[1])
    answers = [
        await stranger.send("POST", "get_info", json={"model_id": model_id}),
        await stranger.send("POST", "forward_backward", content=text_pass(model_id, 2), headers=PROTOBUF),
        await stranger.send("POST", "retrieve_future", json={"request_id": future["request_id"]}),
        await stranger.send("POST", "session_heartbeat", json={"session_id": session_id}),
        await stranger.send("GET", f"sessions/{session_id}"),
        await stranger.send("GET", f"training_runs/{model_id}"),
        await stranger.send("POST", f"sessions/{session_id}/finish", json={"reason": {"type": "success"}}),
    ]
    assert {answer.status_code for answer in answers} == {404}
    assert (await stranger.get("training_runs"))["training_runs"] == []
    assert (await replace(client, key="tml-unknown").send("GET", "sessions")).status_code == 401
    assert (await replace(client, key="").send("GET", "sessions")).status_code == 401


async def test_keys_are_stored_as_hashes(client: Client, url: str) -> None:
    text = repr(run_sql(url, "SELECT * FROM tinker_keys"))
    assert not any(key in text for key in KEYS)


async def test_a_finished_session_frees_the_trainer_and_takes_no_more_requests(client: Client, url: str) -> None:
    session_id = await client.session()
    model_id = await client.create(session_id)
    await client.train(text_pass(model_id, 1))
    await client.result(await client.step(model_id, 2))
    await client.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    assert client.host.models == {}
    assert (await client.send("POST", "session_heartbeat", json={"session_id": session_id})).status_code == 410
    late = await client.send("POST", "optim_step", json={"model_id": model_id, "seq_id": 3, "adam_params": {}})
    assert late.status_code == 404
    assert run_sql(url, "SELECT status FROM trainings") == [("completed",)]


async def test_steps_and_checkpoints_are_those_of_a_run_of_the_monitor(client: Client, url: str) -> None:
    model_id = await client.create(await client.session())
    for step in range(2):
        await client.train(text_pass(model_id, 3 * step + 1))
        await client.step(model_id, 3 * step + 2)
        body = {"model_id": model_id, "seq_id": 3 * step + 3, "path": f"step-{step}"}
        await client.result(await client.post("save_weights", body))
    assert run_sql(url, "SELECT run_name, status, num_completed_steps, total_steps FROM trainings") == [
        (model_id.replace(":", "."), "running", 2, 3)
    ]
    steps = run_sql(url, "SELECT step, status, num_datums, metrics ->> 'loss/total' FROM steps ORDER BY step")
    assert steps == [(1, "completed", 1, "3.0"), (2, "completed", 1, "3.0")]
    assert run_sql(url, "SELECT step FROM checkpoints ORDER BY step") == [(1,), (2,)]


async def test_the_monitor_shows_a_model_as_a_run(client: Client, monitor: Monitor) -> None:
    model_id = await client.create(await client.session())
    for seq_id in (1, 3):
        await client.train(text_pass(model_id, seq_id, seq_id))
        await client.result(await client.step(model_id, seq_id + 1))
    (run,) = (await monitor.json("/api/runs"))["items"]
    assert (run["run_name"], run["status"], run["num_completed_steps"]) == (model_id.replace(":", "."), "running", 2)
    await monitor.json(f"/api/runs/{run['run_id']}")
    metrics = await monitor.json(f"/api/runs/{run['run_id']}/metrics")
    assert "loss/total" in str(metrics)
    timeline = await monitor.json(f"/api/runs/{run['run_id']}/timeline")
    assert timeline
    await monitor.json("/api/rollouts/summary", run_id=run["run_id"])
    await monitor.json(f"/api/runs/{run['run_id']}/step/1")


async def test_models_beyond_the_limit_take_turns_and_lose_nothing(url: str, tmp_path: Path) -> None:
    async with running(url, tmp_path, max_models=1) as client:
        session_id = await client.session()
        one, two = [await client.create(session_id, number) for number in range(2)]
        for round_ in range(2):
            for model_id in (one, two):
                await client.train(text_pass(model_id, 2 * round_ + 1, 1.0 if model_id == one else 2.0))
                await client.result(await client.step(model_id, 2 * round_ + 2))
        body = {"model_id": one, "seq_id": 5, "path": "last"}
        await client.result(await client.post("save_weights", body))
        assert only(client).weight == 3.0  # two steps of 0.5 * 3
        assert len(client.host.models) == 1


async def test_a_model_with_a_gradient_that_was_left_alone_makes_room_too(url: str, tmp_path: Path) -> None:
    async with running(url, tmp_path, max_models=1, step_s=0.0) as client:
        session_id = await client.session()
        one = await client.create(session_id, 0)
        await client.result(await client.train(text_pass(one, 1)))
        await client.create(session_id, 1)
        await client.result(await client.step(one, 2))
        assert only(client).weight == 1.5  # the pass was repeated, once


async def test_a_model_that_waits_for_a_place_says_so(url: str, tmp_path: Path) -> None:
    async with running(url, tmp_path, max_models=1, wait_s=0.2) as client:
        session_id = await client.session()
        one = await client.create(session_id, 0)
        await client.result(await client.train(text_pass(one, 1)))
        body = {"session_id": session_id, "model_seq_id": 1, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
        waiting = await client.post("create_model", body)
        answer = await client.send("POST", "retrieve_future", json={"request_id": waiting["request_id"]})
        assert answer.json()["queue_state"] == "paused_capacity"
        await client.result(await client.step(one, 2))
        assert "model_id" in (await client.result(waiting)).json()
