import { useMemo, useState, type ReactNode } from "react";
import { useQuery } from "../api/cache";
import { runsPath } from "../api/paths";
import type { RunList, RunSummary } from "../api/types";
import { runLabels } from "../runs";

const AT_A_TIME = 200;

/** Choose one more run, of those that are not there yet. */
export function AddRun({ taken, most, onAdd }: { taken: readonly string[]; most: number; onAdd: (runId: string) => void }) {
  const { runs, older } = useRunChoices();
  const names = useMemo(() => runLabels(runs), [runs]);
  const isFull = taken.length >= most;
  return (
    <>
      <select className="field" aria-label="Add a run" value="" disabled={isFull} onChange={(event) => onAdd(event.target.value)}>
        <option value="">{isFull ? `${most} runs at most` : "Add a run…"}</option>
        {runs.filter((run) => !taken.includes(run.run_id)).map((run) => <option key={run.run_id} value={run.run_id}>{names.get(run.run_id)}</option>)}
      </select>
      {older}
    </>
  );
}

/** The newest runs to choose from, and where there are older ones, how many of how many these are and a button for more. */
export function useRunChoices(): { runs: readonly RunSummary[]; older: ReactNode } {
  const [before, setBefore] = useState<readonly RunSummary[]>([]);
  const [cursor, setCursor] = useState<string | null>(null);
  const { data } = useQuery<RunList>(runsPath({ limit: AT_A_TIME, cursor }));
  const runs = useMemo(() => [...before, ...(data?.items ?? [])], [before, data]);
  const next = data?.next_cursor;
  if (!data || !next) return { runs, older: null };
  const load = () => {
    setBefore(runs);
    setCursor(next);
  };
  const older = (
    <span className="row">
      <span className="faint num nowrap">newest {runs.length.toLocaleString("en-US")} of {data.num_runs.toLocaleString("en-US")}</span>
      <button type="button" className="button small" onClick={load}>Load older</button>
    </span>
  );
  return { runs, older };
}
