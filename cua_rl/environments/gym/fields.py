"""Gym-server data: task references, executions and evaluations.

Servers differ in their field names: the first alternative that is present counts.
"""

from dataclasses import dataclass

from cua_rl.types.json_values import Json, as_number, mapping, sequence
from cua_rl.types.judgement import MAX_REWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class GymTaskRef:
    """A task on a gym server."""

    base_url: str
    gym_id: str
    identifier: str
    """What the server calls the task."""


_DEVICE_IDS = (
    ("box_id",),
    ("gbox_id",),
    ("boxId",),
    ("container_id",),
    ("env_id",),
    ("environment_id",),
    ("device", "device_serial"),
    ("device", "box_id"),
    ("device", "id"),
    ("environment", "id"),
    ("environment", "box_id"),
    ("environment", "boxId"),
    ("box", "id"),
    ("box", "box_id"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One attempt at a task, for which the server holds a device."""

    execution_id: str
    device_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the server says of an execution."""

    score: float
    """Weighted over the validators; 1 is full success."""
    success: bool


def text_at(fields: Json, *path: str) -> str | None:
    """A text, or a whole number as text, at a path of keys; None if there is none, or an empty one."""
    value: object = fields
    for key in path:
        value = mapping(value).get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) and value else None


def first_text(fields: Json, *paths: tuple[str, ...]) -> str | None:
    return next((text for text in (text_at(fields, *path) for path in paths) if text is not None), None)


def number_at(fields: Json, key: str) -> float | None:
    """A number that may be a score; None if there is none."""
    return as_number(fields.get(key), largest=MAX_REWARD)


def parse_execution(answer: Json) -> Execution | None:
    """The execution that a server has made; None if the answer names none."""
    inner = mapping(answer.get("execution"))
    execution_id = first_text(answer, ("execution_id",), ("executionId",), ("execution", "execution_id"), ("id",))
    if execution_id is None:
        return None
    return Execution(
        execution_id=execution_id, device_id=first_text(answer, *_DEVICE_IDS) or first_text(inner, *_DEVICE_IDS)
    )


def parse_evaluation(answer: Json) -> Evaluation | None:
    """Score and success; None if the answer says nothing about either.

    The score is `result.score`, else the weighted mean over `result.validators`, else `reward` or `score` at the top,
    else 1 for success. A zero is ignored if another field has a score.
    """
    result = mapping(answer.get("result"))
    verdict = next((value for value in (result.get("success"), answer.get("success")) if isinstance(value, bool)), None)
    validators = [mapping(item) for item in sequence(result.get("validators"))]
    weights = [number_at(item, "weight") or 0.0 for item in validators]
    total = sum((number_at(item, "score") or 0.0) * weight for item, weight in zip(validators, weights, strict=True))
    mean = total / sum(weights) if sum(weights) > 0 else None
    given = [number_at(result, "score"), mean, number_at(answer, "reward"), number_at(answer, "score")]
    scores = [score for score in given if score is not None]
    complaint = first_text(answer, ("error",), ("detail",))  # a server that could not evaluate says so there
    if not scores and (verdict is None or (not result and not verdict and complaint)):
        return None
    score = next((score for score in scores if score), 1.0 if verdict else 0.0)
    return Evaluation(score=score, success=verdict if verdict is not None else score >= 1.0)
