"""Responses of the read API about sets of rollouts."""

from pydantic import Field

from cua_rl.monitor.rollout_schemas import Count
from cua_rl.monitor.schemas import Phase, Rate, Shown


class SetRun(Shown):
    """A run that the set speaks of."""

    run_id: str
    run_name: str
    log_path: str


class SetTask(Shown):
    task_id: str
    num_rollouts: int = Field(description="faults and rollouts that were not finished included")
    success: Rate = Field(description="over the task's instances")


class CheckCount(Shown):
    """What validators expected and what they read instead, or as well."""

    query: str
    expected: str
    actual: str
    success: bool
    count: int


class SetStep(Shown):
    """Rollouts of the set in one step or evaluation."""

    phase: Phase
    step: int
    num_rollouts: int = Field(description="without faults and rollouts that were not finished")
    num_successes: int
    num_faults: int
    causes: dict[str, int] = Field(
        description="of failures: wrong_final_state if the agent finished, else the stop reason"
    )


class SetSummary(Shown):
    """A set of rollouts, counted. Lists have at most 200 rows, the most frequent ones; `num_…` counts all."""

    runs: list[SetRun]
    num_rollouts: int
    success: Rate = Field(description="over task instances, as recorded; without faults and unfinished rollouts")
    verdicts: list[Count] = Field(description="success, failure, fault, open")
    stops: list[Count] = Field(description="stop reasons")
    causes: list[Count] = Field(description="of failures, as in `steps`")
    categories: list[Count]
    faults: list[Count] = Field(description="messages of infrastructure faults, with # for ids and numbers")
    num_faults: int = Field(description="different messages")
    turn_failures: list[Count] = Field(description="turns whose answer could not be parsed, by kind")
    tasks: list[SetTask] = Field(description="those with the most failures first")
    num_tasks: int
    checks: list[CheckCount] = Field(description="results of validators")
    num_checks: int
    steps: list[SetStep] = Field(description="training steps, then evaluations")
