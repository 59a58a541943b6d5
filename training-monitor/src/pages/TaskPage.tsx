import { useCallback, useMemo, useState } from "react";
import { useKept, useQuery } from "../api/cache";
import { judgedPage, rolloutPage, runPage, setPage, sourceName, sourcePage, taskPath, type Filters } from "../api/paths";
import type { Rate, TaskDetail } from "../api/types";
import { ChartControls, useChartView } from "../charts/controls";
import { afterStep } from "../charts/xUnits";
import { MetricChart } from "../charts/MetricChart";
import type { Series } from "../charts/series";
import { formatNumber, formatPercent, words } from "../format";
import { RolloutCellLink } from "../rollout/RolloutCellLink";
import { endText } from "../rollout/verdict";
import { Link, navigate } from "../router";
import { runCrumb } from "../runs";
import { useShortcuts } from "../ui/keys";
import { Clamped, Empty, IntervalBar, Loaded, LostNote, PageHead, Panel, Stat } from "../ui/parts";
import { useMore } from "../ui/table";

const UNIT: [number, number] = [0, 1.02];
const RANGE: [number, number] = [0, 1];
const percent = (value: number) => formatPercent(value);
const ASKED = 100; // rows of each list, at first
const MOST = 10_000; // that the API hands out

type Load = (count: number) => void;

/** One task over the run: how often it succeeds, in which of its instances and in what way it fails. */
export function TaskPage({ runId, taskId }: { runId: string; taskId: string }) {
  const [limit, setLimit] = useState(ASKED);
  const query = useKept(useQuery<TaskDetail>(taskPath(runId, taskId, limit)));
  const load = (count: number) => setLimit((before) => Math.min(MOST, Math.max(before + 1, count))); // for another list it may have been larger
  return <Loaded query={query} height={420}>{(task) => <TaskView task={task} load={load} />}</Loaded>;
}

function TaskView({ task, load }: { task: TaskDetail; load: Load }) {
  const failures = useMore(task.failed_rollouts, 20, { total: task.num_failed_rollouts, most: MOST, load });
  const view = useChartView();
  const series = useMemo<Series[]>(() => {
    const of = (wanted: boolean) =>
      task.history
        .filter((point) => (point.phase === "step") === wanted)
        .map((point) => ({ x: point.step, y: point.rate, low: point.low, high: point.high, count: point.num_independent }));
    return [
      { label: "training rollouts", color: "--accent", points: of(true), breaks: task.curve_ends.map(afterStep) },
      { label: "held-out tasks", color: "--good", points: of(false), dots: true },
    ].filter((one) => one.points.length > 0);
  }, [task]);
  const open = useCallback(
    (x: number, chosen: Series) => {
      const point = task.history.find((one) => one.step === x && (one.phase === "step") === !chosen.dots);
      if (point) navigate(sourcePage(task.run_id, point.phase, point.step));
    },
    [task],
  );
  useShortcuts({ u: () => navigate(runPage(task.run_id, "tasks")) });
  const of = { run_id: task.run_id, task_id: task.task_id };
  const isTrained = task.training.num_rollouts > 0;
  const where = task.examined ? `, ${sourceName(task.examined.phase, task.examined.step).toLowerCase()}` : isTrained ? " in training" : "";
  return (
    <>
      <PageHead
        crumbs={[
          { label: "Runs", to: "/" },
          runCrumb(task),
          { label: "Tasks", to: runPage(task.run_id, "tasks") },
          { label: task.task_id },
        ]}
        title={task.task_id}
        note={<>{task.instruction && <Clamped lines={2}>for example: “{task.instruction}”</Clamped>}{task.category && <span className="badge">{task.category}</span>}{task.difficulty && <span className="badge">{task.difficulty}</span>}</>}
      />
      <dl className="stats">
        {isTrained && <Stat label="Success in training" hint="all training steps, 95 % interval">{formatPercent(task.training.rate, 1)}<small>{formatPercent(task.training.low)} to {formatPercent(task.training.high)}</small><small><LostNote rate={task.training} /></small></Stat>}
        {isTrained && <Stat label="Training rollouts"><Link className="text-link" to={judgedPage({ ...of, phase: "step" })}>{task.training.num_rollouts}</Link><small><Link className="text-link" to={setPage({ ...of, phase: "step", verdict: "success" })}>{task.training.num_successes} succeeded</Link></small></Stat>}
        {task.baseline && <Stat label="Baseline" hint="held-out success before training, 95 % interval"><RateText rate={task.baseline} to={judgedPage({ ...of, phase: "baseline", step: task.history.findLast((one) => one.phase === "baseline")?.step })} /></Stat>}
        {task.last_eval && <Stat label={`Evaluation after ${task.last_eval_step} steps`} hint="held-out success, 95 % interval"><RateText rate={task.last_eval} to={judgedPage({ ...of, phase: "eval", step: task.last_eval_step })} /></Stat>}
        <Stat label="Instances">{task.num_instances.toLocaleString("en-US")}</Stat>
        <Stat label="Turns allowed">{task.max_turns ?? "–"}</Stat>
      </dl>
      <ChartControls view={view} />
      <div className="panel chart-panel">
        <MetricChart title="Success over time" series={series} format={percent} yRange={UNIT} height={220} smoothing={view.smoothing} log={view.log} range={view.range} onRange={view.setRange} onPick={open} />
      </div>
      <div className="columns">
        <Panel title={`Where it fails${where}`}><FailureCounts task={task} load={load} /></Panel>
        <Panel title={`Hardest instances${where}`} flush><Instances task={task} load={load} /></Panel>
      </div>
      <Panel title="Latest failures" actions={<Link className="button" to={setPage({ ...of, verdict: "failure" })}>All {task.num_failed_rollouts.toLocaleString("en-US")}</Link>}>
        {task.failed_rollouts.length === 0 ? (
          <Empty title="No failures"><p>Every rollout of this task that has ended reached its goal.</p></Empty>
        ) : (
          <>
          <ul className="failed-rollouts">
            {failures.shown.map((rollout) => (
              <li key={rollout.rollout_id} className="row">
                <RolloutCellLink rollout={rollout} runId={task.run_id} range={RANGE} />
                <Link className="text-link" data-row to={rolloutPage(task.run_id, rollout.rollout_id)}>{sourceName(rollout.phase, rollout.step)}, rollout {rollout.member_index + 1}</Link>
                <span className="dim">seed {rollout.seed}</span>
                <span className="dim">{endText(rollout)}</span>
                <span className="num dim">reward {formatNumber(rollout.reward, 3)}</span>
              </li>
            ))}
          </ul>
          {failures.more}
          </>
        )}
      </Panel>
    </>
  );
}

/** The rollouts to which instances and failures belong. */
function examinedOf(task: TaskDetail): Filters {
  return { run_id: task.run_id, task_id: task.task_id, ...(task.examined ?? { phase: "step" }) };
}

function RateText({ rate, to }: { rate: Rate; to: string }) {
  return <>{formatPercent(rate.rate, 1)}<small><Link className="text-link" to={to}>{rate.num_successes} of {rate.num_rollouts}</Link>, {formatPercent(rate.low)} to {formatPercent(rate.high)}</small><small><LostNote rate={rate} /></small></>;
}

function FailureCounts({ task, load }: { task: TaskDetail; load: Load }) {
  const failed = { ...examinedOf(task), verdict: "failure" };
  const checks = task.failed_checks.map((one) => ({ name: `${one.query}: expected “${one.expected}”, got “${one.actual}”`, count: one.count, to: setPage({ ...failed, check: one.query, expected: one.expected, actual: one.actual }) }));
  const causes = task.stop_reasons.map((one) => ({ ...one, to: setPage({ ...failed, cause: one.name }) }));
  const unread = task.turn_failures.map((one) => ({ ...one, to: setPage({ ...examinedOf(task), failure_kind: one.name }) }));
  const sections = [
    { title: "What the validator read", counts: checks, total: task.num_failed_checks },
    { title: "How failed rollouts ended", counts: causes, total: causes.length },
    { title: "Turns with unparseable responses", counts: unread, total: unread.length },
  ].filter((section) => section.counts.length > 0);
  if (sections.length === 0) return <p className="dim">Nothing failed.</p>;
  return (
    <div className="stack">
      {sections.map((section) => (
        <div key={section.title}>
          <h3>{section.title}</h3>
          <CountBars counts={section.counts} rest={{ total: section.total, most: MOST, load }} />
        </div>
      ))}
    </div>
  );
}

/** `to` is where a bar leads: to what it counts. */
type Bar = { name: string; count: number; label?: string | undefined; to?: string | undefined };

/** Counts as bars, the longest as wide as its column. */
export function CountBars({ counts, rest }: { counts: readonly Bar[]; rest?: Parameters<typeof useMore>[2] }) {
  const { shown, more } = useMore(counts, 12, rest);
  const most = Math.max(0, ...counts.map((one) => one.count)) || 1;
  return (
    <>
    <ul className="count-bars num">
      {shown.map((one) => (
        <li key={one.name}>
          <i style={{ width: `${(Math.max(0, one.count) / most) * 100}%` }} />
          <span className="count-name" title={one.label ?? words(one.name)}>{one.to ? <Link data-row to={one.to}>{one.label ?? words(one.name)}</Link> : (one.label ?? words(one.name))}</span>
          <b>{formatNumber(one.count)}</b>
        </li>
      ))}
    </ul>
    {more}
    </>
  );
}

function Instances({ task, load }: { task: TaskDetail; load: Load }) {
  const { shown, more } = useMore(task.instances, 50, { total: task.num_instances, most: MOST, load });
  return (
    <>
    <div className="table-scroll short">
      <table className="data">
        <thead><tr><th>Instance</th><th>Success</th><th className="right">Rollouts</th><th className="right">Last step</th></tr></thead>
        <tbody>
          {shown.map((instance) => (
            <tr key={instance.seed}>
              <td><span className="num">seed {instance.seed}</span><div className="faint clamp-2">{instance.instruction}</div></td>
              <td className="interval-cell">{instance.success.rate === null ? null : <IntervalBar value={instance.success.rate} low={instance.success.low} high={instance.success.high} />}</td>
              <td className="right"><Link className="text-link" to={judgedPage({ ...examinedOf(task), seed: instance.seed })}>{instance.success.num_successes} / {instance.success.num_rollouts}</Link></td>
              <td className="right">{instance.last_step === null ? "–" : <Link className="text-link" to={sourcePage(task.run_id, "step", instance.last_step)}>{instance.last_step}</Link>}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
    {more}
    </>
  );
}
