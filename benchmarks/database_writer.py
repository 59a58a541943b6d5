"""How fast the recorder writes turns to Postgres: one JSON line per figure.

    python -m benchmarks.database_writer [--rollouts 200] [--turns 10]

Rollouts keep their full history: turn t has t screenshots in its prompt, of which one is new (20 kB of incompressible
PNG), 60 image tokens each, 120 text tokens and 32 sampled tokens. `limit_mib_per_s` is what the same server takes when
the bare screenshots are inserted as they come, one transaction for 64 of them, without looking for duplicates.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import psycopg

from benchmarks.claims import require
from cua_rl.database.migrations import migrate
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import GroupEnded, RolloutSource, RolloutStarted, SourceStarted, TrainingStarted, TurnTaken
from cua_rl.tasks.task import Task
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.judgement import Validation
from cua_rl.types.rollout import (
    AgentTurn,
    Chunk,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    ModelTurn,
    Reward,
    Rollout,
    RolloutGroup,
    StopReason,
    Turn,
)
from tests.fakes import make_task

PNG_BYTES, IMAGE_TOKENS, TEXT_TOKENS, SAMPLED_TOKENS = 20_000, 60, 120, 32
IMAGE_TOKEN_ID = 9
SOURCE = RolloutSource(phase="step", step=1)


def make_rollout(rng: random.Random, number: int, num_turns: int) -> Rollout:
    """A rollout whose prompts hold every screenshot so far."""
    seen = [EncodedImage(data=rng.randbytes(PNG_BYTES), format="png", width_px=192, height_px=320)]
    turns: list[Turn] = []
    chunks: list[Chunk] = []
    for index in range(num_turns):
        text = tuple(rng.randrange(100, 150_000) for _ in range(TEXT_TOKENS if not index else SAMPLED_TOKENS + 8))
        image = ImageChunk(image=seen[-1], expected_tokens=IMAGE_TOKENS)
        chunks += [EncodedTextChunk(tokens=text), image]
        after = EncodedImage(data=rng.randbytes(PNG_BYTES), format="png", width_px=192, height_px=320)
        model = ModelTurn(
            response_id=f"resp-{number}-{index}",
            prompt=ModelInput(chunks=tuple(chunks)),
            sampled_tokens=tuple(rng.randrange(100, 150_000) for _ in range(SAMPLED_TOKENS)),
            sampling_logprobs=tuple(-rng.random() for _ in range(SAMPLED_TOKENS)),
            policy_version=0,
            stop="stop",
            text="<think>The network page is open.</think>",
            failure=None,
            prompt_matches_renderer=True,
            request={"input": [{"type": "input_image", "image_sha256": shot.sha256} for shot in seen]},
            started_at=time.time(),
            duration_s=1.0,
        )
        turns.append(
            Turn(
                index=index,
                model=model,
                agent=AgentTurn(
                    response_id=model.response_id, before=seen[-1], after=after, durations_s={"respond": 1.0}
                ),
            )
        )
        seen.append(after)
    return Rollout(
        rollout_id=f"rollout-{number}",
        task_id="task",
        seed=1,
        group_index=number // 8,
        member_index=number % 8,
        device_id="phone",
        turns=tuple(turns),
        stop_reason=StopReason.FINISHED,
        answer=None,
        validation=Validation(query="q", expected="1", actual="1", success=True),
        reward=Reward(total=1.0, parts={"success": 1.0}),
        error=None,
        started_at=time.time(),
        duration_s=10.0,
    )


async def record_rollouts(recorder: DatabaseRecorder, rollouts: list[Rollout], task: Task) -> None:
    """Everything a step reports, rollouts of a group interleaved turn by turn."""
    await recorder.record(SourceStarted(source=SOURCE, tasks=(task,), group_size=8, policy_version=0))
    for first in range(0, len(rollouts), 8):
        members = rollouts[first : first + 8]
        group_id = f"group-{first}"
        for rollout in members:
            await recorder.record(
                RolloutStarted(
                    source=SOURCE,
                    rollout_id=rollout.rollout_id,
                    group_id=group_id,
                    group_index=first // 8,
                    member_index=rollout.member_index,
                    task=task,
                    device_id="phone",
                    max_turns=20,
                )
            )
        for turns in zip(*(rollout.turns for rollout in members), strict=True):
            for rollout, turn in zip(members, turns, strict=True):
                await recorder.record(TurnTaken(rollout_id=rollout.rollout_id, turn=turn))
        group = RolloutGroup(group_id=group_id, index=first // 8, task_id="task", seed=1, rollouts=tuple(members))
        await recorder.record(GroupEnded(source=SOURCE, group=group, advantages=(0.0,) * len(members)))


def insert_bare(url: str, images: list[bytes]) -> float:
    """Seconds for the bare bytes."""
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE bare (sha256 text PRIMARY KEY, data bytea)")
        connection.commit()
        clock = time.perf_counter()
        for first in range(0, len(images), 64):
            rows = [(sha256(data).hexdigest(), data) for data in images[first : first + 64]]
            with connection.cursor() as cursor:
                cursor.executemany("INSERT INTO bare VALUES (%s, %s)", rows)
            connection.commit()
        return time.perf_counter() - clock


def require_rows(url: str, num_rollouts: int, num_turns: int) -> None:
    """Refuse figures of rows that are not there."""
    counted = {
        "rollouts": "SELECT count(*) FROM rollouts WHERE status = 'completed'",
        "turns": "SELECT count(*) FROM turns WHERE before_sha256 IS NOT NULL AND after_sha256 IS NOT NULL",
        "screenshots": "SELECT count(*) FROM screenshots",
        "most_screenshots_of_a_prompt": """SELECT max(jsonb_array_length(jsonb_path_query_array(
            prompt_chunks, '$[*] ? (exists (@.image))'))) FROM turns""",
        "bytes_of_a_screenshot": "SELECT min(octet_length(data)) FROM screenshots",
    }
    expected = (num_rollouts, num_rollouts * num_turns, num_rollouts * (num_turns + 1), num_turns, PNG_BYTES)
    with psycopg.connect(url) as connection:
        found = [connection.execute(query).fetchone() for query in counted.values()]
    require("rows", **{name: ((want,), got) for name, want, got in zip(counted, expected, found, strict=True)})


async def main(options: argparse.Namespace) -> None:
    """Record, measure, print."""
    rng, task = random.Random(0), make_task()
    rollouts = [make_rollout(rng, number, options.turns) for number in range(options.rollouts)]
    num_turns = options.rollouts * options.turns
    mib = options.rollouts * (options.turns + 1) * PNG_BYTES / 2**20
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with EmbeddedPostgres(folder / "postgres", folder / "postgres.log") as postgres:
            await migrate(postgres.url)
            seen = [turn.agent.before for rollout in rollouts for turn in rollout.turns]
            bare = [shown.data for shown in seen if shown is not None]
            bare_s = await asyncio.to_thread(insert_bare, postgres.url, bare)
            async with DatabaseRecorder(postgres.url, image_token_id=IMAGE_TOKEN_ID) as recorder:
                await recorder.record(
                    TrainingStarted(run_name="b", log_path=name, config={}, first_step=1, total_steps=1)
                )
                await recorder.flush()
                clock, cpu = time.perf_counter(), time.process_time()
                await record_rollouts(recorder, rollouts, task)
                await recorder.flush()
                seconds, cpu_s = time.perf_counter() - clock, time.process_time() - cpu
            require_rows(postgres.url, options.rollouts, options.turns)
    figure = {
        "figure": "database_writer",
        "turns_per_s": round(num_turns / seconds, 1),
        "mib_per_s": round(mib / seconds, 1),
        "limit_mib_per_s": round(len(bare) * PNG_BYTES / 2**20 / bare_s, 1),
        "cpu_ms_per_turn": round(1000 * cpu_s / num_turns, 2),
        "num_turns": num_turns,
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(figure))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--turns", type=int, default=10)
    asyncio.run(main(parser.parse_args()))
