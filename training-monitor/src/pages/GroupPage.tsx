import { useEffect, useMemo, useState, type KeyboardEvent } from "react";
import { useQuery, useRefresh } from "../api/cache";
import { groupPath, judgedPage, rolloutPage, setPage, sourceName, sourcePage, taskPage } from "../api/paths";
import type { ClockRollout, GroupDetail } from "../api/types";
import { formatDuration, formatNumber, formatSigned, words } from "../format";
import { describeAction } from "../rollout/actions";
import { endText, shownSuccess } from "../rollout/verdict";
import { ChoosePair, PairLink, usePair, type Pair } from "../rollout/pair";
import { Screenshot } from "../rollout/Screenshot";
import { Link, navigate, useSearchParam } from "../router";
import { runCrumb } from "../runs";
import { Icon } from "../ui/icons";
import { useShortcuts } from "../ui/keys";
import { Empty, Loaded, Outcome, PageHead, Panel, Stat, StatusBadge } from "../ui/parts";

/** The rollouts of a group side by side, on one clock. */
export function GroupPage(props: { runId: string; phase: string; step: string; groupId: string }) {
  const query = useQuery<GroupDetail>(groupPath(props.runId, props.phase, props.step, props.groupId));
  useRefresh(query.reload, query.data?.group.status === "running" && query.data.is_run_alive);
  return <Loaded query={query} height={480}>{(detail) => <GroupView detail={detail} />}</Loaded>;
}

type Moment = { turn: number; acting: boolean };

/** The turn under way at a time, and whether its action has not yet been done; before the first turn, the first. */
function momentOf(rollout: ClockRollout, time: number): Moment {
  let at = 0;
  for (const [index, turn] of rollout.turns.entries()) {
    if (turn.started_s <= time) at = index;
  }
  const turn = rollout.turns[at];
  return { turn: at, acting: !turn || time < turn.started_s + turn.duration_s };
}

function GroupView({ detail }: { detail: GroupDetail }) {
  const { group } = detail;
  const [timeText, setTimeText] = useSearchParam("t");
  const [playing, setPlaying] = useState(false);
  const pair = usePair();
  const duration = Math.max(0.01, detail.duration_s);
  const time = timeText === "" ? duration : Math.min(duration, Number(timeText) || 0);
  useEffect(() => {
    if (!playing) return;
    const rate = duration / 12; // a group takes twelve seconds, however long it ran
    const timer = window.setInterval(() => {
      const now = Number(new URLSearchParams(window.location.search).get("t") ?? duration);
      const next = now + rate * 0.1;
      if (next >= duration) setPlaying(false);
      setTimeText(next >= duration ? "" : next.toFixed(2));
    }, 100);
    return () => window.clearInterval(timer);
  }, [playing, duration, setTimeText]);
  const start = () => {
    if (!playing && time >= duration) setTimeText("0");
    setPlaying(!playing);
  };
  const moments = useMemo(() => turnTimes(detail.rollouts), [detail.rollouts]);
  const jump = (direction: number) => {
    const text = new URLSearchParams(window.location.search).get("t"); // keys may come faster than pages
    const now = text === null ? duration : Number(text) || 0;
    const next = direction > 0 ? moments.find((at) => at > now + 0.005) : moments.findLast((at) => at < now - 0.005);
    if (next !== undefined) setTimeText(next >= duration ? "" : next.toFixed(2));
  };
  useShortcuts({
    " ": start,
    ArrowLeft: () => jump(-1),
    ArrowRight: () => jump(1),
    u: () => navigate(sourcePage(detail.run_id, detail.phase, detail.step)),
  });
  return (
    <>
      <PageHead
        crumbs={[
          { label: "Runs", to: "/" },
          runCrumb(detail),
          { label: sourceName(detail.phase, detail.step), to: sourcePage(detail.run_id, detail.phase, detail.step) },
          { label: `Group ${group.group_index + 1}` },
        ]}
        title={group.instruction ?? group.task_id}
        note={<>{detail.phase === "step" && group.is_constant && <span className="badge">constant: no learning signal</span>} <Link className="text-link" to={taskPage(detail.run_id, group.task_id)}>{group.task_id}</Link> seed {group.seed}{group.category ? ` · ${group.category}` : ""}</>}
      />
      <dl className="stats">
        <Successes detail={detail} />
        <Stat label="Reward">{formatNumber(group.reward_mean, 3)}<small>± {formatNumber(group.reward_std, 2)}</small></Stat>
        <Stat label="Faults"><Link className="text-link" to={setPage({ ...setOf(detail), verdict: "fault" })}>{group.num_faulty ?? 0}</Link></Stat>
        <Stat label="Replayed">{group.replays.length}</Stat>
        <Stat label="Took">{formatDuration(detail.duration_s)}</Stat>
      </dl>
      <Panel
        title="On a common time axis"
        actions={
          <>
            <button type="button" className="button icon" aria-label={playing ? "Pause" : "Play"} title="Play  Space" onClick={start}>
              <Icon name={playing ? "pause" : "play"} />
            </button>
            <input
              className="clock"
              type="range"
              min={0}
              max={duration}
              step={duration / 400}
              value={time}
              aria-label="Time since the group began"
              aria-valuetext={formatDuration(time)}
              onChange={(event) => setTimeText(Number(event.target.value) >= duration ? "" : Number(event.target.value).toFixed(2))}
            />
            <span className="num dim clock-time">{formatDuration(time)} / {formatDuration(duration)}</span>
          </>
        }
      >
        {detail.rollouts.length === 0 ? (
          <Empty title="No rollout has started"><p>Rollouts appear here automatically.</p></Empty>
        ) : (
          <>
            <Lanes detail={detail} time={time} duration={duration} seek={(at) => setTimeText(at >= duration ? "" : at.toFixed(2))} />
            <div className="side-by-side">
              {detail.rollouts.map((rollout) => <Member key={rollout.rollout_id} rollout={rollout} detail={detail} time={time} pair={pair} />)}
            </div>
            <PairLink pair={pair} />
          </>
        )}
      </Panel>
    </>
  );
}

/** As the badges below have them, verdicts of people included; what the validator said stands beside it. */
function Successes({ detail }: { detail: GroupDetail }) {
  const { group, rollouts } = detail;
  const hasEnded = group.num_rollouts !== null;
  const judged = rollouts.filter((rollout) => shownSuccess(rollout) !== null && rollout.status !== "failed");
  const isOverridden = rollouts.some((rollout) => rollout.override_success !== null);
  const byValidator = isOverridden ? `, ${judged.filter((rollout) => rollout.success).length} by the validator` : "";
  return (
    <Stat label="Successes">
      {judged.length ? judged.filter(shownSuccess).length : "–"}
      <small><Link className="text-link" to={hasEnded ? judgedPage(setOf(detail)) : setPage(setOf(detail))}>of {hasEnded ? judged.length : rollouts.length}</Link>{byValidator}</small>
    </Stat>
  );
}

const setOf = (detail: GroupDetail) => ({ run_id: detail.run_id, phase: detail.phase, step: detail.step, group_id: detail.group.group_id });

function turnTimes(rollouts: readonly ClockRollout[]): number[] {
  return rollouts.flatMap((rollout) => rollout.turns.flatMap((turn) => [turn.started_s, turn.started_s + turn.duration_s])).sort((a, b) => a - b);
}

function Lanes(props: { detail: GroupDetail; time: number; duration: number; seek: (time: number) => void }) {
  const { detail, time, duration } = props;
  const percent = (seconds: number) => `${(seconds / duration) * 100}%`;
  const keys = (event: KeyboardEvent) => event.stopPropagation();
  return (
    <div className="lanes" onKeyDown={keys}>
      {detail.rollouts.map((rollout) => (
        <div key={rollout.rollout_id} className="lane">
          <span className="lane-name num">{rollout.member_index + 1}</span>
          <span className="lane-track">
            {rollout.turns.map((turn) => (
              <button
                key={turn.turn_index}
                type="button"
                className={`lane-turn ${turn.turn_index < rollout.fork_turn ? "told" : turn.failure_kind || turn.action_error ? "troubled" : ""}`}
                style={{ left: percent(turn.started_s), width: percent(turn.duration_s) }}
                tabIndex={-1}
                aria-label={`Rollout ${rollout.member_index + 1}, turn ${turn.turn_index + 1}, ${formatDuration(turn.duration_s)}`}
                title={`turn ${turn.turn_index + 1}${turn.turn_index < rollout.fork_turn ? " of its parent" : ""}: ${describeAction(turn.action)?.line ?? turn.failure_kind ?? "no action"}`}
                onClick={() => props.seek(turn.started_s)}
              />
            ))}
            <i className="lane-now" style={{ left: percent(time) }} />
          </span>
        </div>
      ))}
    </div>
  );
}

function Member({ rollout, detail, time, pair }: { rollout: ClockRollout; detail: GroupDetail; time: number; pair: Pair }) {
  const moment = momentOf(rollout, time);
  const turn = rollout.turns[moment.turn];
  const sha256 = turn ? (moment.acting ? turn.before_sha256 : (turn.after_sha256 ?? turn.before_sha256)) : null;
  const end = rollout.started_s + (rollout.duration_s ?? Number.POSITIVE_INFINITY);
  const isBehind = time >= end && time < detail.duration_s; // it has ended while others go on
  return (
    <article className={`member ${isBehind ? "ended" : ""}`}>
      <Link to={rolloutPage(detail.run_id, rollout.rollout_id, moment.turn)} aria-label={`Rollout ${rollout.member_index + 1}, turn ${moment.turn + 1}`} data-row>
        <Screenshot sha256={sha256} action={moment.acting ? turn?.action : null} alt={`Rollout ${rollout.member_index + 1} at this time`} />
      </Link>
      <div className="row between">
        <span className="row"><ChoosePair pair={pair} one={{ run_id: detail.run_id, rollout_id: rollout.rollout_id }} label={`rollout ${rollout.member_index + 1}`} /><b className="num">#{rollout.member_index + 1}</b></span>
        {rollout.status === "running" ? <StatusBadge status="running" alive={detail.is_run_alive} /> : <Outcome success={shownSuccess(rollout)} fault={rollout.status === "failed"} />}
      </div>
      <div className="member-facts num">
        <span>turn {moment.turn + 1}/{rollout.turns.length}</span>
        <span title="as it was trained on">reward {formatNumber(rollout.reward, 3)}</span>
        {rollout.advantage !== null && <span title="as it was trained on">advantage {formatSigned(rollout.advantage)}</span>}
      </div>
      <div className="faint truncate">{moment.acting ? (describeAction(turn?.action)?.line ?? words(turn?.failure_kind ?? "no action")) : endText(rollout)}</div>
    </article>
  );
}
