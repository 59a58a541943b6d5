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
      { title: "Success by category", metrics: [], prefix: "reward/success_rate/", percent: true },
      { title: "Constant groups", metrics: ["reward/constant_group_frac", "reward/all_failed_group_frac", "reward/all_solved_group_frac"], percent: true },
      { title: "Turns per rollout", metrics: ["rollout/num_turns/mean", "rollout/num_turns/max"] },
      { title: "Parts of the reward", metrics: [], prefix: "reward/parts/" },
      { title: "Curriculum", metrics: ["curriculum/effective_group_frac", "curriculum/batch_fill_frac"], percent: true },
      { title: "Replay", metrics: ["replay/num_rollouts", "replay/num_stored"] },
    ],
  },
  {
    title: "Policy",
    charts: [
      { title: "Loss", metrics: ["loss/policy", "loss/total", "loss/cross_entropy", "loss/kl_base"] },
      { title: "Entropy", metrics: ["policy/entropy_estimate"] },
      { title: "KL sampler to trainer", metrics: ["policy/kl_sampling_training/mean", "policy/kl_sampling_training_k3/mean", "policy/kl_post", "policy/kl_base"] },
      { title: "Parity", metrics: ["policy/parity_mean_abs", "policy/parity_max_abs"] },
      { title: "Importance ratio", metrics: ["policy/ratio_mean", "policy/ratio_min", "policy/ratio_max"] },
      { title: "Clipped tokens", metrics: ["policy/clip_frac"], percent: true },
      { title: "Gradient norm", metrics: ["optim/grad_norm"] },
      { title: "Learning rate", metrics: ["optim/learning_rate"] },
      { title: "Staleness", metrics: ["rollout/policy_lag/mean", "rollout/policy_lag/max"] },
    ],
  },
  {
    title: "Judge",
    charts: [
      { title: "Verdicts", metrics: ["judge/success_rate", "judge/agreement", "judge/validator_agreement", "judge/malformed_frac"], percent: true },
      { title: "Rollouts judged", metrics: ["judge/num_verdicts", "judge/num_without_verdict"] },
      { title: "Wait for the judge", metrics: ["judge/latency_s/mean", "judge/latency_s/max"], seconds: true },
      { title: "Cost of the judge", metrics: ["judge/cost_usd"], dollars: true },
    ],
  },
  {
    title: "Speed",
    charts: [
      { title: "Time per phase", metrics: ["time/rollouts_s", "time/train_s", "time/publish_s", "time/save_s", "time/wait_s"], seconds: true },
      { title: "Step time", metrics: ["time/step_s"], seconds: true },
      { title: "Rollout time", metrics: ["time/rollout_s/p90", "time/rollout_s/max", "rollout/duration_s/mean"], seconds: true },
      { title: "Tokens per second", metrics: ["time/tokens_per_s", "time/trained_tokens_per_s"] },
      { title: "Rollouts per hour", metrics: ["time/rollouts_per_hour"] },
      { title: "Tokens per step", metrics: ["rollout/sampled_tokens", "optim/trained_tokens", "optim/total_tokens"] },
    ],
  },
  {
    title: "Devices and model server",
    charts: [
      { title: "Device use", metrics: ["device/busy_frac"], percent: true },
      { title: "Devices leased and lost", metrics: ["device/num_leases", "device/num_lost"] },
      { title: "Wait for a device", metrics: ["device/lease_s/mean"], seconds: true },
      { title: "Request to the model", metrics: ["time/sampling_s/mean", "time/turn_s/mean"], seconds: true },
      { title: "Prefix cache", metrics: ["rollout/cached_prompt_frac", "rollout/merged_turn_frac"], percent: true },
    ],
  },
  {
    title: "Failures",
    charts: [
      { title: "How rollouts end", metrics: [], prefix: "stop/", percent: true },
      { title: "Answers that could not be read", metrics: ["rollout/parse_failure_frac", "rollout/action_error_frac", "rollout/truncated_turn_frac"], percent: true },
      { title: "Faults of the infrastructure", metrics: ["rollout/num_faults", "rollout/num_retries", "rollout/num_dropped_groups", "rollout/prompt_mismatches"] },
    ],
  },
];

/** Metrics of a chart that a run has. */
export function metricsOf(chart: ChartSpec, known: ReadonlySet<string>): string[] {
  const prefix = chart.prefix;
  const named = chart.metrics.filter((name) => known.has(name));
  return prefix ? [...named, ...[...known].filter((name) => name.startsWith(prefix)).sort()] : named;
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
