import { useCallback, useMemo } from "react";
import { useQuery } from "../api/cache";
import { rolloutPage, runPage, sourceName, sourcePage, taskPath } from "../api/paths";
import type { Rate, TaskDetail } from "../api/types";
import { ChartControls, useChartView } from "../charts/controls";
import { MetricChart } from "../charts/MetricChart";
import type { Series } from "../charts/series";
import { formatNumber, formatPercent, words } from "../format";
import { RolloutCellLink } from "../rollout/RolloutCellLink";
import { Link, navigate } from "../router";
import { Clamped, Empty, IntervalBar, Loaded, PageHead, Panel, Stat } from "../ui/parts";

const UNIT: [number, number] = [0, 1.02];
const RANGE: [number, number] = [0, 1];
const percent = (value: number) => formatPercent(value);

/** One task over the run: how often it succeeds, in which of its instances and in what way it fails. */
export function TaskPage({ runId, taskId }: { runId: string; taskId: string }) {
  const query = useQuery<TaskDetail>(taskPath(runId, taskId));
  return <Loaded query={query} height={420}>{(task) => <TaskView task={task} />}</Loaded>;
}

function TaskView({ task }: { task: TaskDetail }) {
  const view = useChartView();
  const series = useMemo<Series[]>(() => {
    const of = (wanted: boolean) =>
      task.history
        .filter((point) => (point.phase === "step") === wanted)
        .map((point) => ({ x: point.step, y: point.rate, low: point.low, high: point.high, count: point.num_rollouts }));
    return [
      { label: "training rollouts", color: "--accent", points: of(true) },
      { label: "held-out", color: "--good", points: of(false), dots: true },
    ].filter((one) => one.points.length > 0);
  }, [task]);
  const open = useCallback(
    (x: number, chosen: Series) => {
      const point = task.history.find((one) => one.step === x && (one.phase === "step") === !chosen.dots);
      if (point) navigate(sourcePage(task.run_id, point.phase, point.step));
    },
    [task],
  );
  const isTrained = task.training.num_rollouts > 0;
  const where = task.examined ? `, ${sourceName(task.examined.phase, task.examined.step).toLowerCase()}` : isTrained ? " in training" : "";
  return (
    <>
      <PageHead
        crumbs={[
          { label: "Runs", to: "/" },
          { label: task.run_name, to: runPage(task.run_id) },
          { label: "Tasks", to: runPage(task.run_id, "tasks") },
          { label: task.task_id },
        ]}
        title={task.task_id}
        note={<>{task.instruction && <Clamped lines={2}>for example: “{task.instruction}”</Clamped>}{task.category && <span className="badge">{task.category}</span>}{task.difficulty && <span className="badge">{task.difficulty}</span>}</>}
      />
      <dl className="stats">
        {isTrained && <Stat label="Success in training" hint="all training steps, 95 % Wilson interval">{formatPercent(task.training.rate, 1)}<small>{formatPercent(task.training.low)} to {formatPercent(task.training.high)}</small></Stat>}
        {isTrained && <Stat label="Training rollouts">{task.training.num_rollouts}<small>{task.training.num_successes} succeeded</small></Stat>}
        {task.baseline && <Stat label="Baseline" hint="held-out success before training, 95 % Wilson interval"><RateText rate={task.baseline} /></Stat>}
        {task.last_eval && <Stat label={`Evaluation after ${task.last_eval_step} steps`} hint="held-out success, 95 % Wilson interval"><RateText rate={task.last_eval} /></Stat>}
        <Stat label="Instances">{task.instances.length}</Stat>
        <Stat label="Turns allowed">{task.max_turns ?? "–"}</Stat>
      </dl>
      <ChartControls view={view} />
      <div className="panel chart-panel">
        <MetricChart title="Success over time" series={series} format={percent} yRange={UNIT} height={220} smoothing={view.smoothing} log={view.log} range={view.range} onRange={view.setRange} onPick={open} />
      </div>
      <div className="columns">
        <Panel title={`Where it fails${where}`}><FailureCounts task={task} /></Panel>
        <Panel title={`Hardest instances${where}`} flush><Instances task={task} /></Panel>
      </div>
      <Panel title="Latest failures">
        {task.failed_rollouts.length === 0 ? (
          <Empty title="No failure is stored"><p>Every rollout of this task that has ended reached its goal.</p></Empty>
        ) : (
          <ul className="failed-rollouts">
            {task.failed_rollouts.map((rollout) => (
              <li key={rollout.rollout_id} className="row">
                <RolloutCellLink rollout={rollout} runId={task.run_id} range={RANGE} />
                <Link className="text-link" data-row to={rolloutPage(task.run_id, rollout.rollout_id)}>{sourceName(rollout.phase, rollout.step)}, rollout {rollout.member_index + 1}</Link>
                <span className="dim">seed {rollout.seed}</span>
                <span className="dim">{words(rollout.stop_reason ?? rollout.status)}</span>
                <span className="num dim">reward {formatNumber(rollout.reward, 3)}</span>
              </li>
            ))}
          </ul>
        )}
      </Panel>
    </>
  );
}

function RateText({ rate }: { rate: Rate }) {
  return <>{formatPercent(rate.rate, 1)}<small>{rate.num_successes} of {rate.num_rollouts}, {formatPercent(rate.low)} to {formatPercent(rate.high)}</small></>;
}

function FailureCounts({ task }: { task: TaskDetail }) {
  const sections = [
    { title: "What the validator read", counts: task.failed_checks },
    { title: "How failed rollouts ended", counts: task.stop_reasons },
    { title: "Answers that could not be read", counts: task.turn_failures },
  ].filter((section) => section.counts.length > 0);
  if (sections.length === 0) return <p className="dim">Nothing failed.</p>;
  return (
    <div className="stack">
      {sections.map((section) => (
        <div key={section.title}>
          <h3>{section.title}</h3>
          <CountBars counts={section.counts} />
        </div>
      ))}
    </div>
  );
}

/** Counts as bars, the longest as wide as its column. */
export function CountBars({ counts }: { counts: readonly { name: string; count: number }[] }) {
  const most = Math.max(1, ...counts.map((one) => one.count));
  return (
    <ul className="count-bars num">
      {counts.slice(0, 12).map((one) => (
        <li key={one.name}>
          <i style={{ width: `${(one.count / most) * 100}%` }} />
          <span className="count-name" title={words(one.name)}>{words(one.name)}</span>
          <b>{one.count.toLocaleString("en-US")}</b>
        </li>
      ))}
    </ul>
  );
}

function Instances({ task }: { task: TaskDetail }) {
  return (
    <div className="table-scroll short">
      <table className="data">
        <thead><tr><th>Instance</th><th>Success</th><th className="right">Rollouts</th><th className="right">Last step</th></tr></thead>
        <tbody>
          {task.instances.map((instance) => (
            <tr key={instance.seed}>
              <td><span className="num">seed {instance.seed}</span><div className="faint clamp-2">{instance.instruction}</div></td>
              <td className="interval-cell">{instance.success.rate === null ? null : <IntervalBar value={instance.success.rate} low={instance.success.low} high={instance.success.high} />}</td>
              <td className="right">{instance.success.num_successes} / {instance.success.num_rollouts}</td>
              <td className="right">{instance.last_step === null ? "–" : <Link className="text-link" to={sourcePage(task.run_id, "step", instance.last_step)}>{instance.last_step}</Link>}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
