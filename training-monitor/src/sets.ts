import { isMissing } from "./api/paths";
import { words } from "./format";

/** Sets of rollouts as addresses: the parameters of the filter, in words, and smaller sets of a set. */

export type Field = { name: string; label: string; is?: "number" | "whole"; choices?: readonly string[] };

export const FIELDS: readonly Field[] = [
  { name: "phase", label: "Of", choices: ["step", "eval", "baseline"] },
  { name: "step", label: "Step", is: "whole" },
  { name: "min_step", label: "From step", is: "whole" },
  { name: "max_step", label: "To step", is: "whole" },
  { name: "task_id", label: "Task" },
  { name: "category", label: "Category" },
  { name: "difficulty", label: "Difficulty" },
  { name: "seed", label: "Seed", is: "whole" },
  { name: "group_id", label: "Group" },
  { name: "verdict", label: "Verdict", choices: ["success", "failure", "fault", "open"] },
  { name: "cause", label: "Cause" },
  { name: "stop_reason", label: "Stop reason" },
  { name: "failure_kind", label: "Unparseable" },
  { name: "fault", label: "Fault" },
  { name: "check", label: "Check" },
  { name: "expected", label: "Expected" },
  { name: "actual", label: "Read" },
  { name: "device_id", label: "Device" },
  { name: "worker", label: "Worker" },
  { name: "branch", label: "Branch", choices: ["yes", "no"] },
  { name: "min_reward", label: "Reward from", is: "number" },
  { name: "max_reward", label: "Reward to", is: "number" },
  { name: "min_turns", label: "Turns from", is: "whole" },
  { name: "max_turns", label: "Turns to", is: "whole" },
  { name: "min_gap", label: "Gap from", is: "number" },
  { name: "max_gap", label: "Gap to", is: "number" },
  { name: "stragglers", label: "Stragglers", choices: ["true", "false"] },
  { name: "judge", label: "Judge", choices: ["agrees", "disagrees"] },
  { name: "review", label: "Review", choices: ["none", "confirmed", "overturned"] },
  { name: "tag", label: "Tag" },
  { name: "note", label: "Note with" },
  { name: "status", label: "Status", choices: ["running", "completed", "failed", "cancelled"] },
  { name: "search", label: "Words" },
];

const PHASES: Record<string, string> = { step: "training steps", eval: "evaluations", baseline: "baseline" };

/** A value of the filter in words. */
export function shownValue(name: string, value: string): string {
  if (name === "phase") return PHASES[value] ?? value;
  if (value === "") return "nothing";
  if (name === "stragglers") return value === "true" ? "only" : "without";
  return ["cause", "stop_reason", "failure_kind"].includes(name) ? words(value) : value;
}

/** What the filter says, without its runs. */
export function filterOf(set: URLSearchParams): { name: string; label: string; value: string }[] {
  return [...set].flatMap(([name, value]) => {
    const field = FIELDS.find((one) => one.name === name);
    return field ? [{ name, label: field.label, value }] : [];
  });
}

/** "evaluations · step 40": what tells the set from all rollouts of its runs. */
export function describeSet(set: URLSearchParams): string {
  const parts = filterOf(set).map(({ name, label, value }) => (name === "phase" ? shownValue(name, value) : `${label.toLowerCase()} ${shownValue(name, value)}`));
  return parts.join(" · ") || "all rollouts";
}

/** The address of the set with these parameters changed; an empty one is taken away, unless a validator may have read nothing. */
export function narrowed(set: URLSearchParams, changes: Record<string, string>): string {
  const next = new URLSearchParams(set);
  for (const [name, value] of Object.entries(changes)) {
    if (isMissing(name, value)) next.delete(name);
    else next.set(name, value);
  }
  return `/rollouts?${next.toString()}`;
}

/** A difference of two shares in percentage points: "+12.5". */
export function signedPoints(value: number): string {
  const text = Math.abs(100 * value).toFixed(1);
  return text === "0.0" ? "0.0" : `${value < 0 ? "−" : "+"}${text}`;
}
