/** Addresses: of the API (…Path) and of the app's own pages (…Page). */

type Value = string | number | boolean | null | undefined;
/** Query parameters; a list repeats its name. */
export type Filters = Record<string, Value | readonly Value[]>;

/** What validators look at, expect and read may be empty; other parameters are left out then. */
export const isMissing = (name: string, value: Value) => value === "" && !["check", "expected", "actual"].includes(name);

function query(filters: Filters): string {
  const all = Object.entries(filters).flatMap(([name, value]) => (Array.isArray(value) ? value : [value]).map((one: Value): [string, Value] => [name, one]));
  const given = all.filter(([name, value]) => value !== null && value !== undefined && !isMissing(name, value));
  if (given.length === 0) return "";
  return `?${new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString()}`;
}

const run = (runId: string) => `/api/runs/${encodeURIComponent(runId)}`;

export const sessionPath = "/api/session";
export const runsPath = (filters: Filters) => `/api/runs${query(filters)}`;
export const runPath = run;
export const metricsPath = (runId: string, filters: Filters = {}) => `${run(runId)}/metrics${query(filters)}`;
export const timelinePath = (runId: string) => `${run(runId)}/timeline`;
export const rolloutsPath = (runId: string, filters: Filters) => `${run(runId)}/rollouts${query(filters)}`;
export const rolloutPath = (runId: string, rolloutId: string) => `${run(runId)}/rollouts/${encodeURIComponent(rolloutId)}`;
export const tokensPath = (runId: string, rolloutId: string, turn: number) => `${rolloutPath(runId, rolloutId)}/turns/${turn}/tokens`;
export const overridesPath = (runId: string, rolloutId: string) => `${rolloutPath(runId, rolloutId)}/overrides`;
export const downloadPath = (runId: string, rolloutId: string) => `${rolloutPath(runId, rolloutId)}/download`;
export const placePath = (runId: string, rolloutId: string, filters: Filters) => `${rolloutPath(runId, rolloutId)}/place${query(filters)}`;
/** A file for somebody without the monitor: a page, or a film. */
export const exportPath = (runId: string, rolloutId: string, kind: "page" | "film" | "film?kind=webp") => `${rolloutPath(runId, rolloutId)}/${kind}`;
export const notesPath = (runId: string, rolloutId?: string) => `${run(runId)}/notes${query({ rollout_id: rolloutId })}`;
export const notePath = (runId: string, noteId: number) => `${run(runId)}/notes/${noteId}`;
export const markPath = (runId: string) => `${run(runId)}/mark`;
export const verdictsPath = (runId: string) => `${run(runId)}/verdicts`;
export const sqlPath = (runId: string) => `${run(runId)}/sql`;
export const tasksPath = (runId: string) => `${run(runId)}/tasks`;
export const taskPath = (runId: string, taskId: string, limit: number) => `${run(runId)}/tasks/${encodeURIComponent(taskId)}${query({ limit })}`;
export const comparePath = (runIds: readonly string[]) =>
  `/api/runs/compare?${runIds.map((runId) => `run_id=${encodeURIComponent(runId)}`).join("&")}`;
export const settingsPath = (filters: Filters) => `/api/runs/settings${query(filters)}`;
export const setPath = (set: URLSearchParams) => `/api/rollouts?${set.toString()}`;
export const setSummaryPath = (set: URLSearchParams) => `/api/rollouts/summary?${set.toString()}`;
export const setCostPath = (set: URLSearchParams) => `/api/rollouts/cost?${set.toString()}`;
export const runCostPath = (runId: string) => `${run(runId)}/cost`;
export const outliersPath = (set: URLSearchParams, by: string) => `/api/rollouts/tokens?${set.toString()}&by=${by}`;
export const firstActionsPath = (set: URLSearchParams) => `/api/rollouts/first_actions?${set.toString()}`;
export const stepChangePath = (runId: string, step: number) => `${run(runId)}/step/${step}/change`;
export const differencePath = (first: string, second: string) => `/api/rollouts/compare${query({ first, second })}`;
export const analysesPath = (runId: string) => `${run(runId)}/analyses`;
export const suitePath = (runId: string) => `${run(runId)}/suite`;
export const replayPath = (runId: string, step: number) => `${run(runId)}/step/${step}/replay`;
export const askedPath = (runId: string, rolloutId: string) => `${rolloutPath(runId, rolloutId)}/asked`;
export const benchmarksPath = "/api/benchmarks";
export const eventsPath = (runId: string | null) => (runId ? `/api/events${query({ run_id: runId })}` : "/api/events");

export function sourcePath(runId: string, phase: string, step: number | string): string {
  return `${run(runId)}/${phase}/${step}`;
}
export function groupPath(runId: string, phase: string, step: number | string, groupId: string): string {
  return `${sourcePath(runId, phase, step)}/groups/${encodeURIComponent(groupId)}`;
}

const page = (runId: string) => `/runs/${encodeURIComponent(runId)}`;
export const runPage = (runId: string, tab?: string) => page(runId) + (tab ? `?tab=${tab}` : "");
export const sourcePage = (runId: string, phase: string, step: number | string) => `${page(runId)}/${phase}/${step}`;
export const groupPage = (at: { run_id: string; phase: string; step: number }, groupId: string) =>
  `${sourcePage(at.run_id, at.phase, at.step)}/groups/${encodeURIComponent(groupId)}`;
export const rolloutPage = (runId: string, rolloutId: string, turn?: number) =>
  `${page(runId)}/rollouts/${encodeURIComponent(rolloutId)}${turn ? `?turn=${turn + 1}` : ""}`;
/** The rollout as one of a set, which is the query of the set's address. */
export const rolloutInSetPage = (runId: string, rolloutId: string, set: string) => `${rolloutPage(runId, rolloutId)}${query({ set })}`;
export const taskPage = (runId: string, taskId: string) => `${page(runId)}/tasks/${encodeURIComponent(taskId)}`;
export const suitePage = (runId: string, at?: string) => `${page(runId)}/suite${query({ at })}`;
export const setPage = (filters: Filters) => `/rollouts${query(filters)}`;
/** Two rollouts of any runs, at the first turn in which they differ unless one is named. */
export const pairPage = (pair: readonly { run_id: string; rollout_id: string }[]) => `/pair${query({ of: pair.map((one) => `${one.run_id}/${one.rollout_id}`) })}`;
export const compareSetsPage = (first: string, second: string) => `/compare${query({ first, second })}`;
/** The rollouts of the latest evaluation, or of the baseline. */
export const heldOutPage = (one: { run_id: string; baseline_step: number | null; last_eval_step: number | null }) =>
  setPage({ run_id: one.run_id, ...(one.last_eval_step === null ? { phase: "baseline", step: one.baseline_step } : { phase: "eval", step: one.last_eval_step }) });
/** The rollouts that a success rate is over: a fault says nothing of the policy. */
export const judgedPage = (filters: Filters) => setPage({ ...filters, status: "completed" });
/** What a judge and the validator disagree about, and no person has decided. */
export const reviewPage = (runId: string) => setPage({ run_id: runId, judge: "disagrees", review: "none" });
export const failuresPage = (runId: string) => setPage({ run_id: runId, verdict: "failure", view: "summary" });
export const comparePage = (runIds: readonly string[]) => `/compare?runs=${runIds.map(encodeURIComponent).join(",")}`;

/** "step 12", "baseline", "eval 40": where there is little room. */
export function shortSourceName(phase: string, step: number): string {
  return phase === "baseline" ? "baseline" : `${phase} ${step}`;
}

/** "Step 12", "Baseline", "Evaluation after 40 steps". */
export function sourceName(phase: string, step: number): string {
  if (phase === "baseline") return "Baseline";
  if (phase === "eval") return step > 0 ? `Evaluation after ${step} steps` : "Evaluation";
  return `Step ${step}`;
}
