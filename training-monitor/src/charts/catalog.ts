import { formatDollars, formatDuration, formatPercent, words } from "../format";

/** The charts of a run: which metrics are drawn together, under which heading, and how. */

export type ChartUnit = { percent?: boolean; seconds?: boolean; dollars?: boolean };

export type ChartSpec = ChartUnit & {
  title: string;
  metrics: readonly string[];
  /** Names that begin with this are drawn too. */
  prefix?: string;
};

const percent = (value: number) => formatPercent(value);

/** How the chart's values are written; undefined for plain numbers. */
export function formatOf(unit: ChartUnit): ((value: number) => string) | undefined {
  if (unit.percent) return percent;
  if (unit.seconds) return formatDuration;
  return unit.dollars ? formatDollars : undefined;
}

export type ChartSection = { title: string; charts: readonly ChartSpec[] };

export const SECTIONS: readonly ChartSection[] = [
  {
    title: "Learning",
    charts: [
      { title: "Reward", metrics: ["reward/mean"] },
      { title: "Success rate as logged", metrics: ["reward/success_rate"], prefix: "reward/success_rate_", percent: true },
      { title: "Spread of rewards", metrics: ["reward/std", "reward/std_in_group", "loss/advantage_std"] },
      { title: "Success by category", metrics: [], prefix: "reward/success_rate/", percent: true },
      { title: "Constant groups", metrics: ["reward/constant_group_frac", "reward/all_failed_group_frac", "reward/all_solved_group_frac"], percent: true },
      { title: "Turns per rollout", metrics: ["rollout/num_turns/mean", "rollout/num_turns/max"] },
      { title: "Parts of the reward", metrics: [], prefix: "reward/parts/" },
      { title: "Curriculum", metrics: ["curriculum/effective_group_frac", "curriculum/batch_fill_frac"], percent: true },
      { title: "Groups sampled", metrics: ["curriculum/num_sampled_groups", "curriculum/num_dropped_groups"] },
      { title: "Success rates of the curriculum", metrics: [], prefix: "curriculum/success_rate/", percent: true },
      { title: "Replay", metrics: ["replay/num_rollouts", "replay/num_stored"] },
      { title: "Age of replayed turns", metrics: ["replay/age/mean", "replay/age/max"] },
      { title: "Log ratio of replayed tokens", metrics: ["replay/log_ratio/mean", "replay/log_ratio/max"] },
      { title: "Progress", metrics: ["progress/step", "progress/policy_version"] },
      { title: "Progress of the run", metrics: ["progress/done_frac"], percent: true },
      { title: "Epoch", metrics: ["progress/epoch"] },
      { title: "Harness metrics", metrics: [], prefix: "rollout/harness/" },
    ],
  },
  {
    title: "Policy",
    charts: [
      { title: "Loss", metrics: ["loss/policy", "loss/total", "loss/cross_entropy"], prefix: "loss/" },
      { title: "KL to the base model", metrics: ["loss/kl_base", "loss/kl_base_k1", "policy/kl_base"] },
      { title: "Entropy", metrics: ["policy/entropy", "policy/entropy_estimate", "policy/trained_entropy_estimate"], prefix: "policy/entropy" },
      { title: "KL sampler to trainer", metrics: ["policy/kl_sampling_training/mean", "policy/kl_sampling_training_k3/mean"] },
      { title: "Largest drop sampler to trainer", metrics: ["policy/kl_sampling_training/max"] },
      { title: "KL of a step", metrics: ["policy/kl_post"] },
      { title: "Parity", metrics: ["policy/parity_mean_abs", "policy/parity_max_abs"] },
      { title: "Parity by kind of token", metrics: ["policy/parity_text_mean_abs", "policy/parity_image_mean_abs", "policy/parity_first_token_mean_abs", "policy/parity_later_token_mean_abs"] },
      { title: "Importance ratio", metrics: ["policy/ratio_mean", "policy/ratio_p50", "policy/ratio_p99", "policy/ratio_min", "policy/ratio_max"] },
      { title: "Clipped and masked tokens", metrics: ["policy/clip_frac", "policy/mask_frac"], percent: true },
      { title: "Effective sample size", metrics: ["policy/ess_frac"], percent: true },
      { title: "Gradient norm", metrics: ["optim/grad_norm"] },
      { title: "Learning rate", metrics: ["optim/learning_rate"] },
      { title: "Staleness", metrics: ["rollout/policy_lag/mean", "rollout/policy_lag/max"] },
      { title: "Turns by policy lag", metrics: [], prefix: "rollout/policy_lag/turns/" },
      { title: "Optimizer steps and passes", metrics: ["optim/num_substeps", "optim/num_micro_batches"] },
      { title: "Tokens of a pass", metrics: ["optim/micro_batch_tokens"] },
    ],
  },
  {
    title: "Judge",
    charts: [
      { title: "Verdicts", metrics: ["judge/success_rate", "judge/agreement", "judge/validator_agreement", "judge/malformed_frac"], percent: true },
      { title: "Rollouts judged", metrics: ["judge/num_verdicts", "judge/num_without_verdict"] },
      { title: "Wait for the judge", metrics: ["judge/latency_s/mean", "judge/latency_s/max"], seconds: true },
      { title: "Cost of the judge", metrics: ["judge/cost_usd"], dollars: true },
      { title: "Tokens of the judge", metrics: ["judge/prompt_tokens", "judge/answer_tokens"] },
    ],
  },
  {
    title: "Speed",
    charts: [
      { title: "Time per phase", metrics: ["time/rollouts_s", "time/datums_s", "time/train_s", "time/publish_s", "time/save_s", "time/wait_s"], seconds: true },
      { title: "Step time", metrics: ["time/step_s"], seconds: true },
      { title: "Rollout time", metrics: ["time/rollout_s/p90", "time/rollout_s/max", "rollout/duration_s/mean"], seconds: true },
      { title: "Tokens per second", metrics: ["time/tokens_per_s", "time/trained_tokens_per_s"] },
      { title: "Rollouts per hour", metrics: ["time/rollouts_per_hour"] },
      { title: "Rollouts with a reward", metrics: ["rollout/num_rollouts"] },
      { title: "Rollouts at a time", metrics: ["async/num_running_rollouts", "async/max_running_rollouts"] },
      { title: "Groups at a time", metrics: ["async/num_running_groups", "async/num_waiting_groups"] },
      { title: "Tokens per step", metrics: ["rollout/sampled_tokens", "rollout/trained_tokens", "optim/trained_tokens", "optim/total_tokens"] },
      { title: "Tokens of prompts and sequences", metrics: ["rollout/prompt_tokens", "rollout/datum_tokens"] },
      { title: "Sampled tokens per turn", metrics: ["rollout/sampled_tokens_per_turn/mean"] },
      { title: "Training sequences", metrics: ["rollout/num_datums", "optim/num_datums"] },
      { title: "Sequences per rollout", metrics: ["rollout/sequences/mean"] },
      { title: "Turns shared by branches", metrics: ["rollout/shared_turns"] },
      { title: "Forks of sequences by reason", metrics: [], prefix: "rollout/forks/" },
    ],
  },
  {
    title: "Trainer",
    charts: [
      { title: "Model FLOPs utilisation", metrics: ["trainer/matmul_frac"], prefix: "trainer/mfu", percent: true },
      { title: "TFLOP per second", metrics: ["trainer/tflop_per_s"] },
      { title: "TFLOP by part", metrics: ["trainer/language_tflop", "trainer/vision_tflop", "trainer/lora_tflop", "trainer/head_tflop"] },
      {
        title: "Tokens in passes",
        metrics: ["trainer/tokens", "trainer/shared_tokens", "trainer/trained_tokens", "trainer/padding_tokens"],
      },
      { title: "Screenshots in passes", metrics: ["trainer/encoded_images", "trainer/reused_images", "optim/encoded_images"] },
      { title: "Busy time", metrics: ["trainer/busy_s"], seconds: true },
      { title: "Memory, GiB", metrics: ["trainer/parameters_gib", "trainer/rss_gib", "trainer/peak_rss_gib", "trainer/peak_cuda_gib", "trainer/peak_reserved_gib"] },
      { title: "Retries and restarts", metrics: ["trainer/memory_retries", "trainer/restarts"] },
    ],
  },
  {
    title: "Devices and model server",
    charts: [
      { title: "Device use", metrics: ["device/busy_frac"], percent: true },
      { title: "Devices leased and lost", metrics: ["device/num_leases", "device/num_lost"] },
      { title: "Devices at a time", metrics: ["device/leased/max"] },
      { title: "Devices made and reused", metrics: ["device/num_made", "device/num_reused"] },
      { title: "Wait for a device", metrics: ["device/lease_s/mean", "device/create_s/mean", "device/create_s/max"], seconds: true },
      { title: "Servers and workers", metrics: ["rollout/num_model_servers", "device/num_workers", "device/num_workers_lost", "device/num_workers_missing"] },
      { title: "Request to the model", metrics: ["time/sampling_s/mean", "time/turn_s/mean"], seconds: true },
      { title: "Prefix cache", metrics: ["rollout/cached_prompt_frac", "rollout/merged_turn_frac"], percent: true },
    ],
  },
  {
    title: "Failures",
    charts: [
      { title: "How rollouts end", metrics: [], prefix: "stop/", percent: true },
      { title: "Unparseable responses", metrics: ["rollout/parse_failure_frac", "rollout/action_error_frac", "rollout/truncated_turn_frac"], percent: true },
      { title: "Infrastructure faults", metrics: ["rollout/num_faults", "rollout/num_retries", "rollout/num_dropped_groups"] },
      { title: "Faults of rollouts by kind", metrics: [], prefix: "rollout/faults/" },
      { title: "Faults of rollouts by worker", metrics: [], prefix: "rollout/worker_faults/" },
      { title: "Faults of devices", metrics: ["device/num_faults"], prefix: "device/faults/" },
      { title: "Token checks", metrics: ["rollout/prompt_mismatches", "rollout/retokenised_tokens"] },
    ],
  },
];

const NAMED: ReadonlySet<string> = new Set(SECTIONS.flatMap((section) => section.charts.flatMap((chart) => chart.metrics)));
const PREFIXES = SECTIONS.flatMap((section) => section.charts.flatMap((chart) => chart.prefix ?? []));

/** Metrics of a chart that a run has; a prefix takes what no chart names. */
export function metricsOf(chart: ChartSpec, known: ReadonlySet<string>): string[] {
  const { prefix } = chart;
  const named = chart.metrics.filter((name) => known.has(name));
  return prefix ? [...named, ...[...known].filter((name) => name.startsWith(prefix) && !NAMED.has(name)).sort()] : named;
}

/** Metrics that no chart has, such as those of other programs: a chart each. */
export function otherCharts(known: ReadonlySet<string>): ChartSpec[] {
  const left = [...known].filter((name) => !NAMED.has(name) && !PREFIXES.some((prefix) => name.startsWith(prefix)));
  return left.sort().map((name) => ({ title: name, metrics: [name] }));
}

/** How many characters of whole words, ended by "_", all texts begin with. */
function sharedWords(texts: readonly string[]): number {
  const first = texts[0] ?? "";
  let end = 0;
  for (let at = first.indexOf("_"); at >= 0; at = first.indexOf("_", at + 1)) {
    if (texts.every((text) => text.startsWith(first.slice(0, at + 1)))) end = at + 1;
  }
  return end;
}

/** What all names of a chart have in common is left out: "mean abs" and "max abs" of "policy/parity_…". */
export function shortName(name: string, all: readonly string[]): string {
  if (all.length < 2) return name;
  const parts = name.split("/");
  let shared = 0;
  while (shared < parts.length - 1 && all.every((other) => other.split("/")[shared] === parts[shared])) shared += 1;
  const rest = (other: string) => other.split("/").slice(shared).join("/");
  return words(rest(name).slice(sharedWords(all.map(rest))));
}
