import { useQuery } from "../api/cache";
import { setPage, stepChangePath } from "../api/paths";
import type { StepChange as Change } from "../api/types";
import { formatPercent } from "../format";
import { Link } from "../router";
import { signedPoints } from "../sets";
import { Panel } from "../ui/parts";
import { useMore } from "../ui/table";

/** Why a step's success differs from that of the steps before: other tasks, or changes at the same ones. */
export function StepChange({ runId, step }: { runId: string; step: number }) {
  const { data } = useQuery<Change>(stepChangePath(runId, step));
  if (!data || data.before === null || data.now === null) return null;
  return <ChangeView runId={runId} step={step} change={data} before={data.before} now={data.now} />;
}

function ChangeView({ runId, step, change, before, now }: { runId: string; step: number; change: Change; before: number; now: number }) {
  const { shown, more } = useMore(change.tasks.filter((task) => task.effect !== 0), 8);
  const of = (task: string) => ({ run_id: runId, phase: "step", task_id: task });
  const effects = change.tasks.reduce((sum, task) => sum + task.effect, 0);
  return (
    <Panel
      title={<>Why it changed <span className="faint">against steps {change.first_step} to {change.last_step}</span></>}
      flush
      actions={<Link className="button" to={setPage({ run_id: runId, phase: "step", min_step: change.first_step, max_step: step, view: "summary" })}>All of them</Link>}
    >
      <p className="panel-body num" data-testid="step-change">
        <b>{signedPoints(now - before)} points</b>, from {formatPercent(before, 1)} to {formatPercent(now, 1)}: {signedPoints(change.task_mix)} because other tasks were drawn, {signedPoints(effects)} because of changes at tasks that were drawn before.
      </p>
      {shown.length > 0 && (
        <div className="table-scroll">
          <table className="data">
            <thead><tr><th>Task</th><th className="right" title="what its change adds to the step's success, in percentage points">Points</th><th className="right">Before</th><th className="right">Now</th></tr></thead>
            <tbody>
              {shown.map((task) => (
                <tr key={task.task_id}>
                  <td className="wrap"><Link className="text-link" data-row to={setPage({ ...of(task.task_id), step })}>{task.task_id}</Link></td>
                  <td className={`right ${task.effect > 0 ? "good" : "bad"}`}>{signedPoints(task.effect)}</td>
                  <td className="right"><Link className="text-link" to={setPage({ ...of(task.task_id), min_step: change.first_step, max_step: change.last_step })}>{formatPercent(task.before.rate)}</Link></td>
                  <td className="right"><Link className="text-link" to={setPage({ ...of(task.task_id), step })}>{formatPercent(task.now.rate)}</Link></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {more}
    </Panel>
  );
}
