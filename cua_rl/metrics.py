"""Every metric name with a one-line definition, and means that carry their counts. An unknown name is an error.

A name is `area/name[/stat]`; units are suffixes (`_s`, `_tokens`, `_frac`). In FAMILIES, a part in angle brackets
stands for any one part of a name: `eval/<suite>/success_rate` covers `eval/held_out/success_rate`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import fsum

METRICS: Mapping[str, str] = {
    "progress/step": "number of this training step; the first one is 1",
    "progress/done_frac": "share of the run's steps that are done, 0 to 1",
    "progress/epoch": "passes over the training tasks, or conversations, after this step: 1.5 is halfway through the "
    "second",
    "progress/curve": "number of the part of the run with comparable results (resume_with); absent in the first",
    "progress/policy_version": "version of the policy after this step: the number of completed optimizer steps",
    "reward/mean": "mean over the step's groups of their mean reward",
    "reward/std": "population standard deviation of the step's rewards",
    "reward/std_in_group": "mean over groups of the standard deviation of rewards inside the group",
    "reward/success_rate": "mean over groups of the share of rollouts that succeeded (validator or judge)",
    "reward/success_rate_uniform": "success rate with groups weighted by 1 / draw weight (task_sampling=success_rate)",
    "reward/constant_group_frac": "share of groups without advantages: all rewards equal, or too many faults",
    "reward/all_failed_group_frac": "share of groups without any success",
    "reward/all_solved_group_frac": "share of groups in which every rollout succeeded",
    "reward/success_rate_worst": "with faults: success rate of first tries if all faulty ones had failed",
    "reward/success_rate_best": "with faults: success rate of first tries if all faulty ones had succeeded",
    "curriculum/num_sampled_groups": "groups run in this step, including replacements of constant ones",
    "curriculum/num_dropped_groups": "groups without a learning signal: all rewards equal, or no rollout with a reward",
    "curriculum/effective_group_frac": "share of the sampled groups with differing rewards",
    "curriculum/batch_fill_frac": "groups with differing rewards, divided by groups_per_batch",
    "replay/num_rollouts": "stored successes added to groups in which every rollout failed",
    "replay/num_stored": "successes in the replay buffer after this step",
    "replay/age/mean": "optimizer steps since the replayed turns were sampled, mean",
    "replay/age/max": "optimizer steps since the replayed turns were sampled, largest",
    "replay/log_ratio/mean": "mean |log ratio| of training to sampling probability over replayed tokens, nats",
    "replay/log_ratio/max": "largest |log ratio| of training to sampling probability over replayed tokens, nats",
    "rollout/num_rollouts": "rollouts with a reward",
    "rollout/num_faults": "rollouts ended by infrastructure; never rewarded, never trained on",
    "rollout/num_retries": "rollouts started again after an infrastructure fault",
    "rollout/num_dropped_groups": "groups dropped because too few rollouts had a reward",
    "rollout/num_turns/mean": "turns per rollout",
    "rollout/num_turns/max": "turns of the longest rollout",
    "rollout/sampled_tokens": "tokens that the model sampled in this step",
    "rollout/sampled_tokens_per_turn/mean": "sampled tokens per turn",
    "rollout/prompt_tokens": "prompt tokens over all turns, images included",
    "rollout/cached_prompt_frac": "share of prompt tokens found in the server's prefix cache",
    "rollout/merged_turn_frac": "share of turns that extend the previous turn and share its training sequence",
    "rollout/shared_turns": "turns that rollouts share with the rollout that they continue; they are not sampled again",
    "rollout/num_model_servers": "model servers in service at the end of the step; only these are sampled from",
    "rollout/prompt_mismatches": "turns whose prompt ids differ from the renderer's; the server's ids are used",
    "rollout/retokenised_tokens": "trained tokens that differ from the sampled ids; must stay 0",
    "rollout/parse_failure_frac": "share of turns whose response could not be parsed into an action",
    "rollout/action_error_frac": "share of turns whose action the device rejected",
    "rollout/truncated_turn_frac": "share of turns truncated at max_tokens",
    "rollout/num_datums": "training sequences built from the step's rollouts",
    "rollout/sequences/mean": "training sequences of a rollout; more than one if its prompts do not extend each other",
    "rollout/trained_tokens": "sampled tokens that are trained on",
    "rollout/datum_tokens": "tokens of the training sequences, prompts and images included",
    "rollout/duration_s/mean": "duration of a rollout to its reward, the wait for a device included",
    "rollout/policy_lag/mean": "policy lag: training steps between sampling and training, mean over turns",
    "rollout/policy_lag/max": "policy lag: training steps between sampling and training, largest",
    "judge/num_verdicts": "rollouts, including retried ones, with a verdict of the judge",
    "judge/num_without_verdict": "rollouts without a verdict: endpoint down, answers malformed, votes divided",
    "judge/success_rate": "share of the judge's verdicts that are successes",
    "judge/agreement": "share of votes that agree with the verdict, mean over verdicts",
    "judge/malformed_frac": "share of the judge's answers that could not be parsed as a verdict",
    "judge/validator_agreement": "judge=compare: share of verdicts that agree with the validator",
    "judge/latency_s/mean": "time until all votes on a rollout have arrived, mean",
    "judge/latency_s/max": "time until all votes on a rollout have arrived, longest",
    "judge/prompt_tokens": "prompt tokens of all requests to the judge, including images, as counted by the endpoint",
    "judge/answer_tokens": "answer tokens of the judge, as counted by the endpoint",
    "judge/cost_usd": "cost of the step's votes at judge.input_price and judge.output_price, US dollars",
    "async/num_running_groups": "groups whose rollouts run during the step",
    "async/num_waiting_groups": "finished groups waiting for a later step",
    "async/num_running_rollouts": "rollouts that run during the step",
    "async/max_running_rollouts": "current limit on concurrent rollouts, adapted to the model server's load",
    "loss/policy": "policy loss, mean over trained tokens",
    "loss/total": "the minimised loss, normalised as `loss.normalisation` says; with several sub-steps, the mean",
    "loss/cross_entropy": "negative log-likelihood per trained token (supervised)",
    "loss/advantage_std": "the divisor of batch_std: standard deviation of advantages, over groups with a signal",
    "loss/kl_base": "KL divergence from the reference model in the loss (k3), before its coefficient",
    "loss/kl_base_k1": "another estimate of the same divergence (k1: unbiased, noisy, may be negative)",
    "policy/parity_mean_abs": "mean absolute difference of sampler and trainer log-probabilities at the same weights",
    "policy/parity_max_abs": "largest absolute difference of sampler and trainer log-probabilities at the same weights",
    "policy/parity_text_mean_abs": "parity_mean_abs over turns after text only",
    "policy/parity_image_mean_abs": "parity_mean_abs over turns after a new image",
    "policy/parity_first_token_mean_abs": "parity_mean_abs over the first tokens of responses",
    "policy/parity_later_token_mean_abs": "parity_mean_abs over all later tokens of responses",
    "policy/kl_sampling_training/mean": "KL estimate (k1) between the sampling and the training policy, per token",
    "policy/kl_sampling_training/max": "largest log-probability drop from sampler to trainer",
    "policy/kl_sampling_training_k3/mean": "KL estimate (k3, never negative) between sampling and training policy",
    "policy/kl_post": "KL estimate between the policies before and after this step, per token",
    "policy/kl_base": "KL estimate between the policy and the reference model, per token",
    "policy/ratio_mean": "mean importance ratio, training over sampling probability",
    "policy/ratio_p50": "median importance ratio; with several sub-steps, the mean of their medians",
    "policy/ratio_p99": "99th percentile of the importance ratios; with several sub-steps, their largest one",
    "policy/ratio_max": "largest importance ratio",
    "policy/ratio_min": "smallest importance ratio",
    "policy/ess_frac": "effective sample size of the importance ratios as a share of their number; 1 if all are equal",
    "policy/clip_frac": "share of trained tokens whose ratio was clipped",
    "policy/mask_frac": "share of trained tokens masked because sampler and trainer differ too much (IcePop)",
    "policy/entropy": "mean entropy of the trainer's distributions of trained tokens at the sampling temperature, nats",
    "policy/entropy_estimate": "mean of -log p by the sampler, over all sampled tokens of the step, nats",
    "policy/trained_entropy_estimate": "mean of -log p by the trainer, over trained tokens, nats",
    "optim/learning_rate": "learning rate of this step",
    "optim/grad_norm": "gradient norm before clipping; with several sub-steps, the mean over them",
    "optim/num_datums": "training sequences of this step",
    "optim/num_substeps": "optimizer updates inside this step",
    "optim/num_micro_batches": "forward and backward passes of this step",
    "optim/trained_tokens": "tokens that contribute to the loss",
    "optim/micro_batch_tokens": "maximum tokens of one forward pass",
    "optim/total_tokens": "tokens of all training sequences, images included",
    "optim/encoded_images": "screenshots encoded by the vision tower in forward-backward passes",
    "trainer/tokens": "tokens processed by the language model in all passes of the step, images included",
    "trainer/shared_tokens": "prefix tokens that were computed with another training sequence; not in trainer/tokens",
    "trainer/trained_tokens": "tokens that contribute to the gradient",
    "trainer/padding_tokens": "padding tokens; 0, because sequences are packed",
    "trainer/encoded_images": "screenshots encoded by the vision tower in all passes of the step",
    "trainer/reused_images": "screenshots whose features were cached in an earlier pass",
    "trainer/language_tflop": "10^12 floating-point operations in the decoder layers, attention included",
    "trainer/vision_tflop": "10^12 floating-point operations in the vision tower and its mergers",
    "trainer/lora_tflop": "10^12 floating-point operations in the adapter's matrices",
    "trainer/head_tflop": "10^12 floating-point operations in the language-model head",
    "trainer/memory_retries": "requests that were repeated with shorter rows after memory ran out",
    "trainer/restarts": "restarts of the trainer after a process died, since the run began or resumed",
    "trainer/busy_s": "time that the trainer spent on requests",
    "trainer/tflop_per_s": "10^12 floating-point operations per busy second",
    "trainer/mfu_frac": "MFU: trainer/tflop_per_s as a share of the data sheet's dense bfloat16 peak, on known GPUs",
    "trainer/matmul_frac": "trainer/tflop_per_s as a share of the measured throughput of one large matrix product",
    "trainer/parameters_gib": "memory of the model parameters held by one trainer process, GiB",
    "trainer/rss_gib": "main memory of the trainer process, GiB",
    "trainer/peak_rss_gib": "peak main memory of the trainer process, GiB",
    "trainer/peak_cuda_gib": "peak GPU memory of the trainer's tensors in the step, GiB",
    "trainer/peak_reserved_gib": "peak GPU memory including what PyTorch's allocator keeps in reserve, GiB",
    "time/step_s": "duration of the step",
    "time/rollouts_s": "time to collect the step's rollouts",
    "time/datums_s": "time to build training sequences",
    "time/train_s": "time for forward, backward and optimizer step",
    "time/publish_s": "time from saving the adapter until it is loaded, has passed the canary and is used by rollouts",
    "time/save_s": "time to save the adapter and checkpoints",
    "time/wait_s": "time that training waited for rollouts",
    "time/rollout_s/p90": "duration of a rollout, 90th percentile",
    "time/rollout_s/max": "duration of the slowest rollout",
    "time/turn_s/mean": "duration of a turn, mean",
    "time/sampling_s/mean": "duration of a model request, mean",
    "time/tokens_per_s": "sampled tokens per second of the whole step",
    "time/trained_tokens_per_s": "tokens of the training sequences per second of training (time/train_s)",
    "time/rollouts_per_hour": "rollouts with a reward per hour of the step",
    "device/num_leases": "device leases taken",
    "device/num_made": "devices created",
    "device/num_reused": "leases of devices that were reset instead of created",
    "device/num_faults": "faults of devices or their service, all kinds",
    "device/num_lost": "devices lost during a lease",
    "device/leased/max": "maximum number of devices leased at a time",
    "device/lease_s/mean": "time to obtain a device: waiting for a slot, then creation or reset",
    "device/create_s/mean": "time to create a device, mean",
    "device/create_s/max": "time to create a device, slowest",
    "device/busy_frac": "share of device time spent in leases",
    "device/num_workers": "rollout workers in service",
    "device/num_workers_missing": "rollout workers that were requested but do not run: no room, refused, or starting",
    "device/num_workers_lost": "rollout workers that died, fell silent or were replaced because their devices failed",
}

FAMILIES: Mapping[str, str] = {
    "stop/<reason>": "share of rollouts with this stop reason",
    "rollout/policy_lag/turns/<lag>": "number of turns trained with this policy lag",
    "rollout/forks/<reason>": "turns that started a new training sequence for this reason",
    "rollout/faults/<reason>": "number of rollouts that ended in this kind of fault",
    "rollout/worker_faults/<worker>": "number of rollouts that ended in a fault in this rollout worker",
    "rollout/harness/<metric>": "mean of a number that the harness reports, over the rollouts that have it",
    "device/faults/<kind>": "faults of a kind: lost, time_limit, service (5xx), quota (429), blocked, unusable, broken",
    "curriculum/success_rate/<task>": "running success rate of a task, used to sample tasks",
    "reward/parts/<part>": "mean of one part of the reward, as `reward/mean`",
    "reward/success_rate/<category>": "success rate of the step's groups in one task category",
    "eval/<suite>/success_rate": "mean over tasks of the share of rollouts that succeeded",
    "eval/<suite>/pass_at_<k>": "mean over all tasks of the estimated probability that one of k attempts succeeds",
    "eval/<suite>/reward/mean": "mean over tasks of their mean reward",
    "eval/<suite>/num_rollouts": "evaluation rollouts with a reward",
    "eval/<suite>/num_successes": "evaluation rollouts that succeeded",
    "eval/<suite>/num_faults": "evaluation rollouts lost to infrastructure faults, including those that were retried",
    "eval/<suite>/num_turns/mean": "mean over tasks of their turns per rollout",
    "eval/<suite>/short_tasks/<k>": "number of tasks with fewer than k attempts, because of which pass@k is left out",
    "eval/<suite>/success_rate_low": "lower end of the success rate's 95 % interval over tasks (docs/your_run.md)",
    "eval/<suite>/success_rate_high": "upper end of the success rate's 95 % interval",
    "eval/<suite>/success_rate_worst": "with faults: success rate of first tries if all faulty ones had failed",
    "eval/<suite>/success_rate_best": "with faults: success rate of first tries if all faulty ones had succeeded",
    "eval/<suite>/time_s": "duration of the evaluation",
    "eval/<suite>/cross_entropy": "negative log-likelihood per token of held-out responses (supervised)",
    "eval/<suite>/action_accuracy": "share of held-out turns whose greedy action matches the recorded one (supervised)",
    "eval/<suite>/action_accuracy/<part>": "that of one part: type of all actions, clicks at a point, typed text",
    "eval/<suite>/num_actions": "held-out turns whose greedy answers are compared with recorded actions",
    "eval/<suite>/success_rate/<category>": "success rate of the evaluation in one task category or difficulty",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean that knows its count, so that adding two of them is the mean of all values, never a mean of means."""

    total: float = 0.0
    count: int = 0

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(total=self.total + other.total, count=self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; 0.0 without values, which callers recognise by `count`."""
        return self.total / self.count if self.count else 0.0


SUMMED = frozenset(
    (
        *("optim/num_datums", "optim/num_micro_batches", "optim/encoded_images"),
        *("optim/trained_tokens", "optim/total_tokens"),
    )
)
"""Counts of a pass over datums: those of a step are their sums."""


def mean_of(values: Iterable[float]) -> Mean:
    """Collect values: mean_of([1, 0, 0, 1]).value is 0.5."""
    collected = [float(value) for value in values]
    return Mean(total=fsum(collected), count=len(collected))


def meaning(name: str) -> str | None:
    """A metric's definition; None for an unknown name."""
    if name in METRICS:
        return METRICS[name]
    return next((text for pattern, text in _family_patterns() if pattern.fullmatch(name)), None)


def check_names(metrics: Mapping[str, float]) -> None:
    """Refuse names that this module does not list; raises `ValueError` if a name is unknown."""
    unknown = [name for name in metrics if meaning(name) is None]
    if unknown:
        raise ValueError(
            f"expected metric names from cua_rl/metrics.py, got {unknown!r}; add them there with their meaning"
        )


def merge_metrics(*parts: Mapping[str, float]) -> dict[str, float]:
    """The metrics of all parts; raises `ValueError` if two share a name, because one would be lost."""
    merged: dict[str, float] = {}
    for part in parts:
        twice = sorted(merged.keys() & part.keys())
        if twice:
            raise ValueError(f"expected every metric from one place, got {twice!r} from two; give one another name")
        merged |= part
    return merged


@cache
def _family_patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(re.sub(r"<\w+>", r"[\\w.-]+", family)), text) for family, text in FAMILIES.items())
