"""Responses of the read API about sets of rollouts."""

from typing import Literal

from pydantic import Field

from cua_rl.monitor.rollout_schemas import CheckCount, Count, ScreenshotRef
from cua_rl.monitor.schemas import NamedRun, Phase, Rate, Shown
from cua_rl.types.json_values import JsonDict


class RolloutRef(Shown):
    run_id: str
    rollout_id: str


class SetRun(NamedRun):
    """A run that the set speaks of."""

    log_path: str


class SetTask(Shown):
    task_id: str
    num_rollouts: int = Field(description="faults and rollouts that were not finished included")
    success: Rate = Field(description="over the task's instances")


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


class SecondOpinion(Shown):
    """How often a recorded verdict got this verdict of a judge or a person."""

    recorded: str = Field(description="success, failure, fault, open")
    success: bool
    count: int


class SetPlace(Shown):
    """Where a rollout stands in a set, which it need not belong to any more."""

    num_before: int
    num_rollouts: int
    is_member: bool
    previous: RolloutRef | None
    next: RolloutRef | None


class SetSummary(Shown):
    """A set of rollouts, counted. Lists have at most 200 rows, the most frequent ones; `num_…` counts all."""

    runs: list[SetRun]
    num_rollouts: int
    success: Rate = Field(description="over task instances, as recorded; without faults and unfinished rollouts")
    success_as_reviewed: Rate = Field(
        description="the same with the newest verdicts of people in place of recorded ones"
    )
    reviews: list[SecondOpinion] = Field(description="newest verdicts of people")
    judgements: list[SecondOpinion] = Field(description="verdicts of a judge beside the validator")
    verdicts: list[Count] = Field(description="success, failure, fault, open")
    stops: list[Count] = Field(description="stop reasons")
    causes: list[Count] = Field(description="of failures, as in `steps`")
    categories: list[Count]
    tags: list[Count] = Field(description="that people gave rollouts or their turns")
    faults: list[Count] = Field(description="messages of infrastructure faults, with # for ids and numbers")
    num_faults: int = Field(description="different messages")
    turn_failures: list[Count] = Field(description="turns whose answer could not be parsed, by kind")
    tasks: list[SetTask] = Field(description="those with the most failures first")
    num_tasks: int
    checks: list[CheckCount] = Field(description="results of validators")
    num_checks: int
    steps: list[SetStep] = Field(description="training steps, then evaluations")


class ArmRun(SetRun):
    success: Rate


class SetArm(Shown):
    """One of two sets that are compared; its runs count as one."""

    runs: list[ArmRun]
    success: Rate = Field(description="over task instances; several runs' rollouts of one are taken together")


class TaskDifference(Shown):
    task_id: str
    first: Rate
    second: Rate


class SetComparison(Shown):
    """The success of a second set against that of a first one."""

    first: SetArm
    second: SetArm
    paired_by: Literal["task instance", "task"] | None = Field(
        description="what both attempted, at least half of what one of them did; null if they share too little"
    )
    num_pairs: int
    num_worse: int
    num_better: int
    difference: float | None = Field(description="second - first, over the pairs if there are any")
    low: float = Field(description="95 % interval: Student's over pairs, else Newcombe's of two rates")
    high: float
    p_value: float | None = Field(description="two-sided, that both are equally good; null without pairs")
    test: str | None
    tasks: list[TaskDifference] = Field(description="those that got worse most first")


class OutlyingToken(Shown):
    """A token at which the trainer and the sampler disagreed, or that was unlikely."""

    run_id: str
    rollout_id: str
    task_id: str
    turn_index: int
    token_index: int
    token: int
    text: str | None = Field(description="null if the run's tokenizer is not on this machine")
    sampling_logprob: float | None
    training_logprob: float | None
    value: float | None = Field(description="|trainer - sampler|, trainer - sampler, or -sampler, as asked for")


class FirstAction(Shown):
    run_id: str
    rollout_id: str
    verdict: str
    action: JsonDict | None = Field(description="coordinates in pixels of the screen; null if none was understood")


class FirstActions(Shown):
    """What rollouts did first, where they all began."""

    screen: ScreenshotRef | None = Field(description="the first screen of most of them, null without any")
    num_rollouts: int = Field(description="of the set, at most the latest 2000 of each database, with a first screen")
    actions: list[FirstAction] = Field(description="of those that began with this screen")


class TaskShare(Shown):
    """A task's part in the change of success."""

    task_id: str
    before: Rate
    now: Rate
    effect: float = Field(description="of the change at this task on the success of the step")


class StepChange(Shown):
    """Why a step's success differs from that of the steps before it: change = task_mix + the tasks' effects."""

    first_step: int = Field(description="of the steps before; 0 without any")
    last_step: int
    before: float | None = Field(description="success over their groups")
    now: float | None
    task_mix: float = Field(description="because other tasks were drawn; tasks that are new are a part of it")
    tasks: list[TaskShare] = Field(description="those whose effect is largest, worse or better, first")


class Cost(Shown):
    """What rollouts used, and the money that it costs where there is a price for it."""

    num_rollouts: int
    num_open: int = Field(description="of these, rollouts that still run; what they use is known when they have ended")
    prompt_tokens: int = Field(description="images included; turns that branches share count once")
    cached_tokens: int = Field(description="those of the prompts that the model server found in its prefix cache")
    sampled_tokens: int
    trained_tokens: int = Field(description="sampled tokens that were trained on")
    sampling_s: float = Field(description="of requests to the model server, of which many overlap")
    device_s: float = Field(description="that rollouts had their devices for, from the lease to their end")
    gpu_s: float | None = Field(
        description="of the run's GPUs while its steps and evaluations were at work, shared by rollouts in proportion "
        "to their requests' seconds; null if the number of GPUs is not recorded"
    )
    judge_prompt_tokens: int
    judge_answer_tokens: int
    num_unpriced_judgements: int = Field(description="judgements without a recorded cost or a price of their model")
    usd: dict[str, float] = Field(description="US dollars of gpu, device, prompt, cached, sampled, trained and judge")
    total_usd: float | None = Field(description="of what is priced; null if nothing is")


class TaskCost(Shown):
    task_id: str
    cost: Cost


class StepCost(Shown):
    phase: Phase
    step: int
    cost: Cost


class SetCost(Shown):
    """The cost of a set, as a whole and in parts, of which those of steps are at most the latest 1000."""

    cost: Cost
    tasks: list[TaskCost] = Field(description="at most 200, the most expensive first")
    num_tasks: int
    steps: list[StepCost] = Field(description="training steps, then evaluations")
    num_steps: int


class VersionCost(Shown):
    """What a run had used when it had made a policy: its steps until then, and evaluations of earlier policies."""

    step: int
    policy_version: int
    is_checkpoint: bool
    success: Rate | None = Field(description="of the evaluation of this policy, null without one")
    cost: Cost


class RunCost(Shown):
    training: Cost
    evaluations: Cost
    versions: list[VersionCost] = Field(description="those with a checkpoint or an evaluation, and the newest")
