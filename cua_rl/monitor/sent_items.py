"""Converts a run's events to items of the ingest API.

An item names the items that it refers to (`references`), because their ids are known only after they were stored.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self
from uuid import uuid4

from cua_rl import events
from cua_rl.database.turn_writer import turn_columns
from cua_rl.tasks.task import Task
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.rollout import Rollout, StopReason, Turn

Reference = tuple[str, str]
"""Kind and client id of an item."""
_KINDS = {"baseline": "baselines", "step": "steps", "eval": "evals"}
TRAINING: Reference = ("training", "training")
_COLUMNS_SENT_OTHERWISE = ("text", "request", "started_at", "before_sha256", "after_sha256")
"""Columns of a turn for which the interface has a field; the others travel in `cua_rl`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentItem:
    """One item; `references` maps fields to the items whose ids belong there."""

    kind: str
    client_id: str
    payload: Mapping[str, Any]
    references: Mapping[str, Reference] = field(default_factory=dict[str, Reference])
    waits_for_rollouts: bool = False
    """Rollouts that were queued before it must be stored first, because it refers to their groups."""

    def to_line(self) -> bytes:
        fields = {"kind": self.kind, "client_id": self.client_id, "payload": self.payload}
        fields |= {"references": self.references, "waits_for_rollouts": self.waits_for_rollouts}
        return json.dumps(fields, default=str).encode()

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """The inverse of `to_line`."""
        fields = json.loads(line)
        references = {name: (str(kind), str(client_id)) for name, (kind, client_id) in fields["references"].items()}
        return cls(**fields | {"references": references})


@dataclass(slots=True)
class _SourceState:
    num_groups: int
    num_ended: int = 0


class ItemMaker:
    """Turns the events of one attempt of a run into items, in order."""

    def __init__(self, *, image_token_id: int) -> None:
        self._image_token_id = image_token_id
        self._attempt = str(uuid4())
        self._run: dict[str, str] = {}
        self._sources: dict[events.RolloutSource, _SourceState] = {}
        self._sent_images: dict[str, set[str]] = {}

    def make(self, event: events.Event, at: datetime) -> Iterator[SentItem]:
        match event:
            case events.TrainingStarted():
                yield self._training_started(event, at)
            case events.SourceStarted():
                yield from self._source_started(event, at)
            case events.RolloutStarted():
                yield from self._rollout_started(event, at)
            case events.TurnTaken():
                yield self._turn(event.rollout_id, event.turn)
            case events.GroupEnded():
                yield from self._group_ended(event, at)
            case events.StepTrained():
                yield from self._step_trained(event, at)
            case events.EvaluationEnded() | events.BatchTaken() | events.CheckpointSaved():
                yield self._source_changed(event, at)
            case events.TrainingEnded():
                ended = {"status": event.status, "error_message": event.error, "end_time": _iso(at)}
                yield self._training_item(ended)
            case _:
                return

    def _source_changed(
        self, event: events.EvaluationEnded | events.BatchTaken | events.CheckpointSaved, at: datetime
    ) -> SentItem:
        match event:
            case events.EvaluationEnded():
                metrics = event.metrics
                suites = [name for name in metrics if name.count("/") == 2 and name.endswith("/success_rate")]
                figures = {"metrics_json": dict(metrics), "success_rate": metrics[suites[0]] if suites else None}
                return self._source_item(event.source, _ended(at) | figures)
            case events.BatchTaken():
                taken = {"cua_rl": {"group_ids": list(event.group_ids)}}
                item = self._source_item(events.RolloutSource(phase="step", step=event.step), taken)
                return replace(item, waits_for_rollouts=True)
            case events.CheckpointSaved():
                step = events.RolloutSource(phase="step", step=event.step)
                return self._source_item(step, {"checkpoint_path": event.state_path})

    def _training_item(self, payload: Mapping[str, Any]) -> SentItem:
        return SentItem(kind="training", client_id="training", payload={**self._run, **payload})

    def _training_started(self, event: events.TrainingStarted, at: datetime) -> SentItem:
        self._run = {"run_name": event.run_name, "log_path": event.log_path}
        return self._training_item(
            {
                "status": "running",
                "current_phase": "rollout",
                "config_json": dict(event.config),
                "current_step": event.first_step - 1,
                "total_steps": event.total_steps,
                "start_time": _iso(at),
                "cua_rl": {
                    "attempt": self._attempt,
                    "first_step": event.first_step,
                    "kept_group_ids": list(event.kept_group_ids),
                    "image_token_id": self._image_token_id,
                },
            }
        )

    def _source_id(self, source: events.RolloutSource) -> str:
        return f"{source.phase}-{self._run.get('run_name')}-{source.step}-0"

    def _source_item(self, source: events.RolloutSource, payload: Mapping[str, Any]) -> SentItem:
        return SentItem(
            kind=_KINDS[source.phase],
            client_id=self._source_id(source),
            payload={"step": source.step, "batch": 0, **payload},
            references={"training_id": TRAINING},
        )

    def _source_started(self, event: events.SourceStarted, at: datetime) -> Iterator[SentItem]:
        self._sources[event.source] = _SourceState(
            num_groups=len(event.tasks) if event.num_groups is None else event.num_groups
        )
        yield from {_task_id(task): _task_item(task) for task in event.tasks}.values()
        yield self._source_item(
            event.source,
            {
                "status": "rollout_running" if event.source.phase == "step" else "running",
                "start_time": _iso(at),
                "cua_rl": {"policy_version": event.policy_version, "group_size": event.group_size},
                **self._progress(event.source),
            },
        )

    def _progress(self, source: events.RolloutSource) -> dict[str, Any]:
        state = self._sources.get(source, _SourceState(num_groups=0))
        if source.phase != "step":
            return {"total_tasks": state.num_groups, "completed_tasks": state.num_ended}
        return {"rollout_progress": {"total_groups": state.num_groups, "completed_groups": state.num_ended}}

    def _rollout_started(self, event: events.RolloutStarted, at: datetime) -> Iterator[SentItem]:
        yield _task_item(event.task)
        yield SentItem(
            kind="environments",
            client_id=f"{event.rollout_id}:env",
            payload={"status": "running", "gbox_id": event.device_id.rpartition("/")[2], "creation_time": _iso(at)},
        )
        payload = {
            "group_num": event.group_index,
            "env_index": event.member_index,
            "max_turns": event.max_turns,
            "status": "running",
            "current_phase": "task_execution",
            "start_time": _iso(at),
            "cua_rl": {"group_id": event.group_id, "seed": event.task.seed, "worker": event.worker, **_fork(event)},
        }
        yield self._rollout_item(event.source, event.rollout_id, _task_id(event.task), payload)

    def _rollout_item(
        self, source: events.RolloutSource, rollout_id: str, task_id: str | None, payload: Mapping[str, Any]
    ) -> SentItem:
        references: dict[str, Reference] = {
            f"{source.phase}_id": (_KINDS[source.phase], self._source_id(source)),
            "env_id": ("environments", f"{rollout_id}:env"),
        }
        if task_id is not None:
            references["task_id"] = ("tasks", task_id)
        head = {"rollout_id": rollout_id, "source_type": source.phase, "is_eval": source.phase != "step", "batch": 0}
        return SentItem(kind="rollouts", client_id=rollout_id, payload=head | dict(payload), references=references)

    def _turn(self, rollout_id: str, turn: Turn) -> SentItem:
        before, after, columns = turn.agent.before, turn.agent.after, turn_columns(turn, self._image_token_id)
        payload: dict[str, Any] = {
            "turn": turn.index + 1,
            "start_time": _iso(datetime.fromtimestamp(turn.model.started_at, UTC)),
            "turn_time": sum(turn.agent.durations_s.values()),
            "model_response": turn.model.text,
            "metrics_json": {"stage_timings": dict(turn.agent.durations_s)},
            "screen_before": None if before is None else self._image(rollout_id, before),
            "screen_after": None if after is None else self._image(rollout_id, after),
            "model_specific_input_json": dict(turn.model.request),
            "cua_rl": {name: value for name, value in columns.items() if name not in _COLUMNS_SENT_OTHERWISE},
        }
        images = [self._image(rollout_id, one) for one in turn.model.prompt.images]
        payload["cua_rl"]["images"] = [image for image in images if image.startswith("data:")]
        return _turn_item(rollout_id, turn.index, payload)

    def _image(self, rollout_id: str, image: EncodedImage) -> str:
        """The image as a data URI, or its hash if an earlier turn of the rollout has sent it."""
        known = self._sent_images.setdefault(rollout_id, set())
        if image.sha256 in known:
            return f"sha256:{image.sha256}"
        known.add(image.sha256)
        return image.data_url()

    def _group_ended(self, event: events.GroupEnded, at: datetime) -> Iterator[SentItem]:
        group = event.group
        advantages = event.advantages or (None,) * len(group.rollouts)
        for position, rollout in enumerate(group.rollouts):
            ours = {"group_id": group.group_id, "position": position, "advantage": advantages[position]}
            ours |= {"turn_advantages": list(event.of_turns(position)) or None}
            yield from self._rollout_ended(event.source, rollout, at, ours)
        for position, rollout in enumerate(group.faulty):
            ours = {"group_id": group.group_id, "position": position}
            yield from self._rollout_ended(event.source, rollout, at, ours)
        state = self._sources.get(event.source)
        if state is not None:
            state.num_ended += 1
            state.num_groups += event.replaced_by is not None
            yield self._source_item(event.source, self._progress(event.source))

    def _rollout_ended(
        self, source: events.RolloutSource, rollout: Rollout, at: datetime, ours: Mapping[str, Any]
    ) -> Iterator[SentItem]:
        is_broken = rollout.stop_reason is StopReason.DEVICE_ERROR
        yield SentItem(
            kind="environments",
            client_id=f"{rollout.rollout_id}:env",
            payload={
                "status": "error" if is_broken else "terminated",
                "gbox_id": (rollout.device_id or "none").rpartition("/")[2],
                "termination_time": _iso(at),
                "error_message": rollout.error if is_broken else None,
            },
        )
        reward, began = rollout.reward, datetime.fromtimestamp(rollout.started_at, UTC)
        payload = {
            "group_num": rollout.group_index,
            "env_index": rollout.member_index,
            "status": "failed" if rollout.stop_reason.is_fault else "completed",
            "start_time": _iso(began),
            "end_time": _iso(began + timedelta(seconds=rollout.duration_s)),  # others of its group may end much later
            "rollout_time": rollout.duration_s,
            "num_turns": len(rollout.turns),
            "task_completed": rollout.stop_reason == "finished",
            "ran_out_of_turns": rollout.stop_reason == "max_turns",
            "task_success": rollout.success,
            "reward": None if reward is None else reward.total,
            "error_message": rollout.error,
            "cua_rl": {
                "stop_reason": str(rollout.stop_reason),
                "reward_parts": None if reward is None else dict(reward.parts),
                "turn_rewards": None if reward is None else list(reward.of_turns) or None,
                "started_unix_s": rollout.started_at,
                "duration_s": rollout.duration_s,
                "answer": rollout.answer,
                "seed": rollout.seed,
                "worker": rollout.worker,
                "judgement": None if rollout.judgement is None else asdict(rollout.judgement),
                **_fork(rollout),
                **ours,
            },
        }
        yield self._rollout_item(source, rollout.rollout_id, None, payload)
        if rollout.validation is not None:
            found = rollout.validation
            yield SentItem(
                kind="validations",
                client_id=f"{rollout.rollout_id}:validation",
                payload={
                    "validation_query": found.query,
                    "expected_result": found.expected,
                    "actual_result": found.actual,
                    "success": found.success,
                    "execution_time": found.duration_s,
                },
                references={"rollout_id": ("rollouts", rollout.rollout_id)},
            )
        self._sent_images.pop(rollout.rollout_id, None)

    def _step_trained(self, event: events.StepTrained, at: datetime) -> Iterator[SentItem]:
        for rollout_id, turns in event.training_logprobs.items():
            for index, logprobs in turns:
                payload = {"turn": index + 1, "cua_rl": {"training_logprobs": list(logprobs)}}
                yield _turn_item(rollout_id, index, payload)
        metrics = event.metrics
        payload = {
            "metrics_json": dict(metrics),
            "loss": metrics.get("loss/total"),
            "kl_divergence": metrics.get("policy/kl_sampling_training/mean"),
            "policy_gradient_norm": metrics.get("optim/grad_norm"),
            "reward_mean": metrics.get("reward/mean"),
            "cua_rl": {
                "trained_policy_version": event.policy_version,
                "num_datums": event.num_datums,
                "datums_sha256": event.datums_sha256,
                "trained_on": event.trained_on,
                "adapter_sha256": event.adapter_sha256,
            },
        }
        source = events.RolloutSource(phase="step", step=event.step)
        yield self._source_item(source, _ended(at) | payload)
        self._sources.pop(source, None)


def _fork(rollout: events.RolloutStarted | Rollout) -> dict[str, Any]:
    return {"parent_id": rollout.parent_id, "fork_turn": rollout.fork_turn} if rollout.parent_id else {}


def _ended(at: datetime) -> dict[str, Any]:
    return {"status": "completed", "end_time": _iso(at)}


def _task_id(task: Task) -> str:
    return f"{task.task_id}@{task.seed}"


def _task_item(task: Task) -> SentItem:
    return SentItem(
        kind="tasks",
        client_id=_task_id(task),
        payload={
            "task_id": task.task_id,
            "name": task.task_id,
            "instruction": task.instruction,
            "difficulty": task.difficulty,
            "category": task.category,
            "max_steps": task.max_turns,
            "tags": list(task.tags),
            "cua_rl": {"seed": task.seed},
        },
    )


def _turn_item(rollout_id: str, index: int, payload: Mapping[str, Any]) -> SentItem:
    return SentItem(
        kind="turns",
        client_id=f"{rollout_id}:turn:{index + 1}",
        payload=payload,
        references={"rollout_id": ("rollouts", rollout_id)},
    )


def _iso(at: datetime) -> str:
    return at.astimezone(UTC).isoformat()
