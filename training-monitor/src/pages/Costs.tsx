import { useCallback, useMemo, type ReactNode } from "react";
import { useQuery, useRefresh } from "../api/cache";
import { runCostPath, setCostPath, setPage, sourceName } from "../api/paths";
import type { Cost, Run, RunCost, SetCost } from "../api/types";
import { MetricChart } from "../charts/MetricChart";
import type { Series } from "../charts/series";
import { formatDollars, formatDuration, formatNumber, formatPercent } from "../format";
import { Link, navigate } from "../router";
import { narrowed } from "../sets";
import { Empty, Loaded, Panel, Stat } from "../ui/parts";
import { useMore } from "../ui/table";

const UNIT: [number, number] = [0, 1.02];
const percent = (value: number) => formatPercent(value);

type Amount = {
  label: string;
  hint: string;
  of: (cost: Cost) => number | null;
  format: (value: number | null) => string;
  /** The parts of its money. */
  usd: readonly string[];
};

const AMOUNTS: readonly Amount[] = [
  { label: "GPU time", hint: "of the run's GPUs while its steps and evaluations were in progress, shared in proportion to the time of requests to the model", of: (cost) => cost.gpu_s, format: formatDuration, usd: ["gpu"] },
  { label: "Device time", hint: "time for which rollouts had their devices", of: (cost) => cost.device_s, format: formatDuration, usd: ["device"] },
  { label: "Requests", hint: "duration of all requests to the model server, many of which overlap", of: (cost) => cost.sampling_s, format: formatDuration, usd: [] },
  { label: "Prompt tokens", hint: "images included; in brackets those that were found in the prefix cache", of: (cost) => cost.prompt_tokens, format: formatNumber, usd: ["prompt", "cached"] },
  { label: "Sampled tokens", hint: "that the model wrote", of: (cost) => cost.sampled_tokens, format: formatNumber, usd: ["sampled"] },
  { label: "Trained tokens", hint: "sampled tokens that were trained on", of: (cost) => cost.trained_tokens, format: formatNumber, usd: ["trained"] },
  { label: "Judge's tokens", hint: "prompts and answers", of: (cost) => cost.judge_prompt_tokens + cost.judge_answer_tokens, format: formatNumber, usd: ["judge"] },
];

/** What a part of the money comes to; null if it has no price. */
function money(cost: Cost, parts: readonly string[]): number | null {
  const found = parts.flatMap((part) => cost.usd[part] ?? []);
  return found.length ? found.reduce((sum, one) => sum + one, 0) : null;
}

function CostStats({ cost, children }: { cost: Cost; children?: ReactNode }) {
  const priced = cost.total_usd !== null;
  const used = AMOUNTS.filter((amount) => amount.of(cost) || amount.label === "Sampled tokens");
  return (
    <>
      <dl className="stats">
        {priced && <Stat label="Cost" hint="of what has a price"><span data-testid="total-cost">{formatDollars(cost.total_usd)}</span>{cost.num_rollouts > 0 && <small>{formatDollars((cost.total_usd ?? 0) / cost.num_rollouts)} a rollout</small>}</Stat>}
        {used.map((amount) => (
          <Stat key={amount.label} label={amount.label} hint={amount.hint}>
            {amount.format(amount.of(cost))}
            {amount.label === "Prompt tokens" && cost.cached_tokens > 0 && <small>({formatPercent(cost.cached_tokens / Math.max(1, cost.prompt_tokens))} cached)</small>}
            {money(cost, amount.usd) !== null && <small>{formatDollars(money(cost, amount.usd))}</small>}
          </Stat>
        ))}
        {children}
      </dl>
      {!priced && <p className="faint chart-note">Amounts without prices: start the monitor with <span className="mono">prices=FILE</span>, or the run with <span className="mono">MONITOR_PRICES=FILE</span>, to see what they cost.</p>}
      {cost.num_unpriced_judgements > 0 && <p className="faint chart-note">{cost.num_unpriced_judgements.toLocaleString("en-US")} judgements have no recorded cost, and no price for their model.</p>}
      {cost.num_open > 0 && <p className="faint chart-note">{cost.num_open.toLocaleString("en-US")} rollouts still run, or were recorded without what they used; they count nothing yet.</p>}
    </>
  );
}

/** One row for each task, step or checkpoint, with what it used. */
function CostTable<Row>(props: { first: string; rows: readonly Row[]; size: number; costOf: (row: Row) => Cost; name: (row: Row) => ReactNode; keyOf: (row: Row) => string; rollouts?: (row: Row) => string }) {
  const { rows, costOf } = props;
  const { shown, more } = useMore(rows, props.size);
  const amounts = AMOUNTS.filter((amount) => rows.some((row) => amount.of(costOf(row))));
  const priced = rows.some((row) => costOf(row).total_usd !== null);
  return (
    <>
      <div className="table-scroll">
        <table className="data">
          <thead>
            <tr>
              <th>{props.first}</th>
              <th className="right">Rollouts</th>
              {priced && <th className="right" title="of what has a price">Cost</th>}
              {amounts.map((amount) => <th key={amount.label} className="right" title={amount.hint}>{amount.label}</th>)}
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => {
              const cost = costOf(row);
              return (
                <tr key={props.keyOf(row)}>
                  <td className="wrap">{props.name(row)}</td>
                  <td className="right">{props.rollouts ? <Link className="text-link" to={props.rollouts(row)}>{cost.num_rollouts.toLocaleString("en-US")}</Link> : cost.num_rollouts.toLocaleString("en-US")}</td>
                  {priced && <td className="right"><b>{formatDollars(cost.total_usd)}</b></td>}
                  {amounts.map((amount) => <td key={amount.label} className="right">{amount.format(amount.of(cost))}</td>)}
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      {more}
    </>
  );
}

/** What a set of rollouts used; every row leads to the smaller set, and its number to those rollouts. */
export function SetCosts({ set }: { set: URLSearchParams }) {
  const query = useQuery<SetCost>(setCostPath(set));
  const place = (one: SetCost["steps"][number]) => ({ phase: one.phase, step: String(one.step) });
  return (
    <Loaded query={query} height={420}>
      {({ cost, tasks, num_tasks, steps, num_steps }) =>
        cost.num_rollouts === 0 ? (
          <Empty title="No rollout"><p>No rollout of these runs matches; remove a part of the filter.</p></Empty>
        ) : (
          <>
            <CostStats cost={cost} />
            <Panel title={<>Tasks <span className="faint">{num_tasks > tasks.length ? `the ${tasks.length} most expensive of ${num_tasks}` : num_tasks}</span></>} flush>
              <CostTable
                first="Task"
                rows={tasks}
                size={20}
                costOf={(one) => one.cost}
                keyOf={(one) => one.task_id}
                name={(one) => <Link className="text-link" data-row to={narrowed(set, { task_id: one.task_id, view: "cost" })}>{one.task_id}</Link>}
                rollouts={(one) => narrowed(set, { task_id: one.task_id })}
              />
            </Panel>
            <Panel title={<>Steps and evaluations <span className="faint">{num_steps > steps.length ? `${steps.length} of ${num_steps}` : num_steps}</span></>} flush>
              <CostTable
                first="Of"
                rows={steps}
                size={20}
                costOf={(one) => one.cost}
                keyOf={(one) => `${one.phase}-${one.step}`}
                name={(one) => <Link className="text-link" data-row to={narrowed(set, { ...place(one), view: "cost" })}>{sourceName(one.phase, one.step)}</Link>}
                rollouts={(one) => narrowed(set, place(one))}
              />
            </Panel>
          </>
        )
      }
    </Loaded>
  );
}

/** What a run used, in all and until each of its checkpoints, and the success that this bought. */
export function RunCosts({ run }: { run: Run }) {
  const query = useQuery<RunCost>(runCostPath(run.run_id));
  useRefresh(query.reload, run.is_alive);
  return <Loaded query={query} height={420}>{(found) => <RunCostView run={run} found={found} />}</Loaded>;
}

function RunCostView({ run, found }: { run: Run; found: RunCost }) {
  const { versions } = found;
  const set = (filter: Record<string, string | number>) => setPage({ run_id: run.run_id, view: "cost", ...filter });
  return (
    <>
      <Panel title="Training" actions={<Link className="button" to={set({ phase: "step" })}>By task and step</Link>}><CostStats cost={found.training} /></Panel>
      {found.evaluations.num_rollouts > 0 && <Panel title="Evaluations" actions={<Link className="button" to={setPage({ run_id: run.run_id, phase: ["baseline", "eval"], view: "cost" })}>By task and evaluation</Link>}><CostStats cost={found.evaluations} /></Panel>}
      <SuccessByCost run={run} found={found} />
      {versions.length > 0 && (
        <Panel title={<>What each policy took <span className="faint">steps until then, and evaluations of earlier policies</span></>} flush>
          <CostTable
            first="After"
            rows={[...versions].reverse()}
            size={50}
            costOf={(one) => one.cost}
            keyOf={(one) => String(one.step)}
            name={(one) => <>step {one.step} <span className="faint">{[one.is_checkpoint && "checkpoint", one.success?.rate != null && `held-out success ${formatPercent(one.success.rate, 1)}`].filter(Boolean).join(", ")}</span></>}
          />
        </Panel>
      )}
    </>
  );
}

/** Held-out success over what has been spent: money if there are prices, else GPU time, else sampled tokens. */
function SuccessByCost({ run, found }: { run: Run; found: RunCost }) {
  const { versions } = found;
  const last = versions.at(-1)?.cost;
  const amount = useMemo(
    () =>
      last?.total_usd
        ? { label: "US dollars", of: (cost: Cost) => cost.total_usd ?? 0, format: formatDollars }
        : last?.gpu_s
          ? { label: "GPU time", of: (cost: Cost) => cost.gpu_s ?? 0, format: formatDuration }
          : { label: "sampled tokens", of: (cost: Cost) => cost.sampled_tokens, format: (value: number) => formatNumber(value, 3) },
    [!!last?.total_usd, !!last?.gpu_s],
  );
  const series = useMemo<Series[]>(() => {
    const points = versions.flatMap(({ success, cost }) => (success?.rate == null ? [] : [{ x: amount.of(cost), y: success.rate, low: success.low, high: success.high }]));
    return [{ label: "held-out tasks", color: "--good", points, dots: true }];
  }, [versions, amount]);
  const open = useCallback(
    (x: number) => {
      const chosen = versions.find((one) => one.success !== null && amount.of(one.cost) === x);
      if (chosen) navigate(setPage({ run_id: run.run_id, phase: ["baseline", "eval"], step: chosen.step }));
    },
    [versions, amount, run.run_id],
  );
  if ((series[0]?.points.length ?? 0) < 2) return null;
  return (
    <div className="panel chart-panel">
      <MetricChart title={`Success by ${amount.label}`} hint="of evaluations, over what the run had used when the policy was made; a point leads to its rollouts" series={series} format={percent} yRange={UNIT} xLabel={amount.label} xFormat={amount.format} onPick={open} height={220} />
    </div>
  );
}

/** What one rollout used, as a line of facts. */
export function rolloutCost(one: { num_prompt_tokens: number | null; num_cached_tokens: number | null; num_sampled_tokens: number | null; num_trained_tokens: number | null; sampling_s: number | null; device_s: number | null }): string | null {
  if (one.num_sampled_tokens === null) return null;
  const trained = one.num_trained_tokens ? `, ${formatNumber(one.num_trained_tokens)} of them trained on` : "";
  const cached = one.num_cached_tokens ? `, ${formatNumber(one.num_cached_tokens)} of them cached` : "";
  const device = one.device_s === null ? "" : `; its device for ${formatDuration(one.device_s)}`;
  return `${formatNumber(one.num_prompt_tokens)} prompt tokens${cached}; ${formatNumber(one.num_sampled_tokens)} sampled${trained}; requests of ${formatDuration(one.sampling_s)}${device}`;
}
