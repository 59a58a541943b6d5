"""One line of text per training step, the same in log files, pipes and terminals."""

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

# metric, label, format; a metric that the step does not have is left out
_FIELDS = (
    ("reward/success_rate", "Success", "{:.3f}"),
    ("reward/mean", "Reward", "{:.3f}"),
    ("loss/policy", "Loss", "{:.4f}"),
    ("loss/cross_entropy", "Loss", "{:.4f}"),
    ("policy/kl_base", "KL", "{:.4f}"),  # from the reference: measured with kl_penalty_coef
    ("loss/kl_base", "KL", "{:.4f}"),  # or with kl_loss_coef
    ("policy/kl_sampling_training/mean", "Sampler gap", "{:.4f}"),
    ("optim/learning_rate", "LR", "{:.2e}"),
    ("time/tokens_per_s", "tok/s", "{:.0f}"),
)


def format_step_line(step: int, total_steps: int, metrics: Mapping[str, float], eta_s: float | None) -> str:
    """Step 5/100 (5.0%) | Success: 0.250 | Reward: 0.250 | Loss: 0.0234 | ...; `step` steps are complete."""
    parts = [f"Step {step}/{total_steps} ({100 * step / max(1, total_steps):.1f}%)"]
    parts += [f"{label}: {form.format(metrics[name])}" for name, label, form in _FIELDS if name in metrics]
    if metrics.get("rollout/num_faults"):
        parts.append(f"Faults: {metrics['rollout/num_faults']:.0f}")
    if eta_s is not None:
        parts.append(f"ETA: {format_duration(eta_s)}")
    return " | ".join(parts)


def format_group_line(index: int, rewards: Sequence[float]) -> str:
    """[GRPO Group 0] Rewards: ['0.000', '1.000'] | Mean: 0.500 | Std: 0.500 (population)."""
    if not rewards:
        return f"[GRPO Group {index}] Rewards: [] (every rollout met a fault)"
    shown = [f"{reward:.3f}" for reward in rewards]
    return f"[GRPO Group {index}] Rewards: {shown} | Mean: {fmean(rewards):.3f} | Std: {pstdev(rewards):.3f}"


def format_evaluation_line(label: str, suite: str, metrics: Mapping[str, float]) -> str:
    """Baseline held_out | Success: 0.406 (95 % interval 0.29-0.53, 64 rollouts)."""
    prefix = f"eval/{suite}"
    text = f"{label} {suite} | Success: {metrics[f'{prefix}/success_rate']:.3f}"
    notes: list[str] = []
    if f"{prefix}/success_rate_low" in metrics:
        low, high = metrics[f"{prefix}/success_rate_low"], metrics[f"{prefix}/success_rate_high"]
        notes.append(f"95 % interval {low:.2f}-{high:.2f}")
    if f"{prefix}/num_rollouts" in metrics:
        notes.append(f"{metrics[f'{prefix}/num_rollouts']:.0f} rollouts")
    if f"{prefix}/success_rate_worst" in metrics:
        worst, best = metrics[f"{prefix}/success_rate_worst"], metrics[f"{prefix}/success_rate_best"]
        notes.append(
            f"{metrics[f'{prefix}/num_faults']:.0f} faults: {worst:.2f}-{best:.2f} if all had failed or succeeded"
        )
    return text + (f" ({', '.join(notes)})" if notes else "")


def format_duration(seconds: float) -> str:
    """75 -> 1m15s, 3700 -> 1h01m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
