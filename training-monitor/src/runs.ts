import { runPage } from "./api/paths";
import type { RunSummary } from "./api/types";
import { formatAgo, formatDuration } from "./format";

/** What runs are called, when each is seen, and whether one goes on. */

type Called = Pick<RunSummary, "run_name" | "alias">;
type Named = Called & Pick<RunSummary, "run_id" | "log_path">;

/** What people call a run, else its name. */
export const nameOf = (run: Called) => run.alias ?? run.run_name;

/** A run in a trail of links: its name stays in the title of its alias. */
export const runCrumb = (run: Called & Pick<RunSummary, "run_id">) => ({ label: nameOf(run), to: runPage(run.run_id), ...(run.alias === null ? {} : { title: run.run_name }) });

/** What tells a run apart from others of its name: the end of its folder, as much of it as differs, else its id. */
function mark(run: Named, namesakes: readonly Named[]): string {
  const parts = run.log_path.split("/").filter(Boolean);
  for (let count = 1; count <= parts.length; count += 1) {
    const tail = parts.slice(-count).join("/");
    if (namesakes.every((other) => other === run || !`/${other.log_path}`.endsWith(`/${tail}`))) return tail;
  }
  return `id ${run.run_id}`;
}

/** A text for each run that is unique among them: its alias or name, with a part of its folder if others have the same name. */
export function runLabels(runs: readonly Named[]): Map<string, string> {
  return new Map(
    runs.map((run) => {
      const others = runs.filter((other) => nameOf(other) === nameOf(run));
      return [run.run_id, others.length > 1 ? `${nameOf(run)} · ${mark(run, others)}` : nameOf(run)];
    }),
  );
}

type Lived = Pick<RunSummary, "status" | "is_alive" | "started_at" | "ended_at" | "heartbeat_at">;

/** How long ago the run began, if it goes on; else when it ended or was last seen. */
export function whenSeen(run: Lived, now: number): string {
  if (run.is_alive) return `started ${formatAgo(run.started_at, now)}`;
  if (run.status === "running") return `last seen ${formatAgo(run.heartbeat_at, now)}`;
  return `ended ${formatAgo(run.ended_at ?? run.heartbeat_at, now)}`;
}

/** What is left of a run that goes on, else how long it took. */
export function timeLeft(run: Lived & Pick<RunSummary, "eta_s" | "eta_is_lower_bound" | "elapsed_s" | "num_completed_steps" | "total_steps">): string {
  if (run.is_alive && run.total_steps > 0 && run.num_completed_steps >= run.total_steps && !run.eta_s) return "all steps done";
  if (run.eta_s !== null) return `${run.eta_is_lower_bound ? "> " : ""}${formatDuration(run.eta_s)} left`;
  return run.is_alive ? `${formatDuration(run.elapsed_s)} so far` : formatDuration(run.elapsed_s);
}
