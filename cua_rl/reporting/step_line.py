"""One line of text per training step, the same in log files, pipes and terminals."""

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from cua_rl.reporting.pace import TimeLeft

# metric, label, format; a metric that the step does not have is left out
STEP_FIELDS = (
    ("progress/epoch", "Epoch", "{:z.2f}"),
    ("reward/success_rate", "Success", "{:z.3f}"),
    ("reward/success_rate_uniform", "Uniform success", "{:z.3f}"),  # with task_sampling=success_rate
    ("reward/mean", "Reward", "{:z.3f}"),
    ("loss/policy", "Loss", "{:z.4f}"),
    ("loss/cross_entropy", "Loss", "{:z.4f}"),
    ("policy/kl_base", "KL", "{:z.4f}"),  # from the reference: measured with kl_penalty_coef
    ("loss/kl_base", "KL", "{:z.4f}"),  # or with kl_loss_coef
    ("policy/kl_sampling_training/mean", "Sampler gap", "{:z.4f}"),
    ("optim/learning_rate", "LR", "{:.2e}"),
    ("time/tokens_per_s", "tok/s", "{:.0f}"),
)


def format_step_line(step: int, total_steps: int, metrics: Mapping[str, float], left: TimeLeft | None) -> str:
    """Step 5/100 (5.0%) | Success: 0.250 | Reward: 0.250 | Loss: 0.0234 | ...; `step` steps are complete."""
    parts = [f"Step {step}/{total_steps} ({100 * step / max(1, total_steps):.1f}%)"]
    parts += [f"{label}: {form.format(metrics[name])}" for name, label, form in STEP_FIELDS if name in metrics]
    if metrics.get("rollout/num_faults"):
        parts.append(f"Faults: {metrics['rollout/num_faults']:.0f}{_faulty_workers(metrics)}")
    if left is not None:
        parts.append(f"ETA: {format_left(left)}")
    return " | ".join(parts)


def _faulty_workers(metrics: Mapping[str, float]) -> str:
    """The workers of these faults, the worst first: " (worker-3: 20, worker-1: 5)"."""
    prefix = "rollout/worker_faults/"
    counts = sorted((-count, name.removeprefix(prefix)) for name, count in metrics.items() if name.startswith(prefix))
    return f" ({', '.join(f'{worker}: {-count:.0f}' for count, worker in counts)})" if counts else ""


def format_group_line(index: int, rewards: Sequence[float]) -> str:
    """[GRPO Group 0] Rewards: ['0.000', '1.000'] | Mean: 0.500 | Std: 0.500 (population)."""
    if not rewards:
        return f"[GRPO Group {index}] Rewards: [] (every rollout met a fault)"
    shown = [f"{reward:z.3f}" for reward in rewards]
    return f"[GRPO Group {index}] Rewards: {shown} | Mean: {fmean(rewards):z.3f} | Std: {pstdev(rewards):.3f}"


def format_evaluation_line(label: str, suite: str, metrics: Mapping[str, float]) -> str:
    """Baseline held_out | Success: 0.406 (95 % interval 0.29-0.53, 64 rollouts)."""
    prefix = f"eval/{suite}"
    text = f"{label} {suite} | Success: {metrics[f'{prefix}/success_rate']:.3f}"
    notes: list[str] = []
    if f"{prefix}/success_rate_low" in metrics:
        low, high = metrics[f"{prefix}/success_rate_low"], metrics[f"{prefix}/success_rate_high"]
        notes.append(f"95 % interval {low:.2f}-{high:.2f}")
    if f"{prefix}/num_rollouts" in metrics:
        notes.append(num_of(round(metrics[f"{prefix}/num_rollouts"]), "rollout"))
    if f"{prefix}/success_rate_worst" in metrics:
        worst, best = metrics[f"{prefix}/success_rate_worst"], metrics[f"{prefix}/success_rate_best"]
        faults = num_of(round(metrics[f"{prefix}/num_faults"]), "fault")
        notes.append(f"{faults}: {worst:.2f}-{best:.2f} if all had failed or succeeded")
    for name, value in metrics.items():
        k, tasks = name.removeprefix(f"{prefix}/short_tasks/"), num_of(round(value), "task")
        if k.isdecimal():
            notes.append(f"{tasks} lost to faults" if k == "1" else f"pass@{k} left out: fewer attempts at {tasks}")
    return text + (f" ({', '.join(notes)})" if notes else "")


def num_of(number: int, noun: str, plural: str | None = None) -> str:
    """1 -> "1 task", 3072 -> "3,072 tasks"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def format_left(left: TimeLeft) -> str:
    """1m15s, or >1m15s while no evaluation shows how long one takes."""
    return f"{'>' if left.is_lower_bound else ''}{format_duration(left.seconds)}"


def format_duration(seconds: float) -> str:
    """75 -> 1m15s, 3700 -> 1h01m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
