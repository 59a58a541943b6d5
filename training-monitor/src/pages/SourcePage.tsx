import { useMemo } from "react";
import { useQuery, useRefresh } from "../api/cache";
import { groupPage, runPage, setPage, sourceName, sourcePage, sourcePath, taskPage } from "../api/paths";
import type { GroupSummary, RolloutCell, SourceDetail, SourceRef } from "../api/types";
import { formatDuration, formatNumber, formatPercent, plural } from "../format";
import { RolloutCellLink, type CellRollout } from "../rollout/RolloutCellLink";
import { Link, navigate, useSearchParam } from "../router";
import { runCrumb } from "../runs";
import { Icon } from "../ui/icons";
import { useShortcuts } from "../ui/keys";
import { StepChange } from "./StepChange";
import { StepReplay } from "./StepReplay";
import { Empty, Loaded, LostNote, PageHead, Panel, Segments, Stat, StatusBadge } from "../ui/parts";

const SHOWN = [
  { value: "", label: "All groups" },
  { value: "mixed", label: "With signal" },
  { value: "constant", label: "Constant" },
  { value: "failed", label: "Never solved" },
] as const;

/** Evaluations do not train: their tasks are solved or not. */
const SHOWN_OF_EVALUATION = [
  { value: "", label: "All tasks" },
  { value: "solved", label: "Always solved" },
  { value: "failed", label: "Never solved" },
] as const;

const ORDERS = [
  { value: "", label: "As run" },
  { value: "hardest", label: "Hardest first" },
  { value: "spread", label: "Widest spread" },
] as const;

/** A step, an evaluation or the baseline: its figures and its grid of groups and rollouts. */
export function SourcePage({ runId, phase, step }: { runId: string; phase: string; step: string }) {
  const query = useQuery<SourceDetail>(sourcePath(runId, phase, step));
  useRefresh(query.reload, query.data?.ended_at === null && query.data.is_run_alive);
  return <Loaded query={query} height={480}>{(source) => <SourceView source={source} />}</Loaded>;
}

function SourceView({ source }: { source: SourceDetail }) {
  const go = (to: SourceRef | null) => to !== null && navigate(sourcePage(source.run_id, to.phase, to.step));
  useShortcuts({
    "[": () => go(source.previous),
    "]": () => go(source.next),
    u: () => navigate(runPage(source.run_id)),
  });
  return (
    <>
      <PageHead
        crumbs={[
          { label: "Runs", to: "/" },
          runCrumb(source),
          { label: sourceName(source.phase, source.step) },
        ]}
        title={<>{sourceName(source.phase, source.step)} <StatusBadge status={source.status} alive={source.is_run_alive} /></>}
        actions={
          <>
            <button type="button" className="button" disabled={source.previous === null} title="Previous  [" onClick={() => go(source.previous)}>
              <Icon name="left" /> {source.previous === null ? "First" : sourceName(source.previous.phase, source.previous.step)}
            </button>
            <button type="button" className="button" disabled={source.next === null} title="Next  ]" onClick={() => go(source.next)}>
              {source.next === null ? "Last" : sourceName(source.next.phase, source.next.step)} <Icon name="right" />
            </button>
          </>
        }
      />
      <SourceStats source={source} />
      {source.phase === "step" && <StepChange runId={source.run_id} step={source.step} />}
      {source.phase === "step" && <StepReplay runId={source.run_id} step={source.step} />}
      <Groups source={source} />
      <StepMetrics metrics={source.metrics} />
    </>
  );
}

function SourceStats({ source }: { source: SourceDetail }) {
  const { success, metrics } = source;
  const constant = source.groups.filter((group) => group.is_constant).length;
  const isStep = source.phase === "step";
  const durations = source.groups.flatMap((group) => group.rollouts.flatMap((rollout) => rollout.duration_s ?? []));
  const slowest = durations.length ? Math.max(...durations) : null;
  const of = { run_id: source.run_id, phase: source.phase, step: source.step };
  return (
    <dl className="stats">
      <Stat label={source.ended_at === null ? "Success so far" : "Success"} hint="with its 95 % interval; short rollouts end first">{formatPercent(success.rate, 1)}<small>{success.rate === null ? "" : `${formatPercent(success.low)} to ${formatPercent(success.high)}`}</small><small><LostNote rate={success} /></small></Stat>
      {source.fault_bounds && <Stat label="Success with faults" hint="of first tries, if all faulty ones had failed, and if all had succeeded">{formatPercent(source.fault_bounds.worst)}<small>to {formatPercent(source.fault_bounds.best)}, <Link className="text-link" to={setPage({ ...of, verdict: "fault" })}>{plural(source.fault_bounds.num_faults, "fault")}</Link></small></Stat>}
      <Stat label={source.ended_at === null ? "Reward so far" : "Reward"}>{formatNumber(metrics["reward/mean"] ?? meanReward(source.groups), 3)}</Stat>
      <Stat label="Rollouts"><Link className="text-link" to={setPage(of)}>{source.groups.reduce((sum, group) => sum + group.rollouts.length, 0).toLocaleString("en-US")}</Link><small><Link className="text-link" to={setPage({ ...of, verdict: "failure", view: "summary" })}>failures</Link></small></Stat>
      <Stat label="Groups">{source.num_ended_groups}<small>of {source.num_groups} × {source.group_size}</small></Stat>
      {isStep && <Stat label="Constant groups" hint="all rewards equal: no learning signal">{constant}<small>{plural(source.num_datums ?? 0, "datum")} trained on</small></Stat>}
      <Stat label="Adapter" hint={isStep ? "Newest version at its start; the version that it produced" : "The evaluated version"}><span className="mono">{source.policy_version}{source.trained_policy_version === null ? "" : ` → ${source.trained_policy_version}`}</span></Stat>
      {isStep && <Stat label="Loss">{formatNumber(metrics["loss/total"], 3)}</Stat>}
      {isStep && <Stat label="Parity" hint="mean |sampler − trainer| log-probability at the same weights">{formatNumber(metrics["policy/parity_mean_abs"], 3)}</Stat>}
      <Stat label="Slowest rollout" hint="Stragglers: rollouts slower than 95 % of these, or the last to end">{formatDuration(slowest)}<small><Link className="text-link" to={setPage({ ...of, stragglers: true })}>stragglers</Link></small></Stat>
      <Stat label="Took">{formatDuration(secondsBetween(source.started_at, source.ended_at))}<small><Link className="text-link" to={setPage({ ...of, view: "cost" })}>cost</Link></small></Stat>
    </dl>
  );
}

function meanReward(groups: readonly GroupSummary[]): number | null {
  const rewards = groups.flatMap((group) => group.rollouts.flatMap((rollout) => (rollout.reward === null ? [] : [rollout.reward])));
  return rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
}

export function secondsBetween(start: string | null, end: string | null): number | null {
  return start && end ? (Date.parse(end) - Date.parse(start)) / 1000 : null;
}

function Groups({ source }: { source: SourceDetail }) {
  const [shown, setShown] = useSearchParam("groups");
  const [order, setOrder] = useSearchParam("order");
  const groups = useMemo(() => arranged(source.groups, shown, order), [source.groups, shown, order]);
  const range = useMemo(() => rewardRange(source.groups), [source.groups]);
  return (
    <Panel
      title={<>Groups and rollouts <RewardLegend range={range} /></>}
      flush
      actions={
        <>
          <Segments label="Groups shown" value={shown} options={source.phase === "step" ? SHOWN : SHOWN_OF_EVALUATION} onChange={setShown} />
          <Segments label="Order" value={order} options={ORDERS} onChange={setOrder} />
        </>
      }
    >
      {groups.length === 0 ? (
        <Empty title={source.groups.length ? "No such group" : "No group has started"}>
          <p>{source.groups.length ? `Choose “${source.phase === "step" ? "All groups" : "All tasks"}”.` : "Groups appear here as soon as their first rollout starts."}</p>
        </Empty>
      ) : (
        <ol className="groups">
          {groups.map((group) => (
            <GroupRow key={group.group_id} group={group} source={source} range={range} />
          ))}
        </ol>
      )}
    </Panel>
  );
}

function arranged(groups: readonly GroupSummary[], shown: string, order: string): GroupSummary[] {
  const fits = (group: GroupSummary) => {
    if (shown === "constant") return group.is_constant;
    if (shown === "solved") return !!group.num_rollouts && group.num_successes === group.num_rollouts;
    if (shown === "mixed") return !group.is_constant && group.num_rollouts !== null;
    return shown !== "failed" || (!!group.num_rollouts && group.num_successes === 0);
  };
  const kept = groups.filter(fits);
  if (order === "hardest") kept.sort((a, b) => (a.reward_mean ?? 9) - (b.reward_mean ?? 9));
  else if (order === "spread") kept.sort((a, b) => (b.reward_std ?? -1) - (a.reward_std ?? -1));
  else kept.sort((a, b) => a.group_index - b.group_index);
  return kept;
}

/** Colours span 0 to 1, or what the rewards span if that is more. */
export function rewardRange(groups: readonly { rollouts: readonly { reward: number | null }[] }[]): [number, number] {
  let [low, high] = [0, 1];
  for (const group of groups) {
    for (const { reward } of group.rollouts) {
      if (reward === null) continue;
      low = Math.min(low, reward);
      high = Math.max(high, reward);
    }
  }
  return [low, high];
}

function RewardLegend({ range }: { range: [number, number] }) {
  return (
    <span className="reward-legend num">
      {formatNumber(range[0], 2)}
      {[0, 1, 2, 3, 4].map((bin) => <i key={bin} style={{ background: `var(--reward-${bin})` }} />)}
      {formatNumber(range[1], 2)}
      <i className="swatch-edge" /> out of turns
    </span>
  );
}

function GroupRow({ group, source, range }: { group: GroupSummary; source: SourceDetail; range: [number, number] }) {
  const runId = source.run_id;
  const isConstant = source.phase === "step" && group.is_constant;
  const missing = Math.max(0, source.group_size - group.rollouts.length);
  return (
    <li className={`group-row ${isConstant ? "constant" : ""}`}>
      <div className="group-task">
        <Link to={groupPage(source, group.group_id)} className="group-name" data-row title={group.instruction ?? "The rollouts side by side"}>
          {group.instruction ?? group.task_id}
        </Link>
        <span className="faint truncate">
          <Link to={taskPage(runId, group.task_id)} className="quiet-link">{group.task_id}</Link> · seed {group.seed}
          {group.category ? ` · ${group.category}` : ""}
        </span>
      </div>
      <div className="cells">
        {group.rollouts.map((rollout) => <RolloutCellLink key={rollout.rollout_id} rollout={asLeft(rollout, source)} runId={runId} range={range} />)}
        {Array.from({ length: missing }, (_, index) => <span key={index} className="cell waiting" aria-hidden="true" />)}
        {group.replays.map((replay) => (
          <RolloutCellLink
            key={`replay-${replay.rollout_id}`}
            rollout={{ rollout_id: replay.rollout_id, reward: replay.reward, success: true, status: "completed", stop_reason: `replayed from step ${replay.step ?? "?"}`, advantage: replay.advantage }}
            runId={runId}
            range={range}
            replayed
          />
        ))}
      </div>
      <div className="group-figures num">
        {isConstant && <span className="badge" title="All rewards equal: no learning signal">constant</span>}
        {group.num_rollouts === null ? (
          <StatusBadge status={group.status} alive={source.is_run_alive} />
        ) : (
          <span title="mean and standard deviation of the rewards">{formatNumber(group.reward_mean, 3)} <span className="faint">± {formatNumber(group.reward_std, 2)}</span></span>
        )}
      </div>
    </li>
  );
}

/** A rollout that a dead run left in progress will not continue. */
function asLeft(rollout: RolloutCell, source: SourceDetail): CellRollout {
  if (rollout.status !== "running" || source.is_run_alive) return rollout;
  return { ...rollout, status: "cancelled", stop_reason: "interrupted" };
}

function StepMetrics({ metrics }: { metrics: SourceDetail["metrics"] }) {
  const names = Object.keys(metrics).sort();
  if (names.length === 0) return null;
  const areas = [...new Set(names.map((name) => name.split("/")[0] ?? ""))];
  return (
    <Panel title={<>All figures <span className="faint">{names.length}</span></>}>
      <div className="metric-columns">
        {areas.map((area) => (
          <section key={area}>
            <h3>{area}</h3>
            <dl>
            {names.filter((name) => name.split("/")[0] === area).map((name) => (
              <div key={name} className="metric-line">
                <dt className="truncate" title={name}>{name.slice(area.length + 1)}</dt>
                <dd className="num">{formatNumber(metrics[name])}</dd>
              </div>
            ))}
            </dl>
          </section>
        ))}
      </div>
    </Panel>
  );
}
