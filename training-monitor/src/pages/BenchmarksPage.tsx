import { useQuery } from "../api/cache";
import { benchmarksPath } from "../api/paths";
import { formatNumber, formatPercent, formatTime, plural, words } from "../format";
import { Empty, FaultBoundsNote, IntervalBar, Loaded, LostNote, PageHead, Panel } from "../ui/parts";

type Benchmark = { name: string; title: string | null; path: string; written_at: string; results: Record<string, unknown> };

type ModelResult = {
  name: string;
  success_rate: number;
  low: number;
  high: number;
  pass_at?: Record<string, number>;
  num_short_tasks?: Record<string, number>;
  worst?: number;
  best?: number;
  num_tasks?: number;
  num_rollouts: number;
  num_successes?: number;
  num_faults?: number;
  num_turns_mean?: number;
  success_rate_by_category?: Record<string, number>;
};

type Pair = { first: string; second: string; num_tasks: number; difference: number; low: number; high: number; p_value: number; test?: string };

/** Evaluations of models on a task set, as the evaluation recipe wrote them. */
export function BenchmarksPage() {
  const query = useQuery<{ benchmarks: Benchmark[]; num_others: number }>(benchmarksPath);
  return (
    <>
      <PageHead title="Benchmarks" note="Models on the same held-out tasks, with 95 % intervals" />
      <Loaded query={query}>
        {({ benchmarks, num_others }) =>
          benchmarks.length === 0 && num_others === 0 ? (
            <Empty title="No benchmark yet">
              <p>Compare a trained adapter with its base model; the monitor finds results.json below its runs folder.</p>
              <pre>python -m cua_rl.recipes.evaluate log_path=runs/benchmark</pre>
            </Empty>
          ) : (
            <div className="stack">
              {benchmarks.map((one) => <BenchmarkPanel key={one.path} benchmark={one} />)}
              {num_others > 0 && <p className="dim">{plural(num_others, "further file")} of results {num_others === 1 ? "is" : "are"} older, too large or not readable.</p>}
            </div>
          )
        }
      </Loaded>
    </>
  );
}

function list<T>(value: unknown): T[] {
  return Array.isArray(value) ? (value as T[]) : [];
}

/** pass@k, or why it is left out: over the other tasks alone, it would be about easier or harder ones. */
function PassAt({ model, k }: { model: ModelResult; k: string }) {
  const [rate, short] = [model.pass_at?.[k], model.num_short_tasks?.[k]];
  if (rate !== undefined || !short) return <>{formatPercent(rate, 1)}</>;
  return <>–<div className="warn reason">fewer than {k} attempts at {plural(short, "task")}, for faults</div></>;
}

function RateNotes({ model }: { model: ModelResult }) {
  const { num_faults, worst, best } = model;
  return (
    <>
      {num_faults && worst !== undefined && best !== undefined ? <div><FaultBoundsNote bounds={{ num_faults, worst, best }} /></div> : null}
      <div><LostNote rate={{ num_lost_tasks: model.num_short_tasks?.["1"] ?? 0 }} /></div>
    </>
  );
}

function BenchmarkPanel({ benchmark }: { benchmark: Benchmark }) {
  const models = list<ModelResult>(benchmark.results["models"]);
  const pairs = list<Pair>(benchmark.results["pairs"]);
  const attempts = [...new Set(models.flatMap((model) => [...Object.keys(model.pass_at ?? {}), ...Object.keys(model.num_short_tasks ?? {}).filter((k) => k !== "1")]))].sort((a, b) => Number(a) - Number(b));
  const categories = [...new Set(models.flatMap((model) => Object.keys(model.success_rate_by_category ?? {})))].sort();
  return (
    <Panel title={benchmark.title ?? benchmark.name} flush actions={<span className="faint">{formatTime(benchmark.written_at)} · <span className="mono">{benchmark.path}</span></span>}>
      <div className="table-scroll">
        <table className="data">
          <thead>
            <tr>
              <th>Model</th>
              <th>Success, 95 % interval</th>
              <th className="right">Rate</th>
              {attempts.map((k) => <th key={k} className="right">pass@{k}</th>)}
              {categories.map((name) => <th key={name} className="right">{words(name)}</th>)}
              <th className="right">Turns</th>
              <th className="right">Rollouts</th>
              <th className="right">Faults</th>
            </tr>
          </thead>
          <tbody>
            {models.map((model) => (
              <tr key={model.name}>
                <td><b>{model.name}</b></td>
                <td className="interval-cell"><IntervalBar value={model.success_rate} low={model.low} high={model.high} /></td>
                <td className="right"><b>{formatPercent(model.success_rate, 1)}</b> <span className="faint">{formatPercent(model.low)} to {formatPercent(model.high)}</span><RateNotes model={model} /></td>
                {attempts.map((k) => <td key={k} className="right"><PassAt model={model} k={k} /></td>)}
                {categories.map((name) => <td key={name} className="right">{formatPercent(model.success_rate_by_category?.[name])}</td>)}
                <td className="right">{formatNumber(model.num_turns_mean, 3)}</td>
                <td className="right">{model.num_rollouts}</td>
                <td className={`right ${model.num_faults ? "warn" : "faint"}`}>{model.num_faults ?? 0}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {pairs.length > 0 && (
        <ul className="pairs panel-body">
          {pairs.map((pair) => (
            <li key={`${pair.first}-${pair.second}`}>
              <b>{pair.second}</b> against <b>{pair.first}</b>:{" "}
              <span className={pair.low > 0 ? "good" : pair.high < 0 ? "bad" : "dim"}>
                {pair.difference > 0 ? "+" : ""}{formatNumber(pair.difference * 100, 3)} points
              </span>{" "}
              <span className="faint num">({formatNumber(pair.low * 100, 3)} to {formatNumber(pair.high * 100, 3)}, p = {formatNumber(pair.p_value, 2)}{pair.test ? `, ${pair.test}` : ""}, {pair.num_tasks} tasks)</span>
            </li>
          ))}
        </ul>
      )}
    </Panel>
  );
}
