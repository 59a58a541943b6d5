"""The sequences of an optimizer step, for the monitor: a sequence is shown as a rollout, its weighted tokens as turns.

The service knows neither rewards nor success: an advantage is the mean weight. Sequences with one prompt are a group.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from statistics import fmean

from sqlalchemy import Connection

from cua_rl.database.reports import write_rollout
from cua_rl.database.rows import Scope, require_source
from cua_rl.database.turn_writer import count_turns, insert_turns
from cua_rl.events import RolloutSource
from cua_rl.types.rollout import AgentTurn, Chunk, Datum, EncodedTextChunk, ModelInput, ModelTurn, Turn

MOST_SHOWN = 8
"""Sequences of a step: images stay in the database until they are pruned."""


def write_sequences(
    connection: Connection, scope: Scope, step: int, datums: Sequence[Datum], decode: Callable[[Sequence[int]], str]
) -> None:
    """Write the first sequences of a step that has started, each once."""
    source, at = require_source(connection, scope, RolloutSource(phase="step", step=step)), datetime.now(UTC)
    groups: dict[ModelInput, int] = {}
    """Members so far, less one, by prompts."""
    turns: list[tuple[int, Turn]] = []
    for number, datum in enumerate(datums[:MOST_SHOWN]):
        rollout_id = f"{step}-{number}"
        of_datum = list(_turns(datum, rollout_id, scope.image_token_id, step - 1, decode))
        if not of_datum:
            continue
        prompt = of_datum[0].model.prompt
        member_index = groups[prompt] = groups.get(prompt, -1) + 1
        index = list(groups).index(prompt)
        key = write_rollout(
            connection,
            source,
            at,
            rollout_id=rollout_id,
            group_id=f"{step}-{index}",
            group_index=index,
            member_index=member_index,
            task={"task_pk": None, "task_id": "trained sequences", "seed": step},
            columns={
                "status": "completed",
                "advantage": fmean(weight for weight in datum.advantages if weight),
                "stop_reason": "finished",
                "position": member_index,
                "ended_at": at,
            },
            judgement=None,
        )
        turns += [(key, turn) for turn in of_datum]
    if turns:
        insert_turns(connection, scope, turns)
        count_turns(connection, {key: turn.index + 1 for key, turn in turns})


def _turns(
    datum: Datum, rollout_id: str, image_token_id: int, policy_version: int, decode: Callable[[Sequence[int]], str]
) -> Iterator[Turn]:
    """The parts of a sequence that have weights, each after all that comes before it."""
    ids, index = datum.model_input.token_ids(image_token_id), 0
    for is_trained, places in groupby(range(len(ids)), key=lambda place: datum.advantages[place] != 0.0):
        if not is_trained:
            continue
        trained = list(places)
        first, end = trained[0], trained[-1] + 1
        prompt = _before(datum.model_input, first)
        name, seen = f"{rollout_id}-{index}", prompt.images[-1] if prompt.images else None
        model = ModelTurn(
            response_id=name,
            prompt=prompt,
            sampled_tokens=tuple(ids[first:end]),
            sampling_logprobs=datum.sampling_logprobs[first:end],
            policy_version=policy_version,
            stop="stop",
            text=decode(ids[first:end]),
            failure=None,
            prompt_matches_renderer=True,
            request={},
            started_at=time.time(),
            duration_s=0.0,
        )
        yield Turn(index=index, model=model, agent=AgentTurn(response_id=name, before=seen))
        index += 1


def _before(whole: ModelInput, length: int) -> ModelInput:
    """The first tokens of a sequence, which do not end in an image."""
    chunks: list[Chunk] = []
    for chunk in whole.chunks:
        if length <= 0:
            break
        chunks.append(EncodedTextChunk(tokens=chunk.tokens[:length]) if isinstance(chunk, EncodedTextChunk) else chunk)
        length -= chunk.length
    return ModelInput(chunks=tuple(chunks))
