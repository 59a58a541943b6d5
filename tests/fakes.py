"""Stand-ins for device, gateway, agent, trainer and recorder behind the same protocols."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cua_rl.agent.agent import Agent, AgentOutcome
from cua_rl.environments.device import Device, DeviceKind
from cua_rl.events import Event, Recorder
from cua_rl.judge.request import Case
from cua_rl.renderers.image_urls import ImageUrls
from cua_rl.rl.served_policy import SavedPolicy
from cua_rl.rl.stages import Policy
from cua_rl.rl.train_step import Trainer
from cua_rl.rollout.outcome import Judge
from cua_rl.tasks.task import Task
from cua_rl.training.config import LossConfig, OptimConfig
from cua_rl.training.wire import ForwardBackwardOutput, OptimStepOutput
from cua_rl.types.actions import Action
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import CuaError
from cua_rl.types.judgement import Judgement, JudgeVote, Validation
from cua_rl.types.rollout import AdapterRef, AgentTurn, Datum, ModelTurn, StopReason
from tests.builders import judgement, model_turn, prompt, text


@dataclass
class FakeDevice:
    """Counts what is done to it; `state` answers every query."""

    device_id: str = "device-0"
    kind: DeviceKind = "android"
    state: str = "0"
    is_closed: bool = False
    actions: list[Action] = field(default_factory=list[Action])

    async def observe(self) -> EncodedImage:
        return EncodedImage(data=b"screen", format="png", width_px=100, height_px=200)

    async def execute(self, action: Action) -> None:
        self.actions.append(action)

    async def query(self, name: str) -> str:
        return self.state

    async def close(self) -> None:
        self.is_closed = True


def make_task(task_id: str = "task", seed: int = 1, max_turns: int = 3, *, is_validated: bool = True) -> Task:
    async def validate(device: Any, answer: str | None) -> Validation:
        actual = await device.query("state")
        return Validation(query="state", expected="1", actual=actual, success=actual == "1")

    return Task(
        task_id=task_id,
        seed=seed,
        instruction="Do it.",
        category="app",
        difficulty="easy",
        max_turns=max_turns,
        validate=validate if is_validated else None,
    )


class FakeJudge:
    """Gives one vote after the other; None is a vote without a verdict, an exception is raised."""

    def __init__(self, *votes: bool | CuaError | None) -> None:
        self._votes = list(votes)
        self.cases: list[Case] = []

    async def judge(self, case: Case, *, decides: bool) -> Judgement:
        vote = self._votes[len(self.cases) % len(self._votes)]
        self.cases.append(case)
        if isinstance(vote, CuaError):
            raise vote
        said = JudgeVote(success=vote, reason="so it is", error="503" if vote is None else None, duration_s=0.5)
        return judgement(said, decides=decides)


class FakeGateway:
    """Remembers which rollouts are open and hands out the turns that tests put in."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.recorded: dict[str, list[ModelTurn]] = {}

    def open_rollout(self, rollout_id: str, *, params: object = None, adapter: object = None) -> None:
        self.open.add(rollout_id)
        self.recorded[rollout_id] = []

    def close_rollout(self, rollout_id: str) -> tuple[ModelTurn, ...]:
        self.open.remove(rollout_id)
        return tuple(self.recorded[rollout_id])

    def turns(self, rollout_id: str) -> tuple[ModelTurn, ...]:
        return tuple(self.recorded[rollout_id])

    def image_url_of(self, rollout_id: str) -> Callable[[EncodedImage], str]:
        return ImageUrls().url

    def openai_client(self, rollout_id: str) -> list[ModelTurn]:
        return self.recorded[rollout_id]


class FakeAgent:
    """Takes one turn and sets the device's state to the next entry of `outcomes`; an exception there is raised."""

    def __init__(self, outcomes: Sequence[str | CuaError]) -> None:
        self._outcomes = list(outcomes)
        self.num_runs = 0

    async def run(self, task: Any, device: Any, access: Any, *, clock: Any, on_turn: Any) -> AgentOutcome:
        outcome = self._outcomes[self.num_runs % len(self._outcomes)]
        self.num_runs += 1
        response_id = f"resp-{self.num_runs}"
        access.openai_client(task.rollout_id).append(model_turn(prompt(text(1, 2)), response_id=response_id))
        seen = await device.observe()
        await on_turn(
            AgentTurn(
                response_id=response_id,
                before=seen,
                durations_s={"respond": 0.1},
            )
        )
        if isinstance(outcome, CuaError):
            raise outcome
        device.state = outcome
        return AgentOutcome(stop_reason=StopReason.FINISHED, num_turns=1, answer="done")


class FakeRecorder:
    """Keeps every event in a list."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def record(self, event: Event) -> None:
        self.events.append(event)

    async def flush(self) -> None:
        return


class FakeTrainer:
    """Repeats the sampler's log-probabilities, `gap` apart, and counts what it is asked to do."""

    def __init__(self, gap: float = 0.0) -> None:
        self.gap = gap
        self.calls: list[str] = []
        self.beside: list[dict[str, Sequence[Any] | None]] = []
        """What came beside the datums, call by call."""
        self.policy_version = 0

    def _rows(self, datums: Sequence[Datum]) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(
                logprob + self.gap if flag else 0.0
                for logprob, flag in zip(datum.sampling_logprobs, datum.loss_mask, strict=True)
            )
            for datum in datums
        )

    async def begin_step(self) -> None:
        return

    async def forward(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        self.calls.append("forward")
        return list(self._rows(datums))

    async def base_logprobs(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        self.calls.append("base_logprobs")
        return list(self._rows(datums))

    async def reference_logprobs(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        self.calls.append("reference_logprobs")
        return list(self._rows(datums))

    async def forward_backward(
        self, datums: Sequence[Datum], loss: LossConfig, **beside: Sequence[Any] | None
    ) -> ForwardBackwardOutput:
        self.calls.append(f"forward_backward {len(datums)}")
        self.beside.append(beside)
        return ForwardBackwardOutput(training_logprobs=self._rows(datums), metrics={"loss/policy": 0.0})

    async def optim_step(self, optim: OptimConfig) -> OptimStepOutput:
        self.calls.append("optim_step")
        self.policy_version += 1
        return OptimStepOutput(
            policy_version=self.policy_version, grad_norm=1.0, learning_rate=optim.learning_rate, num_trained_tokens=1
        )

    async def trainer_metrics(self) -> dict[str, float]:
        return {"trainer/busy_s": 0.1}


class FakePolicy:
    """Publishes by writing its name down."""

    def __init__(self) -> None:
        self.published: list[int] = []
        self.saved: list[int] = []

    async def publish(self, step: int) -> AdapterRef:
        return await self.serve(await self.save(step))

    async def save(self, step: int) -> SavedPolicy:
        adapter = AdapterRef(path=Path(f"/adapters/{step}"), policy_version=step)
        return SavedPolicy(step=step, adapter=adapter, canary=None)

    async def serve(self, saved: SavedPolicy) -> AdapterRef:
        self.published.append(saved.step)
        return saved.adapter

    @contextmanager
    def hold(self, adapter: AdapterRef) -> Generator[None]:
        yield

    async def save_checkpoint(self, step: int, *, is_interim: bool) -> tuple[Path, Path]:
        self.saved.append(step)
        return Path(f"/weights/{step}"), Path(f"/sampler_weights/{step}")


if TYPE_CHECKING:  # what they stand in for
    _world: tuple[Device, Judge, Agent, Recorder] = (FakeDevice(), FakeJudge(), FakeAgent([]), FakeRecorder())
    _learner: tuple[Trainer, Policy] = (FakeTrainer(), FakePolicy())
