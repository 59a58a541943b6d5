import { useCallback, useMemo } from "react";
import { judgedPage, setPage, sourceName, sourcePage } from "../api/paths";
import type { Evaluation, Rate, Run } from "../api/types";
import { MetricChart } from "../charts/MetricChart";
import type { Series } from "../charts/series";
import { formatDuration, formatNumber, formatPercent } from "../format";
import { Link, navigate } from "../router";
import { Empty, FaultBoundsNote, IntervalBar, LostNote, Panel, StatusBadge } from "../ui/parts";
import { useSorted, type Column } from "../ui/table";

const UNIT: [number, number] = [0, 1.02];
const percent = (value: number) => formatPercent(value);

function took(evaluation: Evaluation): number | null {
  return evaluation.ended_at ? (Date.parse(evaluation.ended_at) - Date.parse(evaluation.started_at)) / 1000 : null;
}

const COLUMNS: readonly Column<Evaluation>[] = [
  { label: "Evaluation", value: (one) => one.step },
  { label: "Status", value: (one) => one.status },
  { label: "Success, 95 % interval" },
  { label: "Rate", right: true, value: (one) => one.success.rate },
  { label: "Rollouts", right: true, value: (one) => one.success.num_rollouts },
  { label: "Reward", right: true, value: (one) => one.reward_mean },
  { label: "Adapter", right: true, value: (one) => one.policy_version },
  { label: "Took", right: true, value: took },
];

/** Success on held-out tasks before, during and after training. */
export function RunEvals({ run }: { run: Run }) {
  const { evaluations } = run;
  const series = useMemo<Series[]>(
    () => [
      {
        label: "held-out success",
        color: "--good",
        dots: true,
        points: evaluations.filter((one) => one.status === "completed").map((one) => ({ x: one.step, y: one.success.rate, low: one.success.low, high: one.success.high })),
      },
    ],
    [evaluations],
  );
  const open = useCallback(
    (x: number) => navigate(sourcePage(run.run_id, evaluations.find((one) => one.step === x)?.phase ?? "eval", x)),
    [run.run_id, evaluations],
  );
  const { sorted, head } = useSorted(evaluations, COLUMNS);
  if (evaluations.length === 0) {
    return (
      <Empty title="No evaluation">
        <p>Give the run held-out tasks, and set how often it evaluates them:</p>
        <pre>make train ARGS=&quot;eval_every=10&quot;</pre>
      </Empty>
    );
  }
  return (
    <>
      <div className="panel chart-panel">
        <MetricChart title="Success on held-out tasks" series={series} format={percent} yRange={UNIT} height={220} onPick={open} />
      </div>
      <Panel title="Evaluations" flush>
        <div className="table-scroll">
          <table className="data">
            <thead>
              {head}
            </thead>
            <tbody>
              {sorted.map((one) => <EvaluationRow key={`${one.phase}${one.step}`} run={run} evaluation={one} />)}
            </tbody>
          </table>
        </div>
      </Panel>
      <ByKind runId={run.run_id} title="By category" name="category" evaluations={evaluations} ratesOf={(one) => one.by_category} />
      <ByKind runId={run.run_id} title="By difficulty" name="difficulty" evaluations={evaluations} ratesOf={(one) => one.by_difficulty} />
    </>
  );
}

function EvaluationRow({ run, evaluation }: { run: Run; evaluation: Evaluation }) {
  const { success } = evaluation;
  return (
    <tr>
      <td><Link className="text-link" data-row to={sourcePage(run.run_id, evaluation.phase, evaluation.step)}>{sourceName(evaluation.phase, evaluation.step)}</Link></td>
      <td><StatusBadge status={evaluation.status} alive={run.is_alive} /></td>
      <td className="interval-cell">{success.rate === null ? null : <IntervalBar value={success.rate} low={success.low} high={success.high} />}</td>
      <td className="right"><b>{formatPercent(success.rate, 1)}</b>{evaluation.status === "running" ? <span className="faint"> so far, </span> : " "}<span className="faint">{formatPercent(success.low)} to {formatPercent(success.high)}</span>{evaluation.fault_bounds && <div><FaultBoundsNote bounds={evaluation.fault_bounds} /></div>}{success.num_lost_tasks > 0 && <div><LostNote rate={success} /></div>}</td>
      <td className="right"><Link className="text-link" to={judgedPage({ run_id: run.run_id, phase: evaluation.phase, step: evaluation.step })}>{success.num_successes} / {success.num_rollouts}</Link></td>
      <td className="right">{formatNumber(evaluation.reward_mean, 3)}</td>
      <td className="right mono">{evaluation.policy_version}</td>
      <td className="right">{formatDuration(took(evaluation))}</td>
    </tr>
  );
}

type ByKindProps = {
  runId: string;
  title: string;
  name: "category" | "difficulty";
  evaluations: readonly Evaluation[];
  ratesOf: (evaluation: Evaluation) => Record<string, Rate>;
};

/** Success in every evaluation of the tasks of one kind; nothing if all tasks are of one. */
function ByKind({ runId, title, name, evaluations, ratesOf }: ByKindProps) {
  const kinds = [...new Set(evaluations.flatMap((one) => Object.keys(ratesOf(one))))].sort();
  if (kinds.length === 0) return null;
  return (
    <Panel title={title} flush>
      <div className="table-scroll">
        <table className="data">
          <thead>
            <tr><th>{title.slice(3)}</th>{evaluations.map((one) => <th key={`${one.phase}${one.step}`}>{sourceName(one.phase, one.step)}</th>)}</tr>
          </thead>
          <tbody>
            {kinds.map((kind) => (
              <tr key={kind}>
                <td>{kind}</td>
                {evaluations.map((one) => (
                  <td key={`${one.phase}${one.step}`}><RateCell rate={ratesOf(one)[kind]} to={setPage({ run_id: runId, phase: one.phase, step: one.step, [name]: kind })} /></td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function RateCell({ rate, to }: { rate: Rate | undefined; to: string }) {
  if (!rate || rate.rate === null) return <span className="faint">–</span>;
  return (
    <div className="row">
      <IntervalBar value={rate.rate} low={rate.low} high={rate.high} />
      <Link className="text-link num nowrap" to={to} title={`${rate.num_successes} of ${rate.num_rollouts}`}>{formatPercent(rate.rate)}</Link>
      <LostNote rate={rate} />
    </div>
  );
}
