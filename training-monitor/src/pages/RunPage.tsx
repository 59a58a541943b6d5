import { useQuery, useRefresh } from "../api/cache";
import { analysesPath, failuresPage, heldOutPage, metricsPath, rolloutPage, runPath, setPage, sourcePage, suitePage } from "../api/paths";
import type { AnalysisPlace, MetricSeries, Run } from "../api/types";
import { formatAgo, formatBytes, formatDuration, formatNumber, formatPercent, formatTime, plural, words } from "../format";
import { Link, navigate, useSearchParam } from "../router";
import { nameOf, whenSeen } from "../runs";
import { useNow } from "../ui/clock";
import { useShortcuts } from "../ui/keys";
import { Notes } from "../ui/Notes";
import { AliasButton, PinButton } from "../ui/RunMark";
import { FaultBoundsNote, Loaded, LostNote, PageHead, Problem, Stat, Tabs } from "../ui/parts";
import { RunCosts } from "./Costs";
import { RunAsk } from "./RunAsk";
import { RunCharts } from "./RunCharts";
import { RunConfig } from "./RunConfig";
import { RunEvals } from "./RunEvals";
import { RunLive } from "./RunLive";
import { RunStatus } from "./RunsPage";
import { RunTasks } from "./RunTasks";
import { RunTimeline } from "./RunTimeline";
import { RunVerdicts } from "./RunVerdicts";

const TABS = ["", "timeline", "live", "tasks", "evals", "cost", "verdicts", "config", "sql"] as const;
type Tab = (typeof TABS)[number];
const TAB_NAMES: Record<Tab, string> = {
  "": "Charts",
  timeline: "Timeline",
  live: "Live",
  tasks: "Tasks",
  evals: "Evaluations",
  cost: "Cost",
  verdicts: "Verdicts",
  config: "Configuration",
  sql: "SQL",
};

export function RunPage({ runId }: { runId: string }) {
  const query = useQuery<Run>(runPath(runId));
  const [tab] = useSearchParam("tab");
  useQuery<MetricSeries>(tab ? null : metricsPath(runId)); // of the charts, without waiting for the run
  useRefresh(query.reload, query.data?.is_alive ?? false);
  return <Loaded query={query} height={480}>{(run) => <RunView run={run} />}</Loaded>;
}

function RunView({ run }: { run: Run }) {
  const [tabText, setTab] = useSearchParam("tab");
  const tab: Tab = TABS.find((one) => one === tabText) ?? "";
  const open = (next: Tab) => setTab(next, false);
  const counts: Partial<Record<Tab, number>> = { ...(run.num_running_rollouts ? { live: run.num_running_rollouts } : {}), evals: run.evaluations.length };
  useShortcuts({ ...Object.fromEntries(TABS.map((one, index) => [String(index + 1), () => open(one)])), u: () => navigate("/"), r: () => navigate(setPage({ run_id: run.run_id })), f: () => navigate(failuresPage(run.run_id)) });
  return (
    <>
      <PageHead
        crumbs={[{ label: "Runs", to: "/" }, { label: nameOf(run) }]}
        title={<><span title={run.run_name}>{nameOf(run)}</span> <RunStatus run={run} /></>}
        view={tab === "" ? undefined : TAB_NAMES[tab]}
        note={<span className="mono truncate">{run.alias && `${run.run_name} · `}{run.log_path}</span>}
        actions={
          <>
            <Link className="button" to={setPage({ run_id: run.run_id })} title="All rollouts  r">Rollouts</Link>
            <Link className="button" to={failuresPage(run.run_id)} title="Failures by cause  f">Failures</Link>
          </>
        }
      />
      {run.error && (run.status === "cancelled" ? <Stopped error={run.error} /> : <Problem head="The run failed">{run.error}</Problem>)}
      <Alerts run={run} />
      <Notes of={{ runId: run.run_id }}>{({ body, add }) => <section className="row wrap" aria-label="Notes">{body}{add}<AliasButton run={run} /><PinButton run={run} /></section>}</Notes>
      <RunStats run={run} />
      <Analyses run={run} />
      <Tabs
        label="Views of the run"
        value={tab}
        onChange={open}
        options={TABS.map((value) => ({ value, label: TAB_NAMES[value], count: counts[value] ?? null }))}
      >
        <TabContent tab={tab} run={run} />
      </Tabs>
    </>
  );
}

const SHOWN_ANALYSES = 8;

/** Where recipes looked again: the suite of the run, steps made again, turns that checkpoints were asked about. */
function Analyses({ run }: { run: Run }) {
  const { data = [] } = useQuery<AnalysisPlace[]>(analysesPath(run.run_id));
  const links = new Map(
    data.map(({ kind, step, rollout_id, turn_index }): [string, string] => {
      if (kind === "suite") return [suitePage(run.run_id), "Regression suite"];
      if (kind === "replay") return [sourcePage(run.run_id, "step", step ?? 0), `Step ${step}, made again`];
      return [rolloutPage(run.run_id, rollout_id ?? "", turn_index ?? 0), `Turn ${(turn_index ?? 0) + 1} of ${rollout_id?.slice(0, 8)}, checkpoints asked`];
    }),
  );
  if (links.size === 0) return null;
  return (
    <nav className="row wrap" aria-label="Analyses">
      {[...links].slice(0, SHOWN_ANALYSES).map(([to, label]) => <Link key={to} className="button" to={to}>{label}</Link>)}
      {links.size > SHOWN_ANALYSES && <span className="faint">and {links.size - SHOWN_ANALYSES} earlier</span>}
    </nav>
  );
}

const ALERT_NAMES: Record<string, string> = { stalled: "Stalled", parity: "Parity", entropy: "Entropy", constant_groups: "Constant groups", faults: "Faults" };

/** What the run should be looked at for, while it goes on. */
function Alerts({ run }: { run: Run }) {
  if (run.alerts.length === 0) return null;
  return (
    <ul className="stack" aria-label="Alerts">
      {run.alerts.map((one) => (
        <li key={one.kind} className="notice warn">
          <b>{ALERT_NAMES[one.kind] ?? words(one.kind)}</b> {one.message}{" "}
          {one.kind === "faults" && <Link className="text-link" to={setPage({ run_id: run.run_id, verdict: "fault", view: "summary" })}>The faults</Link>}
        </li>
      ))}
    </ul>
  );
}

/** Somebody stopped the run; the name of Python's exception adds nothing. */
function Stopped({ error }: { error: string }) {
  const text = error.replace(/^(CancelledError|KeyboardInterrupt):?\s*/, "").trim();
  return <div className="notice warn"><b>The run was stopped.</b> {text}</div>;
}

function TabContent({ tab, run }: { tab: Tab; run: Run }) {
  switch (tab) {
    case "":
      return <RunCharts run={run} />;
    case "timeline":
      return <RunTimeline run={run} />;
    case "live":
      return <RunLive run={run} />;
    case "tasks":
      return <RunTasks run={run} />;
    case "evals":
      return <RunEvals run={run} />;
    case "cost":
      return <RunCosts run={run} />;
    case "verdicts":
      return <RunVerdicts run={run} />;
    case "config":
      return <RunConfig run={run} />;
    case "sql":
      return <RunAsk run={run} />;
  }
}

/** What is left of a run that goes on, else how long it took and when that was. */
function TimeStat({ run }: { run: Run }) {
  const now = useNow();
  const hint = `started ${formatTime(run.started_at)}`;
  if (run.is_alive) {
    const evaluation = run.evaluations.find((one) => one.status === "running");
    const finishing = evaluation ? `${run.total_steps > 0 ? "final evaluation" : "evaluation"} ${evaluation.num_ended_groups}/${evaluation.num_groups}` : "finishing";
    return (
      <Stat label="Time left" hint={hint}>
        {run.eta_is_lower_bound && <span title="The duration of the remaining evaluations is not known yet">&gt; </span>}{formatDuration(run.eta_s)}
        <small>{run.num_completed_steps >= run.total_steps ? finishing : `${formatDuration(run.elapsed_s)} so far`}</small>
      </Stat>
    );
  }
  if (run.status === "running") {
    return <Stat label="Last sign of life" hint={hint}>{formatAgo(run.heartbeat_at, now)}<small>after {formatDuration(run.elapsed_s)}</small></Stat>;
  }
  return <Stat label="Took" hint={hint}>{formatDuration(run.elapsed_s)}<small>{whenSeen(run, now)}</small></Stat>;
}

/** An evaluation has no steps, and none of their figures. */
function RunStats({ run }: { run: Run }) {
  const { baseline, last_eval: held } = run;
  const bounds = run.evaluations.filter((one) => one.status === "completed").at(-1)?.fault_bounds;
  const hasSteps = run.total_steps > 0;
  return (
    <dl className="stats">
      {hasSteps && <Stat label="Steps">{run.num_completed_steps}<small>of {run.total_steps}</small></Stat>}
      <TimeStat run={run} />
      {hasSteps && (
        <Stat label={run.success_step === null ? "Success" : `Success, step ${run.success_step}`} hint="of the latest finished step">
          {run.success_step === null ? formatPercent(run.success_rate, 1) : <Link className="text-link" to={setPage({ run_id: run.run_id, phase: "step", step: run.success_step })}>{formatPercent(run.success_rate, 1)}</Link>}
          {run.is_alive && run.running_step && <small>step {run.running_step.step} under way</small>}
        </Stat>
      )}
      <Stat label="Held-out success" hint="baseline → latest evaluation">
        {baseline && held ? <span className="dim">{formatPercent(baseline.rate)} → </span> : null}
        {held ?? baseline ? <Link className="text-link" to={heldOutPage(run)}>{formatPercent((held ?? baseline)?.rate, 0)}</Link> : "–"}
        {(held ?? baseline) && <small>{formatPercent((held ?? baseline)?.low)} to {formatPercent((held ?? baseline)?.high)}</small>}
        {bounds && <small><FaultBoundsNote bounds={bounds} /></small>}
        <small><LostNote rate={held ?? baseline} /></small>
      </Stat>
      {hasSteps && <Stat label="Reward" hint="of the latest finished step">{formatNumber(run.reward_mean, 3)}</Stat>}
      <Stat label="Rollouts"><Link className="text-link" to={setPage({ run_id: run.run_id })}>{run.num_rollouts.toLocaleString("en-US")}</Link><small>{run.num_running_rollouts > 0 && <Link className="text-link" to={setPage({ run_id: run.run_id, status: "running" })}>{run.num_running_rollouts} running</Link>}</small></Stat>
      <Stat label="Size" hint="rollouts, turns and screenshots in the database and its store; recipes.prune makes it smaller">
        {formatBytes(run.rows_bytes + run.screenshots_bytes)}<small>{formatBytes(run.screenshots_bytes)} screenshots</small>
      </Stat>
      {hasSteps && (
        <Stat label="Step time" hint="from step end to step end, mean of the last ten since the run was started or resumed, without evaluations">
          {formatDuration(run.step_time_s)}
        </Stat>
      )}
      <Stat label="Starts" hint="how often the run was started or resumed">{plural(run.num_attempts, "start")}</Stat>
    </dl>
  );
}
