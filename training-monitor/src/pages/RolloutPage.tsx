import { useCallback, useEffect, useState } from "react";
import { useQuery, useRefresh } from "../api/cache";
import { downloadPath, exportPath, groupPage, rolloutPage, rolloutPath, sourceName, sourcePage, taskPage, tokensPath } from "../api/paths";
import type { Rollout, TurnDetail, TurnTokens } from "../api/types";
import { formatDuration, formatNumber, formatSigned, plural, words } from "../format";
import { AskedCheckpoints } from "../rollout/AskedCheckpoints";
import { Branches } from "../rollout/Branches";
import { Filmstrip } from "../rollout/Filmstrip";
import { Player } from "../rollout/Player";
import { PromptView } from "../rollout/PromptView";
import { RolloutFacts } from "../rollout/RolloutFacts";
import { SetWalk } from "../rollout/SetWalk";
import { Stage } from "../rollout/Stage";
import { adapterName, TokenStrip } from "../rollout/TokenStrip";
import { StageTimings } from "../rollout/StageTimings";
import { endText, shownSuccess } from "../rollout/verdict";
import { Link, navigate, replaceSearch, useLocation, useSearchParam } from "../router";
import { runCrumb } from "../runs";
import { CopyLink } from "../ui/CopyLink";
import { Icon } from "../ui/icons";
import { useShortcuts } from "../ui/keys";
import { Loaded, Outcome, PageHead, Panel, Problem, Stat, StatusBadge } from "../ui/parts";

export function RolloutPage({ runId, rolloutId }: { runId: string; rolloutId: string }) {
  const query = useQuery<Rollout>(rolloutPath(runId, rolloutId));
  useRefresh(query.reload, query.data?.status === "running" && query.data.is_run_alive);
  return <Loaded query={query} height={560}>{(rollout) => <RolloutView rollout={rollout} reload={query.reload} />}</Loaded>;
}

/** Which of `count` turns an address shows. */
function turnOf(search: URLSearchParams, count: number): number {
  if (search.get("follow")) return count - 1;
  return Math.min(Math.max(0, Number(search.get("turn") ?? 1) - 1 || 0), Math.max(0, count - 1));
}

/** The address of another rollout at the same turn, with tokens coloured alike. */
function besides(runId: string, rolloutId: string): string {
  const kept = new URLSearchParams(window.location.search);
  for (const name of ["token", "follow"]) kept.delete(name);
  return rolloutPage(runId, rolloutId) + (kept.size > 0 ? `?${kept.toString()}` : "");
}

function RolloutView({ rollout, reload }: { rollout: Rollout; reload: () => void }) {
  const { search } = useLocation();
  const [follow, setFollow] = useSearchParam("follow");
  const [playing, setPlaying] = useState(false);
  const set = search.get("set");
  const count = rollout.turns.length;
  const index = turnOf(search, count);
  const turn = rollout.turns[index];
  const goTo = useCallback(
    (next: number) => {
      const bounded = Math.min(Math.max(0, next), count - 1);
      replaceSearch({ follow: "", token: "", turn: bounded <= 0 ? "" : String(bounded + 1) });
    },
    [count],
  );
  // from the address, not from what is drawn: keys may come faster than pages
  const step = (by: number) => goTo(turnOf(new URLSearchParams(window.location.search), count) + by);
  const sibling = (by: number) => {
    const at = rollout.siblings.findIndex((one) => one.rollout_id === rollout.rollout_id);
    const next = rollout.siblings[at + by];
    if (next) navigate(besides(rollout.run_id, next.rollout_id));
  };
  useShortcuts({
    ArrowLeft: () => step(-1),
    ArrowRight: () => step(1),
    h: () => step(-1),
    l: () => step(1),
    Home: () => goTo(0),
    End: () => goTo(count - 1),
    " ": () => setPlaying((before) => !before),
    "[": () => sibling(-1),
    "]": () => sibling(1),
    f: () => setFollow(follow ? "" : "1"),
    u: () => navigate(set ? `/rollouts?${set}` : groupPage(rollout, rollout.group_id)),
  });
  return (
    <>
      {set && <SetWalk rollout={rollout} set={set} />}
      <RolloutHead rollout={rollout} follow={follow !== ""} setFollow={(on) => setFollow(on ? "1" : "")} step={sibling} />
      <RolloutStats rollout={rollout} />
      {rollout.error && <Problem head={words(rollout.stop_reason ?? "fault")}>{rollout.error}</Problem>}
      {turn ? (
        <div className="rollout-layout">
          <div className="stack rollout-stage">
            <Panel
              title={<>Turn {turn.turn_index + 1} <span className="faint">of {count}</span>{index < rollout.fork_turn && <ToldTurn rollout={rollout} index={index} />}</>}
              actions={<Player playing={playing} setPlaying={setPlaying} index={index} count={count} goTo={goTo} step={step} />}
            >
              <Stage turn={turn} playing={playing} />
            </Panel>
            <Filmstrip turns={rollout.turns} told={rollout.fork_turn} chosen={index} onChoose={goTo} />
            <Branches rollout={rollout} />
            <RolloutFacts rollout={rollout} turn={turn.turn_index} reload={reload} />
          </div>
          <TurnPanels rollout={rollout} turn={turn} />
        </div>
      ) : (
        <div className="rollout-layout">
          <Panel title="No turns yet">
            <p className="dim">
              {rollout.status === "running" && rollout.is_run_alive
                ? "The rollout is getting its device; its first turn appears here automatically."
                : "The rollout ended before the model was asked for an action."}
            </p>
          </Panel>
          <RolloutFacts rollout={rollout} reload={reload} />
        </div>
      )}
    </>
  );
}

/** Marks a turn that the rollout's parent took; it was told again, not sampled. */
function ToldTurn({ rollout, index }: { rollout: Rollout; index: number }) {
  const title = "told again, not sampled: the rollout went on from a later turn of its parent";
  const parent = rollout.siblings.find((one) => one.rollout_id === rollout.parent_id);
  if (!parent) return <span className="badge" title={`${title}, which is of another run or was deleted`}>of its parent</span>;
  return <Link className="badge" title={title} to={rolloutPage(rollout.run_id, parent.rollout_id, index)}>of its parent</Link>;
}

function RolloutHead(props: { rollout: Rollout; follow: boolean; setFollow: (on: boolean) => void; step: (by: number) => void }) {
  const { rollout } = props;
  const at = rollout.siblings.findIndex((one) => one.rollout_id === rollout.rollout_id);
  return (
    <PageHead
      crumbs={[
        { label: "Runs", to: "/" },
        runCrumb(rollout),
        { label: sourceName(rollout.phase, rollout.step), to: sourcePage(rollout.run_id, rollout.phase, rollout.step) },
        { label: `Group ${rollout.group_index + 1}`, to: groupPage(rollout, rollout.group_id) },
        { label: `Rollout ${rollout.member_index + 1}` },
      ]}
      title={rollout.instruction ?? rollout.task_id}
      note={
        <>
          <Link className="text-link" to={taskPage(rollout.run_id, rollout.task_id)}>{rollout.task_id}</Link>
          <span>seed {rollout.seed}</span>
          {rollout.category && <span>· {rollout.category}</span>}
          {rollout.difficulty && <span>· {rollout.difficulty}</span>}
        </>
      }
      actions={
        <>
          {rollout.status === "running" && rollout.is_run_alive && (
            <button type="button" className="button" aria-pressed={props.follow} onClick={() => props.setFollow(!props.follow)}>
              <Icon name="follow" /> Follow
            </button>
          )}
          {rollout.siblings.length > 1 && (
            <span className="row">
              <button type="button" className="button icon" aria-label="Previous rollout of the group" title="Previous rollout of the group  [" disabled={at <= 0} onClick={() => props.step(-1)}>
                <Icon name="left" />
              </button>
              <span className="dim num">{at + 1} / {rollout.siblings.length}</span>
              <button type="button" className="button icon" aria-label="Next rollout of the group" title="Next rollout of the group  ]" disabled={at + 1 >= rollout.siblings.length} onClick={() => props.step(1)}>
                <Icon name="right" />
              </button>
            </span>
          )}
          <Share rollout={rollout} />
        </>
      }
    />
  );
}

const FILMS = [
  { key: "g", label: "GIF", title: "A film of the screenshots with the actions drawn on them  g", path: "film" },
  { key: "w", label: "WebP", title: "The same film in all its colours, and smaller; not every program shows it  w", path: "film?kind=webp" },
] as const;

/** Files for somebody else, and the address. */
function Share({ rollout }: { rollout: Rollout }) {
  const hasScreens = rollout.turns.some((turn) => turn.before ?? turn.after);
  const files = [
    { key: "e", label: "HTML", title: "One page with turns, tokens and screenshots, which opens without the monitor  e", href: exportPath(rollout.run_id, rollout.rollout_id, "page") },
    ...(hasScreens ? FILMS.map((one) => ({ ...one, href: exportPath(rollout.run_id, rollout.rollout_id, one.path) })) : []),
    { key: "", label: "JSON", title: "Turns and tokens as they are recorded", href: downloadPath(rollout.run_id, rollout.rollout_id) },
  ];
  useShortcuts(Object.fromEntries(files.filter((one) => one.key).map((one) => [one.key, () => document.getElementById(`save-${one.label}`)?.click()])));
  return (
    <>
      {files.map((one) => (
        <a key={one.label} id={`save-${one.label}`} className="button" href={one.href} download title={one.title}>
          <Icon name="download" /> {one.label}
        </a>
      ))}
      <CopyLink of="this turn" />
    </>
  );
}

function validatorSays(rollout: Rollout): string {
  return rollout.success === null ? "nothing" : rollout.success ? "success" : "failure";
}

function RolloutStats({ rollout }: { rollout: Rollout }) {
  const versions = [...new Set(rollout.turns.map((turn) => turn.policy_version))].sort((a, b) => a - b);
  const first = versions[0];
  return (
    <dl className="stats">
      <Stat label="Outcome"><Outcome success={shownSuccess(rollout)} fault={rollout.status === "failed"} />{rollout.override_success !== null && <small>overridden, validator: {validatorSays(rollout)}</small>}</Stat>
      <Stat label="Reward">
        {formatNumber(rollout.override_reward ?? rollout.reward)}
        {rollout.override_reward !== null && <small>overridden, trained on {formatNumber(rollout.reward)}</small>}
        {rollout.override_success !== null && rollout.override_reward === null && <small>as it was trained on; verdicts do not change it</small>}
      </Stat>
      <Stat label="Advantage">{formatSigned(rollout.advantage)}</Stat>
      <Stat label="Turns">{rollout.num_turns}<small>of {rollout.max_turns ?? "–"}{rollout.fork_turn > 0 && `, ${rollout.fork_turn} of its parent`}</small></Stat>
      <Stat label="Ended by">{rollout.stop_reason ? endText(rollout) : <StatusBadge status={rollout.status} alive={rollout.is_run_alive} />}</Stat>
      <Stat label="Adapter" hint="The adapter that sampled the turns">{first === undefined ? "–" : <span className="mono">{versions.length > 1 ? `${first}–${versions.at(-1)}` : adapterName(first)}</span>}</Stat>
      <Stat label="Duration">{formatDuration(rollout.duration_s)}</Stat>
      <Stat label="Device">{rollout.device_id ?? "–"}</Stat>
    </dl>
  );
}

function TurnPanels({ rollout, turn }: { rollout: Rollout; turn: TurnDetail }) {
  const tokens = useQuery<TurnTokens>(tokensPath(rollout.run_id, rollout.rollout_id, turn.turn_index));
  const [before, setBefore] = useState<TurnTokens>();
  useEffect(() => {
    if (tokens.data) setBefore(tokens.data);
  }, [tokens.data]);
  const shown = tokens.data ?? (before?.turn_index === turn.turn_index ? before : undefined);
  return (
    <div className="stack">
      <Panel title="Model output" actions={<span className="faint num">{plural(turn.num_sampled_tokens, "token")}, stop: {turn.stop}</span>}>
        <div className="stack">
          <ModelOutput turn={turn} />
          {tokens.error && !shown ? <div className="notice bad">{tokens.error.message}</div> : null}
          {shown ? <TokenStrip tokens={shown} turn={turn} rollout={rollout} /> : !tokens.error && <div className="skeleton" style={{ height: 120 }} />}
        </div>
      </Panel>
      <AskedCheckpoints rollout={rollout} turn={turn} />
      <Panel title="Timings" actions={<span className="faint num">{turn.turn_index < rollout.fork_turn ? "before the start" : `${formatDuration(turn.started_s)} after the start`}</span>}>
        <StageTimings turn={turn} />
      </Panel>
      <Panel title="What the model saw">
        <PromptView turn={turn} tokens={shown} missing={rollout.pruned_at ? "pruned" : undefined} />
      </Panel>
    </div>
  );
}

function ModelOutput({ turn }: { turn: TurnDetail }) {
  return (
    <div className="model-output" tabIndex={0} role="group" aria-label="What the model generated">
      {turn.thinking && (
        <div className="thinking">
          <h3>Thinking</h3>
          <p>{turn.thinking}</p>
        </div>
      )}
      {turn.answer.trim() && (
        <div>
          <h3>Text</h3>
          <p>{turn.answer.trim()}</p>
        </div>
      )}
      {turn.tool_calls.map((call, index) => (
        <div key={index}>
          <h3>Tool call</h3>
          <code className="tool-call"><b>{call.name}</b> {call.arguments}</code>
        </div>
      ))}
      {turn.failure_kind && (
        <div className="notice bad"><b>{words(turn.failure_kind)}</b> {turn.failure_message}</div>
      )}
      {turn.action_error && <div className="notice warn"><b>Shown to the agent</b> {turn.action_error}</div>}
    </div>
  );
}
