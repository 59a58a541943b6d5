import { useMemo } from "react";
import { useKept, useQuery } from "../api/cache";
import { comparePage, comparePath, heldOutPage, metricsPath, runPage, setPage, settingsPath, sourceName, sourcePage, type Filters } from "../api/paths";
import type { ConfigRow, MetricSeries, RunComparison, RunSummary } from "../api/types";
import { formatOf, type ChartUnit } from "../charts/catalog";
import { ChartControls, useChartView, type ChartView } from "../charts/controls";
import { MetricChart } from "../charts/MetricChart";
import { ParallelSettings } from "../charts/ParallelSettings";
import { PALETTE, paletteColor, type Series } from "../charts/series";
import { afterStep, moved, placesOf } from "../charts/xUnits";
import { formatPercent } from "../format";
import { Link, navigate, useSearchParam } from "../router";
import { nameOf, runLabels } from "../runs";
import { Icon } from "../ui/icons";
import { Empty, Loaded, PageHead, Panel } from "../ui/parts";
import { AddRun } from "../ui/runChoices";
import { ConfigTable } from "./RunConfig";
import { axisOf, CurveNote, points } from "./RunCharts";
import { SetDifference } from "./SetDifference";

const MAX_RUNS = PALETTE.length; // a colour for each
const MAX_ASKED = 12; // by the API, at once
const UNIT: [number, number] = [0, 1.02];
const [TRAINED, HELD_OUT] = ["Success in training", "Success on held-out tasks"] as const;
const CHARTS: readonly (ChartUnit & { name: string; title: string })[] = [
  { name: "reward/mean", title: "Reward" },
  { name: "policy/entropy", title: "Entropy" },
  { name: "policy/entropy_estimate", title: "Entropy estimate" },
  { name: "loss/total", title: "Loss" },
  { name: "policy/parity_mean_abs", title: "Parity" },
  { name: "policy/kl_sampling_training/mean", title: "KL sampler to trainer" },
  { name: "optim/grad_norm", title: "Gradient norm" },
  { name: "reward/constant_group_frac", title: "Constant groups", percent: true },
  { name: "rollout/num_turns/mean", title: "Turns per rollout" },
  { name: "time/step_s", title: "Step time", seconds: true },
  { name: "time/rollouts_per_hour", title: "Rollouts per hour" },
];

/** Several runs on shared axes, and what was set differently. */
export function ComparePage() {
  const [runsText] = useSearchParam("runs");
  const [first] = useSearchParam("first");
  const [second] = useSearchParam("second");
  const [find, setFind] = useSearchParam("find");
  const asked = useMemo(() => [...new Set(runsText.split(",").filter(Boolean))], [runsText]);
  const ids = asked.slice(0, MAX_RUNS);
  const comparison = useQuery<RunComparison>(asked.length > 0 ? comparePath(asked.slice(0, MAX_ASKED)) : null);
  const add = <AddRun taken={ids} most={MAX_RUNS} onAdd={(runId) => navigate(comparePage([...ids, runId]), { replace: true })} />;
  return (
    <>
      <PageHead crumbs={[{ label: "Runs", to: "/" }, { label: "Compare" }]} title="Compare runs" actions={add} />
      {first && second ? (
        <SetDifference first={first} second={second} />
      ) : ids.length === 0 ? (
        <>
          <Empty title="No run selected"><p>Add runs above, or tick them in the list of runs. “Compare…” on the page of any rollouts compares two sets.</p></Empty>
          <AllSettings />
        </>
      ) : (
        <Loaded query={comparison}>
          {(found) => <Comparison found={found} numAsked={asked.length} find={find} setFind={setFind} />}
        </Loaded>
      )}
    </>
  );
}

/** What was tried in the runs whose names fit, as many as one chart holds. */
function AllSettings() {
  const [search, setSearch] = useSearchParam("q");
  const query = useKept(useQuery<RunComparison>(settingsPath({ search })));
  return (
    <>
      <div className="row"><input className="field" type="search" aria-label="Search runs" placeholder="Search name, model, folder" value={search} onChange={(event) => setSearch(event.target.value)} /></div>
      <Loaded query={query} height={360}>{(found) => <ParallelSettings runs={found.runs} rows={found.config} />}</Loaded>
    </>
  );
}

/** The first runs, as many as there are colours; those that do not fit are named. */
function Comparison(props: { found: RunComparison; numAsked: number; find: string; setFind: (text: string) => void }) {
  const { found, numAsked, find, setFind } = props;
  const runs = found.runs.slice(0, MAX_RUNS);
  const labels = useMemo(() => runLabels(found.runs), [found.runs]);
  const left = found.runs.slice(MAX_RUNS).map((run) => labels.get(run.run_id));
  const unnamed = numAsked - found.runs.length - found.unknown.length;
  const rows = found.config.map((row) => {
    const values = row.values.slice(0, MAX_RUNS);
    return { ...row, values, is_different: new Set(values.map((value) => JSON.stringify(value))).size > 1 };
  });
  return (
    <>
      {found.unknown.length > 0 && (
        <div className="notice warn" role="status"><b>There is no run {found.unknown.join(", ")}.</b> It may be in a folder that this monitor does not show.</div>
      )}
      {numAsked - found.unknown.length > runs.length && (
        <div className="notice warn" role="status">
          <b>{runs.length} of {numAsked - found.unknown.length} runs are shown.</b> Left out: {left.join(", ")}{unnamed > 0 ? ` and ${unnamed} more` : ""}. Remove one to make room.
        </div>
      )}
      <RunChips runs={runs} labels={labels} />
      {runs.map((run) => <CurveNote key={run.run_id} of={labels.get(run.run_id)} ends={run.curve_ends} />)}
      <ComparedCharts runs={runs} labels={labels} arms={armsOf(runs, rows)} />
      {runs.length > 1 && <ParallelSettings runs={runs} rows={rows} colorOf={paletteColor} />}
      <Panel
        title={runs.length > 1 ? "Settings that differ" : "Settings"}
        flush
        actions={<input className="field" type="search" aria-label="Find a setting" placeholder="Find a setting" value={find} onChange={(event) => setFind(event.target.value)} />}
      >
        <ConfigTable names={runs.map((run) => labels.get(run.run_id) ?? nameOf(run))} rows={rows} find={find} only={runs.length > 1} />
      </Panel>
    </>
  );
}

type Labelled = { runs: readonly RunSummary[]; labels: ReadonlyMap<string, string> };

function RunChips({ runs, labels }: Labelled) {
  const [asked] = useSearchParam("runs");
  const ids = [...new Set(asked.split(",").filter(Boolean))];
  return (
    <ul className="row wrap">
      {runs.map((run, index) => (
        <li key={run.run_id} className="run-chip">
          <i style={{ background: paletteColor(index) }} />
          <Link to={runPage(run.run_id)} title={run.run_name}>{labels.get(run.run_id)}</Link>
          <Link className="faint num" to={run.last_eval || run.success_step === null ? heldOutPage(run) : setPage({ run_id: run.run_id, phase: "step", step: run.success_step })}>{formatPercent((run.last_eval ?? (run.success_step === null ? run.baseline : null))?.rate ?? run.success_rate)}</Link>
          <button type="button" className="button quiet icon small" aria-label={`Remove ${labels.get(run.run_id)}`} onClick={() => navigate(comparePage(ids.filter((id) => id !== run.run_id)), { replace: true })}>
            <Icon name="close" size={12} />
          </button>
        </li>
      ))}
    </ul>
  );
}

/** Settings in which runs of one arm differ: they are the same experiment, repeated. */
const REPEATED = /(^|\.)(seed|run_name|log_path|port|wandb_name|wandb_project)$/;

/** Runs that differ in nothing but seeds and places, in the order of the first of each. */
function armsOf(runs: readonly RunSummary[], rows: readonly ConfigRow[]): string[][] {
  const arms = new Map<string, string[]>();
  const told = rows.filter((row) => row.is_different && !REPEATED.test(row.key));
  runs.forEach((run, index) => {
    const key = JSON.stringify(told.map((row) => row.values[index]));
    arms.set(key, [...(arms.get(key) ?? []), run.run_id]);
  });
  return arms.size === 1 && runs.length > 1 ? runs.map((run) => [run.run_id]) : [...arms.values()];
}

/** The arms at a moment that all of their runs have: the latest evaluation, or the training steps up to it. */
function ArmDifference({ arms, loaded, labels }: { arms: readonly string[][]; loaded: readonly LoadedRun[]; labels: ReadonlyMap<string, string> }) {
  const [at, setAt] = useSearchParam("at");
  const [other, setOther] = useSearchParam("with", "1");
  const theirs = arms[Number(other)] ?? arms[1];
  const ours = arms[0];
  if (!ours || !theirs) return null;
  const of = loaded.filter((one) => [...ours, ...theirs].includes(one.id));
  const shared = (of[0]?.metrics.evaluations ?? []).filter((one) => of.every(({ metrics }) => metrics.evaluations.some((two) => two.phase === one.phase && two.step === one.step)));
  const last = Math.min(...of.map(({ metrics }) => metrics.success.at(-1)?.step ?? 0));
  const moments = shared.map((one) => ({ value: `${one.phase} ${one.step}`, label: sourceName(one.phase, one.step), set: { phase: one.phase, step: one.step } as Filters }));
  if (last > 0) moments.unshift({ value: "training", label: `Training steps 1 to ${last}`, set: { phase: "step", max_step: last } });
  const chosen = moments.find((one) => one.value === at) ?? moments.at(-1);
  if (!chosen) return null;
  const queryOf = (runIds: readonly string[]) => setPage({ run_id: runIds, ...chosen.set }).split("?")[1] ?? "";
  const nameOf = (runIds: readonly string[]) => runIds.map((id) => labels.get(id)).join(" + ");
  return (
    <>
      <div className="row wrap">
        <label className="row">At <select className="field" value={chosen.value} onChange={(event) => setAt(event.target.value)}>{moments.map((one) => <option key={one.value} value={one.value}>{one.label}</option>)}</select></label>
        {arms.length > 2 && <label className="row">{nameOf(ours)} with <select className="field" value={arms.indexOf(theirs)} onChange={(event) => setOther(event.target.value)}>{arms.slice(1).map((arm, index) => <option key={arm.join()} value={index + 1}>{nameOf(arm)}</option>)}</select></label>}
      </div>
      <SetDifference first={queryOf(ours)} second={queryOf(theirs)} />
    </>
  );
}

function ComparedCharts({ runs, labels, arms }: Labelled & { arms: readonly string[][] }) {
  const view = useChartView();
  const slots = Array.from({ length: MAX_RUNS }, (_, index) => runs[index]);
  // one hook per place, in the same order at every render
  const queries = slots.map((run) => useQuery<MetricSeries>(run ? metricsPath(run.run_id) : null));
  const all = queries.map((query) => query.data);
  const waiting = queries.some((query, index) => runs[index] && !query.data && !query.error);
  const loaded = runs.flatMap((run, index) => {
    const metrics = all[index];
    return metrics ? [{ metrics, color: paletteColor(index), id: run.run_id, breaks: run.curve_ends.map(afterStep), places: placesOf(metrics, run.started_at, view.unit), label: labels.get(run.run_id) ?? nameOf(run) }] : [];
  });
  const key = all.map((metrics, index) => `${runs[index]?.run_id}:${metrics?.steps.length}:${metrics?.evaluations.length}`).join();
  const success = useMemo(
    () => loaded.map(({ metrics, places, ...one }): Series => moved({ ...one, points: points(metrics.success) }, places)),
    [key, labels, view.unit],
  );
  const evals = useMemo(
    () => loaded.map(({ metrics, places, ...one }): Series => moved({ ...one, points: points(metrics.evaluations), dots: true }, places)),
    [key, labels, view.unit],
  );
  const open = (x: number, series: Series, phase: string) => series.id && navigate(sourcePage(series.id, phase, x));
  const drawn = CHARTS.filter((chart) => loaded.some(({ metrics }) => metrics.series[chart.name]));
  if (waiting) return <div className="skeleton" role="status" aria-label="Loading" style={{ height: 420 }} />;
  return (
    <>
      <ArmDifference arms={arms} loaded={loaded} labels={labels} />
      <ChartControls view={view} charts={[TRAINED, HELD_OUT, ...drawn.map((chart) => chart.title)]} />
      <div className="chart-grid two">
        {view.shows(TRAINED) && <Chart title={TRAINED} series={success} view={view} unit={{ percent: true }} isShare pick={(x, series) => open(x, series, "step")} />}
        {view.shows(HELD_OUT) && <Chart title={HELD_OUT} series={evals} view={view} unit={{ percent: true }} isShare pick={(x, series) => open(x, series, loaded.find((one) => one.id === series.id)?.metrics.evaluations.find((one) => one.step === x)?.phase ?? "eval")} />}
      </div>
      <div className="chart-grid">
        {drawn.filter((chart) => view.shows(chart.title)).map((chart) => (
          <MetricOfRuns key={chart.name} chart={chart} loaded={loaded} stamp={key} view={view} pick={(x, series) => open(x, series, "step")} />
        ))}
      </div>
    </>
  );
}

type LoadedRun = { id: string; label: string; metrics: MetricSeries; color: string; breaks: readonly number[]; places: ((step: number) => number) | null };

function MetricOfRuns(props: { chart: (typeof CHARTS)[number]; loaded: LoadedRun[]; stamp: string; view: ChartView; pick: (x: number, series: Series) => void }) {
  const { chart, loaded, stamp } = props;
  const series = useMemo(
    () =>
      loaded.map(({ metrics, places, ...one }): Series => moved({
        ...one,
        points: metrics.series[chart.name] ? metrics.steps.map((step, row) => ({ x: step, y: metrics.series[chart.name]?.[row] ?? null })) : [],
      }, places)),
    [chart.name, stamp, props.view.unit],
  );
  return <Chart title={chart.title} hint={chart.name} series={series} view={props.view} unit={chart} pick={props.pick} />;
}

function Chart(props: { title: string; hint?: string; series: Series[]; view: ChartView; unit: ChartUnit; isShare?: boolean; pick: (x: number, series: Series) => void }) {
  const { view } = props;
  return (
    <div className="panel chart-panel">
      <MetricChart
        title={props.title}
        hint={props.hint}
        series={props.series}
        smoothing={view.smoothing}
        log={view.log}
        range={view.range}
        onRange={view.setRange}
        onPick={props.pick}
        format={formatOf(props.unit)}
        yRange={props.isShare ? UNIT : undefined}
        {...axisOf(view)}
      />
    </div>
  );
}
