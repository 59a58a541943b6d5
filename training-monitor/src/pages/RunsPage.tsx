import { useMemo, useState } from "react";
import { runsPath, comparePage, heldOutPage, runPage, setPage } from "../api/paths";
import { prefetch, useQuery, useRefresh } from "../api/cache";
import { runPath } from "../api/paths";
import type { RunList, RunSummary } from "../api/types";
import { Sparkline } from "../charts/Sparkline";
import { formatAgo, formatPercent, formatTime, words } from "../format";
import { Link, navigate, useSearchParam } from "../router";
import { nameOf, runLabels, timeLeft, whenSeen } from "../runs";
import { useNow } from "../ui/clock";
import { PinButton } from "../ui/RunMark";
import { Empty, IntervalBar, Loaded, LostNote, PageHead, Progress, Segments, StatusBadge } from "../ui/parts";
import { useSorted, type Column } from "../ui/table";

const STATUSES = [
  { value: "", label: "All" },
  { value: "running", label: "Running" },
  { value: "completed", label: "Completed" },
  { value: "failed", label: "Failed" },
  { value: "cancelled", label: "Stopped" },
] as const;

export function RunsPage() {
  const [search, setSearch] = useSearchParam("q");
  const [status, setStatus] = useSearchParam("status");
  const [cursors, setCursors] = useState<string[]>([]);
  const [selected, setSelected] = useState<readonly string[]>([]);
  const query = useQuery<RunList>(runsPath({ search, status, cursor: cursors.at(-1) }));
  useRefresh(query.reload, query.data?.items.some((run) => run.is_alive) ?? false);
  const toggle = (runId: string) =>
    setSelected((before) => (before.includes(runId) ? before.filter((one) => one !== runId) : [...before, runId]));
  return (
    <>
      <PageHead
        title="Runs"
        actions={
          <>
            <input
              className="field"
              type="search"
              aria-label="Search runs"
              placeholder="Search name, model, folder"
              data-shortcut="search"
              value={search}
              onChange={(event) => {
                setCursors([]);
                setSearch(event.target.value);
              }}
            />
            <Segments
              label="Status"
              value={status}
              options={STATUSES}
              onChange={(value) => {
                setCursors([]);
                setStatus(value);
              }}
            />
            <button
              type="button"
              className="button primary"
              disabled={selected.length < 2}
              title={selected.length < 2 ? "Choose two or more runs first" : undefined}
              onClick={() => navigate(comparePage(selected))}
            >
              Compare{selected.length > 0 ? ` ${selected.length}` : ""}
            </button>
          </>
        }
      />
      <Loaded query={query}>
        {(page) =>
          page.items.length === 0 ? (
            <NoRuns filtered={search !== "" || status !== ""} />
          ) : (
            <section className="panel">
              <RunsTable runs={page.items} selected={selected} toggle={toggle} />
              {(page.next_cursor || cursors.length > 0) && (
                <div className="row between panel-body">
                  <span className="dim num">{page.items.length.toLocaleString("en-US")} of {page.num_runs.toLocaleString("en-US")} runs are shown; sorting applies to these</span>
                  <span className="row">
                  <button className="button" type="button" disabled={cursors.length === 0} onClick={() => setCursors(cursors.slice(0, -1))}>
                    Newer
                  </button>
                  <button
                    className="button"
                    type="button"
                    disabled={!page.next_cursor}
                    onClick={() => page.next_cursor && setCursors([...cursors, page.next_cursor])}
                  >
                    Older
                  </button>
                  </span>
                </div>
              )}
            </section>
          )
        }
      </Loaded>
    </>
  );
}

function NoRuns({ filtered }: { filtered: boolean }) {
  if (filtered) {
    return (
      <Empty title="No matching run">
        <p>No run has this name and status. Clear the search or choose “All”.</p>
      </Empty>
    );
  }
  return (
    <Empty title="No runs yet">
      <p>Start one: a tiny model learns to operate a simulated phone, without a GPU, in about ten minutes. It appears here automatically.</p>
      <pre>make train</pre>
    </Empty>
  );
}

const COLUMNS: readonly Column<RunSummary>[] = [
  { label: "Compare", hidden: true },
  { label: "Run", value: nameOf },
  { label: "Status", value: (run) => (run.status === "running" && !run.is_alive ? "no sign of life" : run.status) },
  { label: "Progress", value: (run) => run.progress },
  { label: "Success in training", value: (run) => run.success_rate },
  { label: "Held-out success", value: (run) => (run.last_eval ?? run.baseline)?.rate },
  { label: "Reward", right: true, value: (run) => run.reward_mean },
  { label: "When", right: true, title: "Start of a run in progress, otherwise its end", value: (run) => Date.parse(run.is_alive ? run.started_at : (run.ended_at ?? run.heartbeat_at)) },
];

function RunsTable(props: { runs: readonly RunSummary[]; selected: readonly string[]; toggle: (runId: string) => void }) {
  const now = useNow();
  const labels = useMemo(() => runLabels(props.runs), [props.runs]);
  const { sorted, head } = useSorted(props.runs, COLUMNS);
  const rows = [...sorted].sort((a, b) => Number(b.is_pinned) - Number(a.is_pinned)); // in every order
  return (
    <div className="table-scroll">
      <table className="data runs">
        <thead>
          {head}
        </thead>
        <tbody>
          {rows.map((run) => (
            <tr key={run.run_id} className={props.selected.includes(run.run_id) ? "selected" : ""}>
              <td>
                <input
                  type="checkbox"
                  aria-label={`Compare ${labels.get(run.run_id)}`}
                  checked={props.selected.includes(run.run_id)}
                  onChange={() => props.toggle(run.run_id)}
                />
              </td>
              <td className="wrap">
                <Link to={runPage(run.run_id)} className="run-name" data-row title={run.run_name} onMouseEnter={() => prefetch(runPath(run.run_id))}>
                  {nameOf(run)}
                </Link>
                <PinButton run={run} />
                {run.tags.map((tag) => <span key={tag} className="badge accent">{tag}</span>)}
                <div className="faint truncate run-model">
                  {[run.alias && run.run_name, labels.get(run.run_id)?.slice(nameOf(run).length + 3), run.model_name ?? "included tiny model", run.project].filter(Boolean).join(" · ")}
                </div>
              </td>
              <td>
                <RunStatus run={run} />
                {run.is_alive && run.alerts.map((one) => <span key={one.kind} className="badge warn" title={one.message}>! {words(one.kind)}</span>)}
              </td>
              <td><RunProgress run={run} /></td>
              <td><SuccessCell run={run} /></td>
              <td><HeldOut run={run} /></td>
              <td className="right">{run.reward_mean === null ? "–" : run.reward_mean.toFixed(2)}</td>
              <td className="right dim" title={`started ${formatTime(run.started_at)}${run.ended_at ? `, ended ${formatTime(run.ended_at)}` : ""}`}>{whenSeen(run, now)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** The status; a running run without a sign of life is marked. */
export function RunStatus({ run }: { run: RunSummary }) {
  if (run.status === "running" && !run.is_alive) {
    return <span className="badge warn" title={`No sign of life since ${formatAgo(run.heartbeat_at)}`}>no sign of life</span>;
  }
  return <StatusBadge status={run.status} />;
}

function RunProgress({ run }: { run: RunSummary }) {
  return (
    <div className="run-progress">
      <Progress value={run.progress} label={`Progress of ${nameOf(run)}`} />
      <span className="faint num">
        {run.total_steps > 0 ? `${run.num_completed_steps} / ${run.total_steps} steps` : "evaluation"} · {timeLeft(run)}
      </span>
    </div>
  );
}

function SuccessCell({ run }: { run: RunSummary }) {
  return (
    <div className="row">
      <Sparkline values={run.sparkline} range={[0, 1]} label={`Success of ${nameOf(run)} over its steps`} width={110} height={26} />
      {run.success_step === null ? <b className="num">{formatPercent(run.success_rate)}</b> : <Link className="text-link num" to={setPage({ run_id: run.run_id, phase: "step", step: run.success_step })}><b>{formatPercent(run.success_rate)}</b></Link>}
    </div>
  );
}

function HeldOut({ run }: { run: RunSummary }) {
  const rate = run.last_eval ?? run.baseline;
  if (!rate || rate.rate === null) return <span className="faint">not measured</span>;
  const before = run.last_eval ? run.baseline?.rate : null;
  return (
    <div className="held-out">
      <IntervalBar value={rate.rate} low={rate.low} high={rate.high} />
      <span className="num">
        {before != null && <span className="faint">{formatPercent(before)} → </span>}
        <Link className="text-link" to={heldOutPage(run)}><b>{formatPercent(rate.rate)}</b></Link>
      </span>
      <LostNote rate={rate} />
    </div>
  );
}
