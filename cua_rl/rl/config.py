"""The loop's configuration: which rollouts run, what is learned from them, when policies are evaluated and saved."""

from typing import Literal

import chz

from cua_rl.command_line.fields import setting
from cua_rl.rollout.branches import BranchingSettings
from cua_rl.training.config import LearningConfig, LossConfig

RolloutAdvantageKind = Literal["mean", "mean_std", "leave_one_out", "batch_std"]
AdvantageKind = Literal["mean", "mean_std", "leave_one_out", "batch_std", "state_groups", "turn_returns"]


@chz.chz
class SamplingSettings:
    """Which rollouts run, how they are seeded, and which groups count."""

    seed: int | None = setting(
        None,
        "seed of all sampling, combined with step, group, rollout and turn; None samples without a seed",
        at_least=0,
    )
    min_group_size: int = setting(
        2,
        "a group is trained on only if at least this many of its rollouts end without an infrastructure fault",
        at_least=2,
    )
    watch_goal: bool = setting(
        False,
        "check the goal, and the task's milestones, on the device after every turn, for rewards that depend on when "
        "they were first reached",
    )


@chz.chz
class CurriculumSettings:
    """Which tasks are sampled, and what happens to groups without a learning signal (docs/learning.md)."""

    task_sampling: Literal["uniform", "success_rate"] = setting(
        "uniform", "how tasks are sampled: uniform; success_rate: less often if they are always or never solved"
    )
    refill_groups: bool = setting(
        False, "replace groups whose rewards are all equal, until groups_per_batch groups have differing rewards"
    )
    max_refill_factor: int = setting(
        3, "refill_groups: maximum number of groups per step, as a multiple of groups_per_batch", at_least=1
    )
    replay_successes: bool = setting(
        False,
        "if all rollouts of a group fail, add a stored success of its task (off-policy: use loss=ppo, for example)",
    )


@chz.chz
class CreditSettings:
    """How the turns of a rollout share its reward (docs/losses.md)."""

    turn_weight: float = setting(
        0.5,
        "advantages=state_groups and turn_returns: weight of the comparison of turns, from 0 (only the rollout's "
        "advantage, leave_one_out) to 1",
        at_least=0.0,
    )
    discount: float = setting(
        1.0,
        "state_groups and turn_returns: discount per turn on later rewards; below 1 the gradient is biased towards "
        "early rewards",
        within=(0.0, 1.0),
    )
    moving_top: float | None = setting(
        None,
        "state_groups and branching: share of a screenshot's height, from the top, that is not compared because it "
        "changes by itself, such as a status bar with a clock; None is 0.06 on real Android devices, else 0",
        at_least=0.0,
    )
    milestone_reward: float = setting(
        0.0,
        "reward added for reaching all milestones of a task; each counts once, at the turn that first reaches it; "
        "above 0 they are checked after every turn",
        at_least=0.0,
    )

    @chz.validate
    def _shares_are_shares(self) -> None:
        for name, value, most in (("turn_weight", self.turn_weight, 1.0), ("moving_top", self.moving_top or 0.0, 0.5)):
            if not 0 <= value <= most:
                raise ValueError(f"credit.{name}: expected a share from 0 to {most:g}, got {value!r}; change it")


@chz.chz
class EvaluationSettings:
    """Evaluations on held-out tasks."""

    num_eval_rollouts: int = setting(64, "held-out task instances per evaluation", at_least=1)
    eval_attempts: int = setting(1, "rollouts of each held-out task instance, for pass@k", at_least=1)
    eval_temperature: float | None = setting(
        None, "sampling temperature during evaluation; 0 for greedy; None uses the training temperature", at_least=0.0
    )
    skip_baseline: bool = setting(False, "skip the evaluation before training")


@chz.chz
class LoopConfig(LearningConfig):
    """Group-relative policy gradients."""

    max_steps: int = setting(100, "number of training steps", at_least=1)
    group_size: int = setting(4, "rollouts per task instance; advantages are computed within this group")
    groups_per_batch: int = setting(10, "task instances per training step", at_least=1)
    temperature: float = setting(1.0, "sampling temperature during training", within=(0.0, 2.0))
    advantages: AdvantageKind = setting(
        "mean",
        "mean: centre rewards within the group; mean_std: also divide by the group's std; leave_one_out: "
        "subtract the mean of the others; batch_std: centre within the group, divide by the step's std; state_groups: "
        "compare turns that saw the same state; turn_returns: compare turns of the same index (group credit)",
    )
    kl_penalty_coef: float = setting(
        0.0, "coefficient of the per-token KL penalty against the reference model, in the reward", at_least=0.0
    )
    num_substeps: int = setting(1, "optimizer steps per training step, each on its share of the rollouts", at_least=1)
    max_steps_off_policy: int | None = setting(
        None,
        "None or 0: synchronous, on-policy training; k: asynchronous training with a policy lag of at most k steps",
        at_least=0,
    )
    num_groups_to_log: int = setting(1, "groups per step whose rewards are printed and logged", at_least=0)
    compute_post_kl: bool = setting(
        False, "measure the KL divergence of each step's update (one more forward pass, two with sub-steps)"
    )
    loss: LossConfig = chz.field(default_factory=LossConfig)
    sampling: SamplingSettings = chz.field(default_factory=SamplingSettings)
    curriculum: CurriculumSettings = chz.field(default_factory=CurriculumSettings)
    credit: CreditSettings = chz.field(default_factory=CreditSettings)
    branching: BranchingSettings = chz.field(default_factory=BranchingSettings)
    evaluation: EvaluationSettings = chz.field(default_factory=EvaluationSettings)

    @chz.validate
    def _branches_can_be_compared(self) -> None:
        siblings = self.branching.num_siblings
        if siblings and self.branching.num_parents(self.group_size) < 1:
            least = self.branching.least_whole
            raise ValueError(
                f"branching.num_siblings: expected at most group_size - {1 + least}: {least} without siblings, a "
                f"parent and its siblings, got {siblings} with group_size={self.group_size}; change one of them"
            )
        is_refused = self.curriculum.replay_successes or self.loss.normalisation == "sequence_mean"
        if siblings and (is_refused or self.advantages != "leave_one_out"):
            raise ValueError(
                "branching.num_siblings: expected advantages=leave_one_out without curriculum.replay_successes and "
                f"loss.normalisation=sequence_mean, whose lengths are those of rollouts, got {self.advantages} and "
                f"{self.loss.normalisation}; change them, or set branching.num_siblings=0"
            )

    @property
    def has_kl_term(self) -> bool:
        """True if groups whose advantages are all 0 still have a gradient, towards the reference model."""
        return bool(self.kl_penalty_coef or self.loss.kl_loss_coef)

    @property
    def max_refill_factor(self) -> int:
        """Constant groups are replaced until this many times `groups_per_batch` groups have run; 1 disables it."""
        return self.curriculum.max_refill_factor if self.curriculum.refill_groups else 1

    @property
    def parity_limit(self) -> float:
        """`trainer.parity_limit`, which is chosen before a run begins."""
        assert self.trainer.parity_limit is not None, "resolve() chooses it"
        return self.trainer.parity_limit
