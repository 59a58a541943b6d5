import { useCallback, useMemo } from "react";
import { taskPage } from "../api/paths";
import type { Count, SecondOpinion, SetSummary } from "../api/types";
import { MetricChart } from "../charts/MetricChart";
import { paletteColor, type Series } from "../charts/series";
import { formatPercent } from "../format";
import { Link, navigate } from "../router";
import { narrowed } from "../sets";
import { Empty, IntervalBar, Outcome, Panel } from "../ui/parts";
import { useMore } from "../ui/table";
import { FirstClicks } from "./FirstClicks";
import { CountBars } from "./TaskPage";

const UNIT: [number, number] = [0, 1.02];
const percent = (value: number) => formatPercent(value);

export const VERDICTS: Record<string, string> = { success: "Successes", failure: "Failures", fault: "Faults", open: "Not finished" };

type Props = { summary: SetSummary; set: URLSearchParams };

/** A set of rollouts, counted; every bar, point and row leads to the smaller set that it stands for. */
export function SetFigures({ summary, set }: Props) {
  if (summary.num_rollouts === 0) return <Empty title="No rollout"><p>No rollout of these runs matches; remove a part of the filter.</p></Empty>;
  // a rollout may have several of these, of which the address names one
  const other = (name: string, value: string) => (set.has(name) && set.get(name) !== value ? undefined : narrowed(set, { [name]: value }));
  const parts: readonly { title: string; counts: readonly Count[]; to: (name: string) => string | undefined; labels?: Record<string, string> }[] = [
    { title: "Verdicts", counts: summary.verdicts, to: (verdict) => narrowed(set, { verdict }), labels: VERDICTS },
    { title: "Why they failed", counts: summary.causes, to: (cause) => narrowed(set, { verdict: "failure", cause }) },
    { title: "How they ended", counts: summary.stops, to: (stop_reason) => narrowed(set, { stop_reason }) },
    { title: "Turns with unparseable responses", counts: summary.turn_failures, to: (kind) => other("failure_kind", kind) },
    { title: "Tags", counts: summary.tags, to: (tag) => other("tag", tag), labels: Object.fromEntries(summary.tags.map((one) => [one.name, one.name])) },
    { title: "Categories", counts: summary.categories, to: (category) => narrowed(set, { category }) },
    { title: `Infrastructure faults${summary.num_faults > summary.faults.length ? `, the ${summary.faults.length} most frequent of ${summary.num_faults}` : ""}`, counts: summary.faults, to: (fault) => narrowed(set, { fault }) },
  ];
  const isSame = (one: SecondOpinion) => one.recorded === (one.success ? "success" : "failure");
  const opinions: readonly { title: string; found: readonly SecondOpinion[]; says: string; to: (one: SecondOpinion) => string }[] = [
    { title: "Validator and judge", found: summary.judgements, says: "judge", to: (one) => narrowed(set, { verdict: one.recorded, judge: isSame(one) ? "agrees" : "disagrees" }) },
    { title: "Validator and people", found: summary.reviews, says: "reviewed", to: (one) => narrowed(set, { verdict: one.recorded, review: isSame(one) ? "confirmed" : "overturned" }) },
  ];
  return (
    <>
      <Steps summary={summary} set={set} />
      <div className="columns">
        {parts.filter((part) => part.counts.length > 0).map((part) => (
          <Panel key={part.title} title={part.title}><CountBars counts={part.counts.map((one) => ({ ...one, label: part.labels?.[one.name], to: part.to(one.name) }))} /></Panel>
        ))}
        {opinions.filter((part) => part.found.length > 0).map((part) => (
          <Panel key={part.title} title={part.title}>
            <CountBars counts={part.found.map((one) => ({ name: `${one.recorded} ${String(one.success)}`, count: one.count, label: `recorded ${one.recorded}, ${part.says} ${one.success ? "success" : "failure"}`, to: part.to(one) }))} />
          </Panel>
        ))}
      </div>
      <FirstClicks set={set} />
      <Tasks summary={summary} set={set} />
      <Checks summary={summary} set={set} />
    </>
  );
}

/** Success and causes of failures over the steps; nothing if all rollouts are of one. */
function Steps({ summary, set }: Props) {
  const { steps } = summary;
  const success = useMemo<Series[]>(() => {
    const of = (isStep: boolean) => steps.filter((one) => (one.phase === "step") === isStep && one.num_rollouts > 0).map((one) => ({ x: one.step, y: one.num_successes / one.num_rollouts }));
    const series: Series[] = [
      { label: "training rollouts", color: "--accent", points: of(true) },
      { label: "held-out tasks", color: "--good", points: of(false), dots: true },
    ];
    return series.filter((one) => one.points.length > 0);
  }, [steps]);
  const causes = useMemo<Series[]>(() => {
    const trained = steps.filter((one) => one.phase === "step");
    const names = [...new Set(trained.flatMap((one) => Object.keys(one.causes)))].sort();
    return names.map((name, index) => ({ label: name.replaceAll("_", " "), id: name, color: paletteColor(index), points: trained.map((one) => ({ x: one.step, y: one.causes[name] ?? 0 })) }));
  }, [steps]);
  const open = useCallback(
    (x: number, series: Series) => {
      const found = steps.find((one) => one.step === x && (one.phase === "step") === !series.dots);
      if (found) navigate(narrowed(set, { phase: found.phase, step: String(x), ...(series.id ? { verdict: "failure", cause: series.id } : {}) }));
    },
    [steps, set],
  );
  if (steps.length < 2) return null;
  return (
    <div className="columns">
      {success.length > 0 && <div className="panel chart-panel"><MetricChart title="Success by step" hint="share of the set's rollouts that reached the goal; a point leads to its rollouts" series={success} format={percent} yRange={UNIT} onPick={open} /></div>}
      {causes.length > 0 && <div className="panel chart-panel"><MetricChart title="Failures by cause" hint="in training steps; a point leads to its rollouts" series={causes} onPick={open} /></div>}
    </div>
  );
}

function Tasks({ summary, set }: Props) {
  const { shown, more } = useMore(summary.tasks, 50);
  if (summary.num_tasks === 0) return null;
  const only = summary.runs.length === 1 ? summary.runs[0] : undefined;
  return (
    <Panel title={<>Tasks <span className="faint">{summary.num_tasks > summary.tasks.length ? `the ${summary.tasks.length} with the most failures of ${summary.num_tasks}` : summary.num_tasks}</span></>} flush>
      <div className="table-scroll">
        <table className="data">
          <thead><tr><th>Task</th><th>Success, 95 % interval</th><th className="right">Rate</th><th className="right">Failures</th><th className="right">Rollouts</th></tr></thead>
          <tbody>
            {shown.map((task) => (
              <tr key={task.task_id}>
                <td className="wrap">{only ? <Link className="text-link" data-row to={taskPage(only.run_id, task.task_id)}>{task.task_id}</Link> : task.task_id}</td>
                <td className="interval-cell">{task.success.rate !== null && <IntervalBar value={task.success.rate} low={task.success.low} high={task.success.high} />}</td>
                <td className="right"><b>{formatPercent(task.success.rate)}</b></td>
                <td className="right"><Link className="text-link" to={narrowed(set, { task_id: task.task_id, verdict: "failure" })}>{(task.success.num_rollouts - task.success.num_successes).toLocaleString("en-US")}</Link></td>
                <td className="right"><Link className="text-link" to={narrowed(set, { task_id: task.task_id })}>{task.num_rollouts.toLocaleString("en-US")}</Link></td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {more}
    </Panel>
  );
}

/** What validators expected and what they read, the most frequent pairs first. */
function Checks({ summary, set }: Props) {
  const { shown, more } = useMore(summary.checks, 20);
  if (summary.checks.length === 0) return null;
  return (
    <Panel title={<>What validators expected and read <span className="faint">{summary.num_checks > summary.checks.length ? `the ${summary.checks.length} most frequent of ${summary.num_checks}` : ""}</span></>} flush>
      <div className="table-scroll">
        <table className="data">
          <thead><tr><th>Check</th><th>Expected</th><th>Read</th><th>Verdict</th><th className="right">Rollouts</th></tr></thead>
          <tbody>
            {shown.map((one) => (
              <tr key={JSON.stringify([one.query, one.expected, one.actual, one.success])}>
                <td className="wrap dim">{one.query}</td>
                <td className="wrap mono"><div className="clamp-2">{one.expected}</div></td>
                <td className="wrap mono"><div className="clamp-2">{one.actual}</div></td>
                <td><Outcome success={one.success} /></td>
                <td className="right"><Link className="text-link" to={narrowed(set, { check: one.query, expected: one.expected, actual: one.actual, verdict: one.success ? "success" : "failure" })}>{one.count.toLocaleString("en-US")}</Link></td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {more}
    </Panel>
  );
}

