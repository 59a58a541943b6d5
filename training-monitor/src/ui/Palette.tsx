import { useEffect, useMemo, useState, type KeyboardEvent } from "react";
import { useQuery } from "../api/cache";
import { failuresPage, rolloutPage, rolloutsPath, runPage, runsPath, setPage, sourceName, sourcePage, tasksPath, taskPage, timelinePath } from "../api/paths";
import type { Page, RolloutItem, RunSummary, TaskStats, TimelineItem } from "../api/types";
import { navigate } from "../router";
import { nameOf, runLabels } from "../runs";
import { fits, setOf } from "../search";
import { Dialog } from "./parts";

type Entry = { label: string; note: string; to: string };

const SHOWN = 12;
const VIEWS = ["charts", "timeline", "live", "tasks", "evals", "cost", "verdicts", "config", "sql"];

/** Go anywhere by typing: runs, views of the current run, its steps ("12"), tasks, the start of a rollout's id. */
export function Palette({ runId, onClose }: { runId: string | null; onClose: () => void }) {
  const [text, setText] = useState("");
  const [chosen, setChosen] = useState(0);
  const [waiting, setWaiting] = useState(false); // Enter was pressed before all that fits was known
  const typed = text.trim();
  const newest = useQuery<Page<RunSummary>>(runsPath({}));
  const runs = useQuery<Page<RunSummary>>(runsPath({ search: typed }));
  const tasks = useQuery<TaskStats[]>(runId ? tasksPath(runId) : null);
  const sources = useQuery<TimelineItem[]>(runId && typed !== "" ? timelinePath(runId) : null);
  const isId = /^[0-9a-f]{6,}$/.test(typed);
  const found = useQuery<Page<RolloutItem>>(runId && isId ? rolloutsPath(runId, { search: typed, limit: 5 }) : null);
  const isBusy = [runs, tasks, sources, found].some((query) => query.loading);
  const entries = useMemo(() => {
    const all: Entry[] = [];
    const offer = (label: string, note: string, to: string, words: readonly (string | null)[] = []) => {
      if (fits(typed, [label, note, ...words])) all.push({ label, note, to });
    };
    if (runId) {
      for (const one of typed === "" ? [] : (sources.data ?? [])) {
        const name = sourceName(one.phase, one.step);
        const isMeant = /^\d+$/.test(typed) ? one.phase !== "baseline" && one.step === Number(typed) : fits(typed, [name]);
        if (isMeant) all.push({ label: name, note: "this run", to: sourcePage(runId, one.phase, one.step) });
      }
      for (const one of found.data?.items ?? []) {
        all.push({ label: `Rollout ${one.rollout_id.slice(0, 12)}`, note: one.task_id, to: rolloutPage(runId, one.rollout_id) });
      }
      for (const tab of VIEWS) offer(`This run: ${tab}`, "view", runPage(runId, tab === "charts" ? undefined : tab));
      offer("This run: failures", "rollouts", failuresPage(runId));
      offer("This run: rollouts", "rollouts", setPage({ run_id: runId }));
    }
    offer("All runs", "page", "/");
    offer("Benchmarks", "page", "/benchmarks");
    offer("Compare runs", "page", "/compare");
    const named = runs.data?.items ?? (newest.data?.items ?? []).filter((run) => fits(typed, [run.run_name, run.alias]));
    const labels = runLabels(named);
    for (const run of named) all.push({ label: labels.get(run.run_id) ?? nameOf(run), note: `run, ${run.status === "cancelled" ? "stopped" : run.status}`, to: runPage(run.run_id) });
    for (const task of tasks.data ?? []) {
      offer(task.task_id, task.instruction ?? "task", taskPage(runId ?? "", task.task_id), [task.category]);
    }
    if (!runId || typed === "") return all.slice(0, SHOWN);
    const sets: Entry[] = [{ label: `Rollouts with “${typed}”`, note: "this run", to: setPage({ run_id: runId, search: typed }) }];
    const meant = setOf(typed);
    if (meant) sets.unshift({ label: meant.label, note: "this run", to: setPage({ run_id: runId, ...meant.filter }) });
    return [...all.slice(0, SHOWN - sets.length), ...sets];
  }, [typed, runId, newest.data, runs.data, sources.data, tasks.data, found.data]);
  const go = (entry: Entry | undefined) => {
    if (!entry) return;
    onClose();
    navigate(entry.to);
  };
  const keys = (event: KeyboardEvent) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const step = event.key === "ArrowDown" ? 1 : -1;
      setChosen((before) => (before + step + entries.length) % Math.max(1, entries.length));
    }
    if (event.key !== "Enter") return;
    if (isBusy) setWaiting(true);
    else go(entries[chosen]);
  };
  useEffect(() => {
    if (waiting && !isBusy) go(entries[chosen]);
  }, [waiting, isBusy]);
  return (
    <Dialog label="Go to" onClose={onClose}>
      <input
        className="palette-input"
        role="combobox"
        aria-expanded="true"
        aria-controls="palette-list"
        aria-activedescendant={entries[chosen] ? `palette-${chosen}` : undefined}
        aria-label="Go to a run, step, task or rollout"
        placeholder="Run, step number, task, rollout id"
        value={text}
        onChange={(event) => {
          setText(event.target.value);
          setChosen(0);
          setWaiting(false);
        }}
        onKeyDown={keys}
      />
      <div className="palette-list" role="listbox" id="palette-list" aria-label="Places" aria-busy={isBusy}>
        {entries.map((entry, index) => (
          <div key={entry.to + entry.label} id={`palette-${index}`} role="option" aria-selected={index === chosen} onMouseMove={() => setChosen(index)} onClick={() => go(entry)}>
            <span className="truncate">{entry.label}</span>
            <span className="faint truncate">{entry.note}</span>
          </div>
        ))}
        {entries.length === 0 && <p className="dim panel-body">{isBusy ? "Searching…" : "No match."}</p>}
      </div>
    </Dialog>
  );
}
