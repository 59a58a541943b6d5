import { useRef, useState } from "react";
import { prefetch, useQuery } from "../api/cache";
import { rolloutPage, rolloutPath } from "../api/paths";
import type { Rollout, RolloutCell } from "../api/types";
import { formatNumber, formatSigned } from "../format";
import { Link } from "../router";
import { Screenshot } from "./Screenshot";
import { endText, shownSuccess } from "./verdict";

export type CellRollout = Pick<RolloutCell, "rollout_id" | "reward" | "success" | "status" | "stop_reason" | "advantage"> &
  Partial<Pick<RolloutCell, "num_turns" | "override_success" | "override_reward" | "error">>;

/** Which of the five reward colours fits. */
export function rewardBin(reward: number, range: [number, number]): number {
  const share = range[1] > range[0] ? (reward - range[0]) / (range[1] - range[0]) : 0;
  return Math.min(4, Math.max(0, Math.round(share * 4)));
}

function mark(rollout: CellRollout): string {
  if (rollout.status === "failed") return "!";
  if (rollout.status === "running") return "…";
  if (rollout.status === "cancelled") return "–";
  return shownSuccess({ success: rollout.success, override_success: rollout.override_success ?? null }) ? "✓" : "✕";
}

function spoken(rollout: CellRollout): string {
  const reward = rollout.reward === null ? "no reward" : `reward ${formatNumber(rollout.reward)}`;
  const advantage = rollout.advantage === null ? "" : `, advantage ${formatSigned(rollout.advantage)}`;
  const turns = rollout.num_turns === undefined ? "" : `, ${rollout.num_turns} turns`;
  const verdict = rollout.override_success == null ? "" : `, human verdict: ${rollout.override_success ? "success" : "failure"}`;
  return `${reward}${advantage}${turns}, ${endText(rollout)}${verdict}`;
}

type Props = { rollout: CellRollout; runId: string; range: [number, number]; replayed?: boolean };

/** A rollout as a coloured cell that leads to it; pointing at it shows how it ended. */
export function RolloutCellLink({ rollout, runId, range, replayed }: Props) {
  const [shown, setShown] = useState(false);
  const timer = useRef(0);
  const byHand = rollout.override_success ?? null;
  const reward = rollout.override_reward ?? (byHand === null ? rollout.reward : byHand ? range[1] : range[0]);
  const color = reward === null ? undefined : `var(--reward-${rewardBin(reward, range)})`;
  const enter = () => {
    timer.current = window.setTimeout(() => {
      prefetch(rolloutPath(runId, rollout.rollout_id));
      setShown(true);
    }, 180);
  };
  const leave = () => {
    window.clearTimeout(timer.current);
    setShown(false);
  };
  return (
    <span className="cell-holder" onMouseEnter={enter} onMouseLeave={leave}>
      <Link
        to={rolloutPage(runId, rollout.rollout_id)}
        className={`cell ${rollout.status} ${replayed ? "replayed" : ""} ${byHand === null ? "" : "by-hand"}`}
        style={{ background: color }}
        aria-label={`Rollout: ${spoken(rollout)}`}
        onFocus={enter}
        onBlur={leave}
      >
        <span aria-hidden="true">{mark(rollout)}</span>
        {rollout.stop_reason === "max_turns" && <i className="cell-edge" aria-hidden="true" />}
      </Link>
      {shown && <CellCard runId={runId} rollout={rollout} />}
    </span>
  );
}

function CellCard({ runId, rollout }: { runId: string; rollout: CellRollout }) {
  const { data } = useQuery<Rollout>(rolloutPath(runId, rollout.rollout_id));
  const last = data?.turns.at(-1);
  const screen = last?.after ?? last?.before;
  return (
    <span className="cell-card" aria-hidden="true">
      {screen ? (
        <Screenshot sha256={screen.sha256} width={screen.width_px} height={screen.height_px} action={last?.after ? null : last?.action} alt="" />
      ) : (
        <span className="screen missing">…</span>
      )}
      <span className="cell-card-text">{spoken(rollout)}</span>
      {data?.validation && <span className="cell-card-text faint">{data.validation.query}: {data.validation.actual}</span>}
      {rollout.error && <span className="cell-card-text warn">{rollout.error.slice(0, 160)}</span>}
    </span>
  );
}
