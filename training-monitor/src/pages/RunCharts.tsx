import { useCallback, useMemo } from "react";
import { useQuery } from "../api/cache";
import { metricsPath, sourcePage } from "../api/paths";
import type { MetricSeries, Run, SuccessPoint } from "../api/types";
import { formatOf, metricsOf, otherCharts, SECTIONS, shortName, type ChartSection, type ChartSpec } from "../charts/catalog";
import { ChartControls, useChartView, type ChartView } from "../charts/controls";
import { MetricChart } from "../charts/MetricChart";
import { paletteColor, type Series } from "../charts/series";
import { afterStep, moved, placesOf, X_UNITS } from "../charts/xUnits";
import { formatPercent } from "../format";
import { navigate } from "../router";
import { Empty, Loaded } from "../ui/parts";

const UNIT: [number, number] = [0, 1.02];
const percent = (value: number) => formatPercent(value);

export function RunCharts({ run }: { run: Run }) {
  const query = useQuery<MetricSeries>(metricsPath(run.run_id));
  const view = useChartView();
  const names = Object.keys(query.data?.series ?? {}).join("\n"); // the same text for the same charts
  const titles = useMemo(() => ["Success", ...sectionsOf(new Set(names.split("\n").filter(Boolean))).flatMap((section) => section.charts.map((chart) => chart.title))], [names]);
  return (
    <>
      <ChartControls view={view} charts={titles} />
      <Loaded query={query} height={420}>
        {(metrics) =>
          metrics.steps.length === 0 && metrics.evaluations.length === 0 ? (
            <Empty title={run.is_alive ? "No metrics yet" : "No metrics"}>
              <p>
                {run.is_alive
                  ? "The first figures appear here when the first step has ended. The Live tab shows the rollouts until then."
                  : "The run ended before its first step or evaluation was complete."}
              </p>
            </Empty>
          ) : (
            <>
              {metrics.num_steps > metrics.steps.length && <p className="faint chart-note">{metrics.steps.length.toLocaleString("en-US")} of {metrics.num_steps.toLocaleString("en-US")} steps are drawn, evenly chosen.</p>}
              <Sections run={run} metrics={metrics} view={view} />
            </>
          )
        }
      </Loaded>
    </>
  );
}

/** Why the lines are cut; nothing if the run never went on with other tasks or settings. */
export function CurveNote({ ends, of }: { ends: readonly number[]; of?: string | undefined }) {
  if (ends.length === 0) return null;
  return <p className="faint chart-note">{of && <><b>{of}</b>: </>}{of ? "r" : "R"}esumed with other settings after step {ends.join(" and ")}: what is right of a dashed line does not compare with what is left of it.</p>;
}

/** The charts that may have something to show, below their headings. */
function sectionsOf(known: ReadonlySet<string>): ChartSection[] {
  const all = [...SECTIONS, { title: "Other metrics", charts: otherCharts(known) }];
  return all.map((section) => ({ ...section, charts: section.charts.filter((chart) => metricsOf(chart, known).length > 0) }));
}

/** How the axis below a chart is written. */
export function axisOf({ unit }: ChartView) {
  return { xLabel: unit, xFormat: X_UNITS[unit].format, xIncrs: X_UNITS[unit].incrs };
}

export function points(all: readonly SuccessPoint[]): Series["points"] {
  return all.map((one) => ({ x: one.step, y: one.rate, low: one.low, high: one.high, count: one.num_independent }));
}

function Sections({ run, metrics, view }: { run: Run; metrics: MetricSeries; view: ChartView }) {
  const known = useMemo(() => new Set(Object.keys(metrics.series)), [metrics]);
  const meanings = useMemo(() => new Map(run.metrics.map((one) => [one.name, one.meaning])), [run.metrics]);
  const places = useMemo(() => placesOf(metrics, run.started_at, view.unit), [metrics, run.started_at, view.unit]);
  const running = run.is_alive ? run.running_step : null;
  const success = useMemo<Series[]>(() => {
    const series: Series[] = [
      { label: "training rollouts", color: "--accent", points: points(metrics.success), breaks: run.curve_ends.map(afterStep) },
      { label: "held-out tasks", color: "--good", points: points(metrics.evaluations), dots: true },
    ];
    if (running?.success.num_rollouts) {
      const { step, num_ended_groups, num_groups, success: so_far } = running;
      const label = `step ${step} under way, ${num_ended_groups} of ${num_groups} groups`;
      series.push({ label, color: "--accent", dots: true, hollow: true, points: [{ x: step, y: so_far.rate, low: so_far.low, high: so_far.high }] });
    }
    return series.map((one) => moved(one, places));
  }, [metrics, running, run.curve_ends.join(), places]);
  const open = useCallback(
    (x: number, series: Series) => {
      if (!series.dots || series.hollow) return navigate(sourcePage(run.run_id, "step", x));
      const phase = metrics.evaluations.find((one) => one.step === x)?.phase ?? "eval";
      navigate(sourcePage(run.run_id, phase, x));
    },
    [run.run_id, metrics],
  );
  return (
    <>
      {places === null && <p className="faint chart-note">This run did not record what would be below its charts.</p>}
      {view.shows("Success") && <div className="panel chart-panel">
        <MetricChart
          title="Success"
          hint="Share of rollouts that reached the goal, in finished steps, with the 95 % interval of what the line shows. A ring is the step under way: short rollouts end first"
          series={success}
          format={percent}
          yRange={UNIT}
          height={260}
          smoothing={view.smoothing}
          log={view.log}
          range={view.range}
          onRange={view.setRange}
          onPick={open}
          {...axisOf(view)}
        />
        <CurveNote ends={run.curve_ends} />
      </div>}
      {sectionsOf(known).map((section) => {
        const charts = section.charts.filter((chart) => view.shows(chart.title) && metricsOf(chart, known).some((name) => metrics.series[name]?.some((value) => value !== null)));
        if (charts.length === 0) return null;
        return (
          <section key={section.title} className="chart-section">
            <h2>{section.title}</h2>
            <div className="chart-grid">
              {charts.map((chart) => (
                <SpecChart key={chart.title} chart={chart} metrics={metrics} known={known} meanings={meanings} view={view} open={open} breaks={run.curve_ends} places={places} />
              ))}
            </div>
          </section>
        );
      })}
    </>
  );
}

function SpecChart(props: {
  chart: ChartSpec;
  metrics: MetricSeries;
  known: ReadonlySet<string>;
  meanings: ReadonlyMap<string, string | null>;
  view: ChartView;
  open: (x: number, series: Series) => void;
  breaks: readonly number[];
  places: ((step: number) => number) | null;
}) {
  const { chart, metrics, known, meanings, view } = props;
  const names = useMemo(() => metricsOf(chart, known), [chart, known]);
  const series = useMemo<Series[]>(
    () =>
      names.map((name, index) => moved({
        label: shortName(name, names),
        color: paletteColor(index),
        points: metrics.steps.map((step, row) => ({ x: step, y: metrics.series[name]?.[row] ?? null })),
        breaks: props.breaks.map(afterStep),
      }, props.places)),
    [names, metrics, props.breaks.join(), props.places],
  );
  const hint = names.map((name) => `${name}: ${meanings.get(name) ?? "no description"}`).join("\n");
  return (
    <div className="panel chart-panel">
      <MetricChart
        title={chart.title}
        hint={hint}
        series={series}
        smoothing={view.smoothing}
        log={view.log}
        range={view.range}
        onRange={view.setRange}
        onPick={props.open}
        format={formatOf(chart)}
        {...axisOf(view)}
      />
    </div>
  );
}
