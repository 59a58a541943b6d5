"""Records in Parquet and ATIF files come back as they were, to the last bit."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cua_rl.exchange.atif import AtifWriter, read_atif
from cua_rl.exchange.parquet import ParquetWriter, read_parquet
from cua_rl.exchange.records import ReplayRecord, RolloutRecord, RunRecord, SourceRecord, TaskRecord
from cua_rl.exchange.rows import decode_images, decode_record, decode_run, encode_record, encode_run, read_json
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import StopReason
from tests.exchange.files import HEIGHT_PX, WIDTH_PX, draw
from tests.real.database.recorded import IMAGE_TOKEN, make_rollout

pq = pytest.importorskip("pyarrow.parquet", reason="`make setup` installs pyarrow")

TASK = TaskRecord(
    task_id="open_settings",
    seed=7,
    instruction="Open \x00 \ud83d",
    category="system",
    difficulty="easy",
    max_turns=9,
    tags=("demo", "\ud83d"),
)
RUN = RunRecord(
    run_name="run",
    config={"learning_rate": 1e-5, "nothing": None, "endless": float("inf")},
    image_token_id=IMAGE_TOKEN,
    total_steps=2,
    status="completed",
    error=None,
    started_at=1.5,
    ended_at=None,
    sources=(
        SourceRecord(
            phase="step",
            step=1,
            status="completed",
            policy_version=0,
            group_size=4,
            tasks=(TASK, TASK),
            started_at=2.5,
            metrics={"a/b": 0.1 + 0.2},
            replays=(ReplayRecord(group_id="g", rollout_id="r", advantage=0.5, turn_advantages=(0.1, 0.2)),),
        ),
    ),
)


def records() -> list[RolloutRecord]:
    """Every kind of value: text that is no Unicode, NaN, faults, judges, turns without images or training."""
    rng = random.Random(3)
    made = [make_rollout(rng, member, fault=StopReason.DEVICE_ERROR if member == 2 else None) for member in range(6)]
    made[5] = replace(made[5], parent_id=made[4].rollout_id, fork_turn=1)
    found: list[RolloutRecord] = []
    for rollout in made:
        seen = tuple(
            None if turn.index % 2 else tuple(-rng.random() for _ in turn.model.sampled_tokens)
            for turn in rollout.turns
        )
        found.append(
            RolloutRecord(
                phase="step",
                step=1,
                group_id="g\ud83d",
                task=TASK,
                rollout=rollout,
                advantage=None if rollout.reward is None else rng.random(),
                turn_advantages=() if rollout.reward is None else tuple(rng.random() for _ in rollout.turns),
                training_logprobs=seen,
            )
        )
    return found


def test_parquet_gives_back_every_value(tmp_path: Path) -> None:
    with ParquetWriter(tmp_path, encode_run(RUN)) as writer:
        for record in records():
            writer.write(encode_record(record, IMAGE_TOKEN))
    assert [decode_record(encoded) for encoded in read_parquet(tmp_path)] == records()
    assert decode_run(read_json((tmp_path / "run.json").read_text())) == RUN


def test_rollouts_of_files_that_know_no_branches_began_with_their_tasks() -> None:
    record = records()[5]
    encoded = encode_record(record, IMAGE_TOKEN)
    row = {name: value for name, value in encoded.row.items() if name not in ("parent_id", "fork_turn")}

    read = decode_record(replace(encoded, row=row))

    assert read.rollout == replace(record.rollout, parent_id=None, fork_turn=0) != record.rollout


def test_parquet_has_columns_for_people_and_for_datasets(tmp_path: Path) -> None:
    (record, *_) = records()
    with ParquetWriter(tmp_path, encode_run(RUN)) as writer:
        writer.write(encode_record(record, IMAGE_TOKEN))
    table = pq.read_table(tmp_path / "data" / "train-00000.parquet")
    (row,) = table.to_pylist()
    first = record.rollout.turns[0]
    assert row["reward"] == (None if record.rollout.reward is None else record.rollout.reward.total)
    assert row["turns"][0]["sampled_tokens"] == list(first.model.sampled_tokens)
    assert row["turns"][0]["sampling_logprobs"] == list(first.model.sampling_logprobs)
    assert row["turns"][0]["policy_version"] == first.model.policy_version
    assert first.agent.before is not None
    assert row["images"][row["turns"][0]["before"]]["bytes"] == first.agent.before.data
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["images"] == {"feature": {"_type": "Image"}, "_type": "List"}
    assert features["turns"]["feature"]["sampled_tokens"] == {
        "feature": {"dtype": "int32", "_type": "Value"},
        "_type": "List",
    }


def test_atif_gives_back_every_value(tmp_path: Path) -> None:
    with AtifWriter(tmp_path, encode_run(RUN)) as writer:
        for record in records():
            writer.write(record, encode_record(record, IMAGE_TOKEN))
    assert [decode_record(encoded) for encoded in read_atif(tmp_path)] == records()


def test_atif_has_what_the_format_asks_for_where_it_asks_for_it(tmp_path: Path) -> None:
    record = records()[0]
    call = (
        '<think>\nlook\n</think>\n\n<tool_call>\n{"name": "mobile_use", "arguments": {"action": "wait"}}\n</tool_call>'
    )
    turns = tuple(replace(turn, model=replace(turn.model, text=call)) for turn in record.rollout.turns)
    record = replace(record, rollout=replace(record.rollout, turns=turns))
    with AtifWriter(tmp_path, encode_run(RUN)) as writer:
        writer.write(record, encode_record(record, IMAGE_TOKEN))
    written = json.loads((tmp_path / "trajectories" / "000000.json").read_text())
    assert written["schema_version"] == "ATIF-v1.7"
    assert [step["step_id"] for step in written["steps"]] == list(range(1, len(turns) + 2))
    user, first = written["steps"][:2]
    assert [part["type"] for part in user["message"]] == ["text", "image"]
    assert (tmp_path / "trajectories" / user["message"][1]["source"]["path"]).is_file()
    assert first["reasoning_content"] == "look"
    assert first["tool_calls"] == [
        {"tool_call_id": "0-call_0", "function_name": "mobile_use", "arguments": {"action": "wait"}}
    ]
    assert first["metrics"]["completion_token_ids"] == list(turns[0].model.sampled_tokens)
    assert first["metrics"]["logprobs"] == list(turns[0].model.sampling_logprobs)
    assert first["metrics"]["prompt_tokens"] == len(first["metrics"]["prompt_token_ids"])


def test_both_formats_say_which_turns_a_branch_shares_with_its_parent(tmp_path: Path) -> None:
    record = next(one for one in records() if len(one.rollout.turns) > 1)
    record = replace(record, rollout=replace(record.rollout, parent_id="p", fork_turn=1))
    encoded = encode_record(record, IMAGE_TOKEN)
    with ParquetWriter(tmp_path, encode_run(RUN)) as parquet, AtifWriter(tmp_path, encode_run(RUN)) as atif:
        parquet.write(encoded)
        atif.write(record, encoded)

    (row,) = pq.read_table(tmp_path / "data" / "train-00000.parquet").to_pylist()
    written = json.loads((tmp_path / "trajectories" / "000000.json").read_text())
    assert (row["parent_id"], row["fork_turn"]) == ("p", 1)
    _, first, *others = written["steps"]
    assert [step.get("is_copied_context") for step in (first, *others)] == [True, *[None] * len(others)]
    sampled = sum(len(turn.model.sampled_tokens) for turn in record.rollout.own_turns)
    assert written["final_metrics"]["total_completion_tokens"] == sampled


def test_data_sets_of_others_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "data" / "train.parquet")
    with pytest.raises(ConfigError, match=r"expected the columns of recipes\.export_trajectories"):
        list(read_parquet(tmp_path))
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "a.json").write_text('{"steps": []}')
    with pytest.raises(ConfigError, match=r"expected extra\.cua_rl"):
        list(read_atif(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="memory limits of processes are Linux's")
def test_a_small_file_that_holds_too_much_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    with ParquetWriter(tmp_path, encode_run(RUN)) as writer:
        for record in records():
            writer.write(encode_record(record, IMAGE_TOKEN))
    path = tmp_path / "data" / "train-00000.parquet"
    (good, *_) = rows = pq.read_table(path).to_pylist()
    rows[1] = {**good, "record": " " * 2**27}
    table = pa.Table.from_pylist(rows[:2], schema=pq.read_schema(path))
    pq.write_table(table, path, compression="zstd", row_group_size=1)
    assert path.stat().st_size < 2**20

    read = read_parquet(tmp_path, max_memory_bytes=2**28)

    assert decode_record(next(read)) == records()[0]
    with pytest.raises(ConfigError, match="expected rollouts of which each can be read within 256 MiB"):
        list(read)


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    with pytest.raises(ConfigError, match="got OSError: "):
        list(read_parquet(tmp_path))


def test_a_file_that_others_changed_names_no_file_of_ours(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of our own")
    with AtifWriter(tmp_path, encode_run(RUN)) as writer:
        writer.write(records()[0], encode_record(records()[0], IMAGE_TOKEN))
    path = tmp_path / "trajectories" / "000000.json"
    written = json.loads(path.read_text())
    for strange in ("../secret", str(secret), "images/../../secret"):
        written["extra"]["cua_rl"]["files"][0] = strange
        path.write_text(json.dumps(written))
        with pytest.raises(ConfigError, match="expected images called"):
            list(read_atif(tmp_path))


def test_images_are_of_the_kinds_that_a_browser_only_shows() -> None:
    with pytest.raises(ValueError, match=r"png or jpeg, got \['svg\+xml'\]"):
        decode_images({"images": [["svg+xml", 1, 1]]}, [b"<svg/>"])


def test_images_have_the_size_that_their_row_says() -> None:
    image = draw(1)
    assert decode_images({"images": [["png", WIDTH_PX, HEIGHT_PX]]}, [image])[0].data == image
    with pytest.raises(ValueError, match=rf"expected an image of \[1, 2\] pixels, got one of {WIDTH_PX} x {HEIGHT_PX}"):
        decode_images({"images": [["png", 1, 2]]}, [image])
    with pytest.raises(ValueError, match="expected a readable PNG or JPEG image"):
        decode_images({"images": [["png", 1, 2]]}, [b"no image"])
