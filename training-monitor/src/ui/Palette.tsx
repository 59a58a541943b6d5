import { useMemo, useState, type KeyboardEvent } from "react";
import { useQuery } from "../api/cache";
import { rolloutPage, rolloutsPath, runPage, runsPath, sourcePage, tasksPath, taskPage } from "../api/paths";
import type { Page, RolloutItem, RunSummary, TaskStats } from "../api/types";
import { navigate } from "../router";
import { Dialog } from "./parts";

type Entry = { label: string; note: string; to: string };

/** Go anywhere by typing: runs, views of the current run, steps ("12"), tasks, the start of a rollout's id. */
export function Palette({ runId, onClose }: { runId: string | null; onClose: () => void }) {
  const [text, setText] = useState("");
  const [chosen, setChosen] = useState(0);
  const runs = useQuery<Page<RunSummary>>(runsPath({}));
  const tasks = useQuery<TaskStats[]>(runId ? tasksPath(runId) : null);
  const isId = /^[0-9a-f]{6,}$/.test(text.trim());
  const found = useQuery<Page<RolloutItem>>(runId && isId ? rolloutsPath(runId, { search: text.trim(), limit: 5 }) : null);
  const entries = useMemo(() => {
    const wanted = text.trim().toLowerCase();
    const all: Entry[] = [];
    if (runId && /^\d+$/.test(wanted)) {
      all.push({ label: `Step ${wanted}`, note: "this run", to: sourcePage(runId, "step", wanted) });
      all.push({ label: `Evaluation after ${wanted} steps`, note: "this run", to: sourcePage(runId, "eval", wanted) });
    }
    for (const one of found.data?.items ?? []) {
      all.push({ label: `Rollout ${one.rollout_id.slice(0, 12)}`, note: one.task_id, to: rolloutPage(runId ?? "", one.rollout_id) });
    }
    if (runId) {
      for (const tab of ["charts", "timeline", "live", "tasks", "evals", "failures", "config"]) {
        all.push({ label: `This run: ${tab}`, note: "view", to: runPage(runId, tab === "charts" ? undefined : tab) });
      }
    }
    all.push({ label: "All runs", note: "page", to: "/" }, { label: "Benchmarks", note: "page", to: "/benchmarks" }, { label: "Compare runs", note: "page", to: "/compare" });
    for (const run of runs.data?.items ?? []) all.push({ label: run.run_name, note: `run, ${run.status}`, to: runPage(run.run_id) });
    for (const task of tasks.data ?? []) all.push({ label: task.task_id, note: "task", to: taskPage(runId ?? "", task.task_id) });
    const isExact = (entry: Entry) => /^(Step|Evaluation|Rollout) /.test(entry.label);
    return all.filter((entry) => wanted === "" || isExact(entry) || `${entry.label} ${entry.note}`.toLowerCase().includes(wanted)).slice(0, 12);
  }, [text, runId, runs.data, tasks.data, found.data]);
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
    if (event.key === "Enter") go(entries[chosen]);
  };
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
        }}
        onKeyDown={keys}
      />
      <div className="palette-list" role="listbox" id="palette-list" aria-label="Places">
        {entries.map((entry, index) => (
          <div key={entry.to + entry.label} id={`palette-${index}`} role="option" aria-selected={index === chosen} onMouseMove={() => setChosen(index)} onClick={() => go(entry)}>
            <span className="truncate">{entry.label}</span>
            <span className="faint">{entry.note}</span>
          </div>
        ))}
        {entries.length === 0 && <p className="dim panel-body">Nothing has this name.</p>}
      </div>
    </Dialog>
  );
}
