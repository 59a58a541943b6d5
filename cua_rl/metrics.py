"""Every metric name with one line of meaning, and means that carry their counts. An unknown name is an error.

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
    "progress/epoch": "0-based pass over the training tasks",
    "progress/policy_version": "optimizer steps behind the adapter that is served after this step",
    "reward/mean": "mean reward of the step's rollouts",
    "reward/std": "population standard deviation of the step's rewards",
    "reward/std_in_group": "mean over groups of the standard deviation of rewards inside the group",
    "reward/success_rate": "share of rollouts whose task's validator said success",
    "reward/constant_group_frac": "share of constant groups: all rewards equal, so they teach nothing",
    "reward/all_failed_group_frac": "share of groups without any success",
    "reward/all_solved_group_frac": "share of groups in which every rollout succeeded",
    "curriculum/num_sampled_groups": "groups that the step ran, those in place of constant ones included",
    "curriculum/num_dropped_groups": "groups that taught nothing: all rewards equal, or no member with a reward",
    "curriculum/effective_group_frac": "share of the sampled groups that taught something",
    "curriculum/batch_fill_frac": "groups that taught something, over groups_per_batch",
    "replay/num_rollouts": "stored successes that joined a group in which every member failed",
    "replay/num_stored": "successes in the replay buffer after this step",
    "replay/age/mean": "optimizer steps since the replayed turns were sampled, mean",
    "replay/age/max": "optimizer steps since the replayed turns were sampled, largest",
    "replay/log_ratio/mean": "mean |log ratio| of training to sampling probability over replayed tokens, nats",
    "replay/log_ratio/max": "largest |log ratio| of training to sampling probability over replayed tokens, nats",
    "rollout/num_rollouts": "rollouts with a reward",
    "rollout/num_faults": "rollouts ended by infrastructure; never rewarded, never trained on",
    "rollout/num_retries": "rollouts started again after an infrastructure fault",
    "rollout/num_dropped_groups": "groups given up because too few members had a reward",
    "rollout/num_turns/mean": "turns per rollout",
    "rollout/num_turns/max": "turns of the longest rollout",
    "rollout/sampled_tokens": "tokens that the model sampled in this step",
    "rollout/sampled_tokens_per_turn/mean": "sampled tokens per turn",
    "rollout/prompt_tokens": "prompt tokens over all turns, images included",
    "rollout/cached_prompt_frac": "share of prompt tokens that the server had in its prefix cache",
    "rollout/merged_turn_frac": "share of turns that extend the turn before them and share its training sequence",
    "rollout/prompt_mismatches": "turns whose prompt ids differ from the renderer's; the server's ids win",
    "rollout/retokenised_tokens": "trained tokens that are not literally the sampled ids; must stay 0",
    "rollout/parse_failure_frac": "share of turns whose text is not a well-formed action",
    "rollout/action_error_frac": "share of turns whose action the device refused",
    "rollout/truncated_turn_frac": "share of turns cut off at max_tokens",
    "rollout/num_datums": "training sequences built from the step's rollouts",
    "rollout/trained_tokens": "sampled tokens with an advantage",
    "rollout/datum_tokens": "tokens of the training sequences, prompts and images included",
    "rollout/duration_s/mean": "one rollout, from its device lease to its reward",
    "rollout/policy_lag/mean": "optimizer steps between sampling and training, mean over turns",
    "rollout/policy_lag/max": "optimizer steps between sampling and training, largest",
    "judge/num_verdicts": "rollouts, retried ones included, on which the judge came to a verdict",
    "judge/num_without_verdict": "rollouts on which it came to none: endpoint away, answers malformed, votes divided",
    "judge/success_rate": "share of the judge's verdicts that say success",
    "judge/agreement": "share of the votes that say what the verdict says, mean over verdicts",
    "judge/malformed_frac": "share of the judge's votes that were no verdict, though the endpoint answered",
    "judge/validator_agreement": "judge=compare: share of verdicts that say what the validator says",
    "judge/latency_s/mean": "from asking the judge about a rollout until all votes are there, mean",
    "judge/latency_s/max": "from asking the judge about a rollout until all votes are there, longest",
    "judge/prompt_tokens": "tokens of all requests to the judge, images included, as the endpoint counts them",
    "judge/answer_tokens": "tokens of all answers of the judge, as the endpoint counts them",
    "judge/cost_usd": "what the step's votes cost at judge_input_price and judge_output_price, US dollars",
    "async/num_running_groups": "asynchronous training: groups whose rollouts run while the step is trained",
    "async/num_waiting_groups": "asynchronous training: finished groups that wait for a later step",
    "async/num_running_rollouts": "rollouts that run while the step is trained",
    "async/max_running_rollouts": "rollouts that may run at a time, as the model server's load allows",
    "loss/policy": "policy loss, mean over trained tokens",
    "loss/total": "what was minimised, mean over trained tokens",
    "loss/cross_entropy": "negative log-likelihood per trained token (supervised)",
    "loss/advantage_std": "standard deviation of advantages over the step's rollouts, which batch_std divides by",
    "loss/kl_base": "penalty for leaving the base model, before its coefficient",
    "policy/parity_mean_abs": "mean absolute difference of sampler and trainer log-probabilities at the same weights",
    "policy/parity_max_abs": "largest absolute difference of sampler and trainer log-probabilities at the same weights",
    "policy/parity_text_mean_abs": "parity_mean_abs over turns that answer text alone",
    "policy/parity_image_mean_abs": "parity_mean_abs over turns that answer a new image",
    "policy/parity_first_token_mean_abs": "parity_mean_abs over the first tokens of answers",
    "policy/parity_later_token_mean_abs": "parity_mean_abs over all tokens of answers but the first",
    "policy/kl_sampling_training/mean": "KL estimate (k1) between the sampling and the training policy, per token",
    "policy/kl_sampling_training/max": "largest log-probability drop from sampler to trainer",
    "policy/kl_sampling_training_k3/mean": "KL estimate (k3, never negative) between sampling and training policy",
    "policy/kl_post": "KL estimate between the sampling policy and the policy after this step, per token",
    "policy/kl_base": "KL estimate between the trained policy and the base model, per token",
    "policy/ratio_mean": "mean importance ratio, training over sampling probability",
    "policy/ratio_p50": "median importance ratio",
    "policy/ratio_p99": "99th percentile of the importance ratios",
    "policy/ratio_max": "largest importance ratio",
    "policy/ratio_min": "smallest importance ratio",
    "policy/ess_frac": "effective sample size of the importance ratios over their number: 1 if all are equal",
    "policy/clip_frac": "share of trained tokens whose ratio was clipped",
    "policy/mask_frac": "share of trained tokens left out because sampler and trainer differ too much (IcePop)",
    "policy/entropy": "mean entropy of the distributions that trained tokens were drawn from, nats",
    "policy/entropy_estimate": "mean of -log p over sampled tokens",
    "optim/learning_rate": "learning rate of this step",
    "optim/grad_norm": "gradient norm before clipping; with several sub-steps, their mean",
    "optim/num_datums": "training sequences of this step",
    "optim/num_passes": "train_early: requests in which the step's rollouts were passed forward and backward",
    "optim/num_substeps": "optimizer updates inside this step",
    "optim/num_micro_batches": "forward and backward passes of this step",
    "optim/trained_tokens": "tokens with a loss",
    "optim/total_tokens": "tokens of all training sequences, images included",
    "optim/encoded_images": "screenshots that went through the vision tower while gradients were taken",
    "trainer/tokens": "tokens that went through the language model in all passes of the step, images included",
    "trainer/trained_tokens": "tokens whose loss was differentiated",
    "trainer/padding_tokens": "tokens that stood for nothing; sequences are packed end to end, so 0",
    "trainer/encoded_images": "screenshots that went through the vision tower in all passes of the step",
    "trainer/reused_images": "screenshots whose features were held from an earlier pass",
    "trainer/language_tflop": "10^12 floating-point operations in the decoder layers, attention included",
    "trainer/vision_tflop": "10^12 floating-point operations in the vision tower and its mergers",
    "trainer/lora_tflop": "10^12 floating-point operations in the adapter's matrices",
    "trainer/head_tflop": "10^12 floating-point operations in the language-model head",
    "trainer/busy_s": "time in which the trainer carried out requests",
    "trainer/tflop_per_s": "10^12 floating-point operations per busy second",
    "trainer/mfu_frac": "the same, as a share of what one large matrix product reaches on the device",
    "trainer/parameters_gib": "memory of the model's parameters that a trainer process holds, GiB",
    "trainer/rss_gib": "main memory of the trainer process, GiB",
    "trainer/peak_rss_gib": "largest main memory that the trainer process ever had, GiB",
    "trainer/peak_cuda_gib": "largest GPU memory that the trainer's tensors took in the step, GiB",
    "time/step_s": "the whole step",
    "time/rollouts_s": "collecting the step's rollouts",
    "time/datums_s": "building training sequences",
    "time/train_s": "forward, backward and optimizer step",
    "time/publish_s": "from the saved adapter until the server has proven and announced it",
    "time/save_s": "saving the adapter and checkpoints",
    "time/wait_s": "training waited for rollouts",
    "time/rollout_s/p90": "one rollout, 90th percentile",
    "time/rollout_s/max": "slowest rollout",
    "time/turn_s/mean": "one turn",
    "time/sampling_s/mean": "one request to the model",
    "time/tokens_per_s": "sampled tokens per second of rollout collection",
    "time/trained_tokens_per_s": "training sequence tokens per second of forward and backward",
    "time/rollouts_per_hour": "rollouts with a reward per hour of the step",
    "device/num_leases": "device leases taken",
    "device/num_made": "devices that were made",
    "device/num_reused": "leases served by a device that was reset",
    "device/num_faults": "faults of devices or of the service behind them, all kinds",
    "device/num_lost": "devices that went away while they were leased",
    "device/leased/max": "most devices leased at a time",
    "device/lease_s/mean": "wait for a device: for a free place, then until it is made or reset",
    "device/create_s/mean": "making one device, mean",
    "device/create_s/max": "making one device, slowest",
    "device/busy_frac": "share of device time spent in leases",
}

FAMILIES: Mapping[str, str] = {
    "stop/<reason>": "share of rollouts that ended for this reason",
    "rollout/policy_lag/turns/<lag>": "turns that were trained so many steps after they were sampled",
    "rollout/forks/<reason>": "turns that began a new training sequence for this reason",
    "device/faults/<kind>": "faults of one kind: lost, time_limit, service (5xx), quota (429), broken",
    "curriculum/success_rate/<task>": "running success rate of a task, by which tasks are drawn",
    "reward/parts/<part>": "mean of one part of the reward",
    "reward/success_rate/<category>": "success rate of the step's rollouts in one task category",
    "eval/<suite>/success_rate": "share of evaluation rollouts that succeeded",
    "eval/<suite>/pass_at_<k>": "estimated chance that at least one of k attempts at an evaluation task succeeds",
    "eval/<suite>/reward/mean": "mean reward of the evaluation",
    "eval/<suite>/num_rollouts": "evaluation rollouts with a reward",
    "eval/<suite>/num_successes": "evaluation rollouts that succeeded",
    "eval/<suite>/num_faults": "evaluation rollouts lost to infrastructure",
    "eval/<suite>/num_turns/mean": "turns per evaluation rollout",
    "eval/<suite>/success_rate_low": "lower end of the 95 % Wilson interval of the success rate",
    "eval/<suite>/success_rate_high": "upper end of the 95 % Wilson interval of the success rate",
    "eval/<suite>/time_s": "duration of the evaluation",
    "eval/<suite>/cross_entropy": "negative log-likelihood per token of held-out answers (supervised)",
    "eval/<suite>/success_rate/<category>": "success rate of the evaluation in one task category or difficulty",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean that knows its count, so that adding two of them is the mean of all values: never a mean of means."""

    total: float = 0.0
    count: int = 0

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(total=self.total + other.total, count=self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; 0.0 of nothing, which callers tell apart by `count`."""
        return self.total / self.count if self.count else 0.0


def mean_of(values: Iterable[float]) -> Mean:
    """Collect values: mean_of([1, 0, 0, 1]).value is 0.5."""
    collected = [float(value) for value in values]
    return Mean(total=fsum(collected), count=len(collected))


def meaning(name: str) -> str | None:
    """What a metric says, or None if there is no such metric."""
    if name in METRICS:
        return METRICS[name]
    return next((text for pattern, text in _family_patterns() if pattern.fullmatch(name)), None)


def check_names(metrics: Mapping[str, float]) -> None:
    """Refuse names that this module does not list.

    Raises:
        ValueError: a name is unknown.
    """
    unknown = [name for name in metrics if meaning(name) is None]
    if unknown:
        raise ValueError(
            f"expected metric names from cua_rl/metrics.py, got {unknown!r}; add them there with their meaning"
        )


@cache
def _family_patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(re.sub(r"<\w+>", r"[\\w.-]+", family)), text) for family, text in FAMILIES.items())
