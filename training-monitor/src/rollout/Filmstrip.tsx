import { useEffect, useRef } from "react";
import type { TurnDetail } from "../api/types";
import { formatDuration } from "../format";
import { describeAction } from "./actions";
import { Screenshot } from "./Screenshot";

/** What happened in a turn, in a word. */
export function turnVerb(turn: Pick<TurnDetail, "action" | "failure_kind" | "action_error">): string {
  if (turn.failure_kind) return turn.failure_kind.replaceAll("_", " ");
  if (turn.action_error && !turn.action) return "refused";
  return describeAction(turn.action)?.verb ?? "ends";
}

/** Every turn as a small screenshot, the first `told` as those of the parent; the chosen one stays in sight. */
export function Filmstrip(props: { turns: readonly TurnDetail[]; told: number; chosen: number; onChoose: (turn: number) => void }) {
  const { turns, chosen, onChoose } = props;
  const strip = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const frame = strip.current?.children[chosen] as HTMLElement | undefined;
    const box = strip.current;
    if (!frame || !box) return;
    const [left, right] = [frame.offsetLeft - 40, frame.offsetLeft + frame.offsetWidth + 40];
    if (left < box.scrollLeft) box.scrollLeft = left;
    else if (right > box.scrollLeft + box.clientWidth) box.scrollLeft = right - box.clientWidth;
  }, [chosen, turns.length]);
  return (
    <div className="filmstrip" ref={strip} role="group" aria-label="Turns">
      {turns.map((turn, index) => {
        const verb = turnVerb(turn);
        const troubled = turn.failure_kind !== null || turn.action_error !== null;
        return (
          <button
            key={turn.turn_index}
            type="button"
            className={`frame ${troubled ? "troubled" : ""} ${index < props.told ? "told" : ""}`}
            aria-current={index === chosen ? "step" : undefined}
            onClick={() => onChoose(index)}
          >
            <Screenshot
              sha256={turn.before?.sha256}
              width={turn.before?.width_px}
              height={turn.before?.height_px}
              action={turn.action}
              alt=""
              lazy={turns.length > 12}
            />
            <span className="frame-label">
              <span className="sr-only">{index < props.told ? "Turn of its parent" : "Turn"}</span> <b className="num">{turn.turn_index + 1}</b>{" "}
              <span className="truncate">{verb}</span>
              <span className="faint num">{formatDuration(turn.duration_s)}</span>
            </span>
          </button>
        );
      })}
    </div>
  );
}
