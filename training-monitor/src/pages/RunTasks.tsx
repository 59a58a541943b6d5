import { useMemo } from "react";
import { useQuery } from "../api/cache";
import { setPage, taskPage, tasksPath } from "../api/paths";
import type { Run, TaskStats } from "../api/types";
import { formatPercent, formatSigned, plural } from "../format";
import { Link, useSearchParam } from "../router";
import { fits } from "../search";
import { Empty, IntervalBar, Loaded, Panel, Segments } from "../ui/parts";
import { useMore, useSorted, type Column } from "../ui/table";

const ORDERS = [
  { value: "", label: "Hardest" },
  { value: "falling", label: "Falling" },
  { value: "rising", label: "Rising" },
  { value: "name", label: "Name" },
] as const;

const SHOWN = [
  { value: "", label: "All" },
  { value: "training", label: "Training" },
  { value: "held-out", label: "Held-out" },
] as const;

/** Tasks of the run, the ones that need attention first. */
export function RunTasks({ run }: { run: Run }) {
  const query = useQuery<TaskStats[]>(tasksPath(run.run_id));
  const [find, setFind] = useSearchParam("find");
  const [order, setOrder] = useSearchParam("order");
  const [shown, setShown] = useSearchParam("tasks");
  return (
    <Panel
      title={<>Tasks <span className="faint">{query.data?.length ?? ""}</span></>}
      flush
      actions={
        <>
          <input className="field" type="search" aria-label="Find a task" placeholder="Find a task" value={find} onChange={(event) => setFind(event.target.value)} />
          <Segments label="Tasks shown" value={shown} options={SHOWN} onChange={setShown} />
          <Segments label="Order" value={order} options={ORDERS} onChange={setOrder} />
        </>
      }
    >
      <Loaded query={query}>{(tasks) => <TaskTable run={run} tasks={tasks.filter((task) => isOf(task, shown))} find={find} order={order} />}</Loaded>
    </Panel>
  );
}

function isOf(task: TaskStats, shown: string): boolean {
  if (shown === "training") return task.num_groups > 0;
  return shown !== "held-out" || task.held_out.rate !== null;
}

function change(task: TaskStats): number {
  return (task.recent.rate ?? task.success.rate ?? 0) - (task.success.rate ?? 0);
}

const failuresOf = (task: TaskStats) => task.success.num_rollouts - task.success.num_successes;

const COLUMNS: readonly Column<TaskStats>[] = [
  { label: "Task", value: (task) => task.task_id },
  { label: "Category", value: (task) => task.category },
  { label: "Lately" },
  { label: "Last quarter", right: true, value: (task) => task.recent.rate },
  { label: "Whole run", right: true, value: (task) => task.success.rate },
  { label: "Change", right: true, title: "Last quarter against the whole run", value: (task) => (task.recent.rate === null ? null : change(task)) },
  { label: "Held-out", right: true, title: "In the latest evaluation that included it", value: (task) => task.held_out.rate },
  { label: "Failures", right: true, title: "Rollouts of training steps that failed", value: failuresOf },
  { label: "Groups", right: true, value: (task) => task.num_groups },
  { label: "Never solved", right: true, title: "Groups without a success", value: (task) => task.num_failed_groups },
  { label: "Last step", right: true, value: (task) => task.last_step },
];

function TaskTable({ run, tasks, find, order }: { run: Run; tasks: readonly TaskStats[]; find: string; order: string }) {
  const shown = useMemo(() => {
    const kept = tasks.filter((task) => fits(find, [task.task_id, task.instruction, task.category]));
    const recent = (task: TaskStats) => task.recent.rate ?? task.success.rate ?? task.held_out.rate ?? 2;
    if (order === "falling") kept.sort((a, b) => change(a) - change(b));
    else if (order === "rising") kept.sort((a, b) => change(b) - change(a));
    else if (order === "name") kept.sort((a, b) => a.task_id.localeCompare(b.task_id));
    else kept.sort((a, b) => recent(a) - recent(b));
    return kept;
  }, [tasks, find, order]);
  const { sorted, head } = useSorted(shown, COLUMNS);
  const { shown: rows, more } = useMore(sorted, 300);
  if (shown.length === 0) {
    return <Empty title="No task"><p>{tasks.length ? "No task has these words in its name, instruction or category; clear the search." : "Tasks appear when their first group has ended."}</p></Empty>;
  }
  return (
    <div className="table-scroll">
      <table className="data">
        <thead>
          {head}
        </thead>
        <tbody>
          {rows.map((task) => {
            const recent = [task.recent, task.success, task.held_out].find((rate) => rate.rate !== null) ?? task.success;
            const moved = change(task);
            const of = { run_id: run.run_id, task_id: task.task_id };
            return (
              <tr key={task.task_id}>
                <td className="wrap">
                  <Link to={taskPage(run.run_id, task.task_id)} data-row className="run-name">{task.task_id}</Link>
                  <div className="faint clamp-2">{task.instruction}</div>
                </td>
                <td className="dim">{task.category ?? "–"}</td>
                <td className="interval-cell">{recent.rate === null ? null : <IntervalBar value={recent.rate} low={recent.low} high={recent.high} />}</td>
                <td className="right">{task.recent.rate === null ? "–" : <Link className="text-link" to={setPage({ ...of, phase: "step", min_step: Math.floor(0.75 * run.num_completed_steps) + 1 })}><b>{formatPercent(task.recent.rate)}</b></Link>}</td>
                <td className="right dim">{task.num_groups > 0 ? <Link className="text-link" to={setPage({ ...of, phase: "step" })}>{formatPercent(task.success.rate)}</Link> : "–"}</td>
                <td className={`right ${moved > 0.02 ? "good" : moved < -0.02 ? "bad" : "faint"}`}>{task.num_groups > 0 ? formatSigned(Math.round(moved * 100)) : "–"}</td>
                <td className="right">{task.held_out.rate === null ? "–" : <Link className="text-link" to={setPage({ ...of, ...task.held_out_in })}>{formatPercent(task.held_out.rate)}</Link>}</td>
                <td className="right">{failuresOf(task) ? <Link className="text-link" aria-label={`${plural(failuresOf(task), "failure")} of ${task.task_id}`} to={setPage({ ...of, phase: "step", verdict: "failure" })}>{failuresOf(task)}</Link> : <span className="faint">{task.num_groups > 0 ? 0 : "–"}</span>}</td>
                <td className="right">{task.num_groups ? <Link className="text-link" to={setPage({ ...of, phase: "step" })}>{task.num_groups}</Link> : "–"}</td>
                <td className={`right ${task.num_failed_groups ? "" : "faint"}`}>{task.num_groups > 0 ? task.num_failed_groups : "–"}</td>
                <td className="right">{task.last_step === null ? "–" : <Link className="text-link" to={setPage({ ...of, phase: "step", step: task.last_step })}>{task.last_step}</Link>}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
      {more}
    </div>
  );
}
