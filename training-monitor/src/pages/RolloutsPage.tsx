import { useMemo, useState, type KeyboardEvent } from "react";
import { useKept, useQuery, type Query } from "../api/cache";
import { compareSetsPage, rolloutInSetPage, rolloutPage, runPage, setPath, setSummaryPath, shortSourceName } from "../api/paths";
import type { Page, RolloutItem, SetSummary } from "../api/types";
import { formatAgo, formatDuration, formatNumber, formatPercent, formatSigned, formatTime, plural } from "../format";
import { ChoosePair, PairLink, usePair } from "../rollout/pair";
import { Screenshot } from "../rollout/Screenshot";
import { endText, shownSuccess } from "../rollout/verdict";
import { Link, navigate, replaceSearch, useLocation, useSearchParam } from "../router";
import { runCrumb, runLabels } from "../runs";
import { FIELDS, describeSet, filterOf, narrowed, shownValue, type Field } from "../sets";
import { CopyLink } from "../ui/CopyLink";
import { Icon } from "../ui/icons";
import { useShortcuts } from "../ui/keys";
import { Empty, Loaded, LostNote, Outcome, PageHead, Panel, Segments, Stat, StatusBadge, Tabs } from "../ui/parts";
import { AddRun } from "../ui/runChoices";
import { useHead, type Column } from "../ui/table";
import { SetCosts } from "./Costs";
import { SetFigures, VERDICTS } from "./SetFigures";
import { SetTokens } from "./SetTokens";

const MAX_RUNS = 12; // that the API takes at once
const VIEWS = [
  { value: "", label: "Table" },
  { value: "gallery", label: "Screens" },
  { value: "summary", label: "Figures" },
  { value: "tokens", label: "Tokens" },
  { value: "cost", label: "Cost" },
] as const;
type View = (typeof VIEWS)[number]["value"];

/** A set of rollouts: those of some runs that fit the address, as a table, as their last screens, and counted. */
export function RolloutsPage() {
  const { search: address } = useLocation();
  const [viewText, setView] = useSearchParam("view");
  const view: View = VIEWS.find((one) => one.value === viewText)?.value ?? "";
  const text = address.toString();
  const [set, list] = useMemo(() => {
    const [wanted, sorted] = [new URLSearchParams(text), new URLSearchParams(text)];
    for (const params of [wanted, sorted]) for (const name of ["view", "against", "by"]) params.delete(name);
    wanted.delete("sort");
    return [wanted, sorted];
  }, [text]);
  const runIds = set.getAll("run_id");
  const summary = useKept(useQuery<SetSummary>(runIds.length > 0 ? setSummaryPath(set) : null));
  const [against, setAgainst] = useSearchParam("against");
  const first = useKept(useQuery<Page<RolloutItem>>(runIds.length > 0 ? setPath(list) : null)).data?.items[0];
  const walk = first && rolloutInSetPage(first.run_id, first.rollout_id, list.toString());
  const open = (next: View) => setView(next, false);
  useShortcuts({ ...Object.fromEntries(VIEWS.map((one, index) => [String(index + 1), () => open(one.value)])), u: () => navigate(runIds[0] ? runPage(runIds[0]) : "/"), v: () => walk && navigate(walk) });
  const add = (runId: string) => navigate(`/rollouts?${new URLSearchParams([...address, ["run_id", runId]]).toString()}`, { replace: true });
  const only = runIds.length === 1 ? summary.data?.runs[0] : undefined;
  return (
    <>
      <PageHead
        crumbs={[{ label: "Runs", to: "/" }, ...(only ? [runCrumb(only)] : []), { label: "Rollouts" }]}
        title="Rollouts"
        {...(view ? { view: VIEWS.find((one) => one.value === view)?.label ?? "" } : {})}
        note={summary.data && runIds.length > 1 && <RunNames summary={summary.data} />}
        actions={
          <>
            {runIds.length > 0 && against === "" && <button type="button" className="button" title="Choose another set, and see the difference" onClick={() => setAgainst(set.toString(), false)}>Compare…</button>}
            {walk && <Link className="button" to={walk} title="One rollout after the other, with the keys n and p  v">Go through</Link>}
            {runIds.length > 0 && <CopyLink of="this set" />}
            <AddRun taken={runIds} most={MAX_RUNS} onAdd={add} />
          </>
        }
      />
      {against !== "" && (
        <div className="notice row wrap" role="status">
          <span className="grow">Change the runs or the filter to the set that is compared with <b>{describeSet(new URLSearchParams(against))}</b>.</span>
          <Link className="button primary" to={compareSetsPage(against, set.toString())}>Compare them</Link>
          <button type="button" className="button" onClick={() => setAgainst("")}>Cancel</button>
        </div>
      )}
      {runIds.length === 0 ? (
        <Empty title="No run selected"><p>Add a run above, or follow a number on a run&apos;s page.</p></Empty>
      ) : (
        <>
          <Filter set={set} />
          {summary.data && <SetStats summary={summary.data} set={set} />}
          <Tabs label="Views of the set" value={view} options={VIEWS} onChange={open}>
            {view === "summary" ? <Loaded query={summary} height={420}>{(found) => <SetFigures summary={found} set={set} />}</Loaded> : view === "tokens" ? <SetTokens set={set} /> : view === "cost" ? <SetCosts set={set} /> : <Listed key={runIds.join()} list={list} view={view} />}
          </Tabs>
        </>
      )}
    </>
  );
}

function RunNames({ summary }: { summary: SetSummary }) {
  const labels = runLabels(summary.runs);
  return <>{summary.runs.map((run) => <Link key={run.run_id} className="text-link" to={runPage(run.run_id)}>{labels.get(run.run_id)}</Link>)}</>;
}

function SetStats({ summary, set }: { summary: SetSummary; set: URLSearchParams }) {
  const { success } = summary;
  return (
    <dl className="stats">
      <Stat label="Rollouts">{summary.num_rollouts.toLocaleString("en-US")}</Stat>
      <Stat label={summary.reviews.length > 0 ? "Success as recorded" : "Success"} hint="over task instances, as recorded, with its 95 % interval">
        {formatPercent(success.rate, 1)}
        <small>{success.rate === null ? "" : `${formatPercent(success.low)} to ${formatPercent(success.high)}`}</small>
        <small><LostNote rate={success} /></small>
      </Stat>
      {summary.reviews.length > 0 && (
        <Stat label="Success as reviewed" hint="with the newest verdicts of people in place of the recorded ones">
          {formatPercent(summary.success_as_reviewed.rate, 1)}
          <small>{formatPercent(summary.success_as_reviewed.low)} to {formatPercent(summary.success_as_reviewed.high)}</small>
          <small>{plural(summary.reviews.reduce((sum, one) => sum + one.count, 0), "verdict")} of people</small>
        </Stat>
      )}
      {summary.verdicts.map((one) => (
        <Stat key={one.name} label={VERDICTS[one.name] ?? one.name}>
          <Link className="text-link" to={narrowed(set, { verdict: one.name })}>{one.count.toLocaleString("en-US")}</Link>
        </Stat>
      ))}
    </dl>
  );
}

const SHOWN_VERDICTS = [{ value: "", label: "All" }, { value: "success", label: "Successes" }, { value: "failure", label: "Failures" }, { value: "fault", label: "Faults" }] as const;
const SHOWN_PHASES = [{ value: "", label: "All" }, { value: "step", label: "Training" }, { value: "eval", label: "Evaluations" }, { value: "baseline", label: "Baseline" }] as const;

/** What narrows the set: the frequent choices, all others on demand, and a button for each that takes it away. */
function Filter({ set }: { set: URLSearchParams }) {
  const [find, setFind] = useSearchParam("search");
  const [verdict, setVerdict] = useSearchParam("verdict");
  const [phase, setPhase] = useSearchParam("phase");
  const given = filterOf(set);
  const isSeveral = set.getAll("phase").length > 1; // none of the choices, but both chips
  const without = (name: string, value: string) => {
    const rest = [...new URLSearchParams(window.location.search)].filter((one) => one[0] !== name || one[1] !== value);
    navigate(`/rollouts?${new URLSearchParams(rest).toString()}`, { replace: true });
  };
  return (
    <section className="stack" aria-label="Filter">
      <div className="row wrap">
        <input className="field grow set-search" type="search" aria-label="Find rollouts" placeholder="Words of instruction, answer, task or category" value={find} onChange={(event) => setFind(event.target.value)} />
        <Segments label="Verdict" value={verdict} options={SHOWN_VERDICTS} onChange={setVerdict} />
        <Segments label="Rollouts of" value={isSeveral ? "several" : phase} options={SHOWN_PHASES} onChange={setPhase} />
      </div>
      {given.length > 0 && (
        <ul className="row wrap" aria-label="Chosen">
          {given.map(({ name, label, value }) => (
            <li key={name + value} className="run-chip">
              <span className="faint">{label}</span>
              <span className="truncate" title={value}>{shownValue(name, value)}</span>
              <button type="button" className="button quiet icon small" aria-label={`Remove ${name} ${value}`} onClick={() => without(name, value)}><Icon name="close" size={12} /></button>
            </li>
          ))}
        </ul>
      )}
      <details>
        <summary className="link-button">All filters</summary>
        <div className="set-fields">
          {FIELDS.map((field) => <FieldInput key={`${field.name}:${set.get(field.name)}`} field={field} value={set.get(field.name) ?? ""} />)}
        </div>
      </details>
    </section>
  );
}

/** Takes effect with Enter, or when it is left. */
function FieldInput({ field, value }: { field: Field; value: string }) {
  const apply = (next: string) => next !== value && replaceSearch({ [field.name]: next });
  const enter = (event: KeyboardEvent<HTMLInputElement>) => event.key === "Enter" && apply(event.currentTarget.value.trim());
  return (
    <label className="stack-label">
      <span>{field.label}</span>
      {field.choices ? (
        <select className="field" value={value} onChange={(event) => apply(event.target.value)}>
          <option value="">any</option>
          {field.choices.map((one) => <option key={one} value={one}>{shownValue(field.name, one)}</option>)}
        </select>
      ) : (
        <input className="field" type={field.is ? "number" : "text"} step={field.is === "number" ? "any" : undefined} defaultValue={value} onKeyDown={enter} onBlur={(event) => apply(event.currentTarget.value.trim())} />
      )}
    </label>
  );
}

const NONE: { of: string; items: readonly RolloutItem[]; cursor: string } = { of: "", items: [], cursor: "" };

/** The rollouts of the set, a page after the other. */
function Listed({ list, view }: { list: URLSearchParams; view: View }) {
  const [loaded, setLoaded] = useState(NONE);
  const of = list.toString();
  const before = loaded.of === of ? loaded : NONE;
  const params = new URLSearchParams(list);
  if (before.cursor) params.set("cursor", before.cursor);
  const page = useQuery<Page<RolloutItem>>(setPath(params));
  const first = useKept<Page<RolloutItem>>(before.cursor ? { ...page, data: undefined } : page);
  const query: Query<Page<RolloutItem>> = before.cursor ? { ...page, data: page.data ?? { items: [], next_cursor: null } } : first;
  return (
    <Loaded query={query} height={420}>
      {(found) => {
        const items = [...before.items, ...found.items];
        const next = found.next_cursor;
        if (items.length === 0) return <Empty title="No rollout"><p>No rollout of these runs matches; remove a part of the filter.</p></Empty>;
        return (
          <Panel flush={view === ""}>
            {view === "" ? <SetTable items={items} /> : <div className="wall">{items.map((one) => <Card key={one.run_id + one.rollout_id} rollout={one} />)}</div>}
            {(next || page.loading) && (
              <div className="row wrap panel-body">
                <button type="button" className="button" disabled={!next} onClick={() => next && setLoaded({ of, items, cursor: next })}>Show more</button>
              </div>
            )}
          </Panel>
        );
      }}
    </Loaded>
  );
}

const COLUMNS: readonly Column<RolloutItem>[] = [
  { label: "Side by side", hidden: true },
  { label: "Last screen", hidden: true },
  { label: "Rollout" },
  { label: "Of" },
  { label: "Verdict" },
  { label: "Reward", right: true, sort: "reward" },
  { label: "Advantage", right: true, sort: "advantage" },
  { label: "Turns", right: true, sort: "turns" },
  { label: "Gap", right: true, sort: "gap", title: "the largest |trainer − sampler| log-probability of a token" },
  { label: "Tokens", right: true, sort: "tokens", title: "that the model sampled" },
  { label: "Took", right: true, sort: "took" },
  { label: "Started", right: true, sort: "started" },
];

/** The rollout, at the token that the order is about. */
const pageOf = (one: RolloutItem, sort = "") => rolloutPage(one.run_id, one.rollout_id) + (sort.endsWith("gap") ? "?color=gap" : "");

function SetTable({ items }: { items: readonly RolloutItem[] }) {
  const { head } = useHead(COLUMNS, "sort", "-started");
  const [sort] = useSearchParam("sort");
  const pair = usePair();
  return (
    <>
    <div className="table-scroll">
      <table className="data rollouts">
        <thead>{head}</thead>
        <tbody>
          {items.map((one) => (
            <tr key={one.run_id + one.rollout_id}>
              <td><ChoosePair pair={pair} one={one} label={`rollout ${one.member_index + 1} of ${one.task_id}, seed ${one.seed}, ${shortSourceName(one.phase, one.step)}`} /></td>
              <td><Link to={pageOf(one, sort)} tabIndex={-1} aria-hidden="true"><Screenshot sha256={one.last_sha256} alt="" lazy className="thumb" /></Link></td>
              <td className="wrap">
                <Link className="run-name" data-row to={pageOf(one, sort)}>{one.instruction ?? one.task_id}</Link>
                <div className="faint">{one.task_id} · seed {one.seed} · rollout {one.member_index + 1}</div>
                <GivenTags tags={one.given_tags} />
              </td>
              <td className="nowrap">{shortSourceName(one.phase, one.step)}</td>
              <td><Ended rollout={one} /> <span className="dim nowrap">{endText(one)}</span></td>
              <td className="right">{formatNumber(one.reward, 3)}</td>
              <td className="right">{formatSigned(one.advantage)}</td>
              <td className="right">{one.num_turns}</td>
              <td className="right">{formatNumber(one.max_gap, 3)}</td>
              <td className="right">{formatNumber(one.num_sampled_tokens)}</td>
              <td className="right">{formatDuration(one.duration_s)}</td>
              <td className="right dim nowrap" title={formatTime(one.started_at)}>{formatAgo(one.started_at)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
    <PairLink pair={pair} />
    </>
  );
}

function GivenTags({ tags }: { tags: readonly string[] }) {
  return tags.length > 0 && <div className="row wrap">{tags.map((tag) => <span key={tag} className="badge accent">{tag}</span>)}</div>;
}

function Ended({ rollout }: { rollout: RolloutItem }) {
  if (rollout.status === "running" || rollout.status === "cancelled") return <StatusBadge status={rollout.status} />;
  return <Outcome success={shownSuccess(rollout)} fault={rollout.status === "failed"} />;
}

function Card({ rollout }: { rollout: RolloutItem }) {
  const title = rollout.instruction ?? rollout.task_id;
  return (
    <article className="member">
      <Link to={pageOf(rollout)} data-row aria-label={`Rollout of ${title}`}>
        <Screenshot sha256={rollout.last_sha256} action={rollout.last_action} alt="Last screenshot" lazy />
      </Link>
      <div className="clamp-2">{title}</div>
      <div className="row between">
        <span className="faint num">{shortSourceName(rollout.phase, rollout.step)}</span>
        <Ended rollout={rollout} />
      </div>
      <div className="member-facts num"><span>{endText(rollout)}</span><span>{rollout.reward === null ? "" : `reward ${formatNumber(rollout.reward, 3)}`}</span></div>
    </article>
  );
}
