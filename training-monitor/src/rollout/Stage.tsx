import type { TurnDetail } from "../api/types";
import { describeAction } from "./actions";
import { Screenshot } from "./Screenshot";

/** The screenshot that the model saw with its action drawn on it, and what the device showed afterwards. */
export function Stage({ turn, playing }: { turn: TurnDetail; playing: boolean }) {
  const action = describeAction(turn.action);
  const wide = (turn.before?.width_px ?? 0) > (turn.before?.height_px ?? 1);
  return (
    <div className={`stage ${wide ? "wide" : ""} ${playing ? "playing" : ""}`} key={turn.turn_index}>
      <figure>
        <Screenshot
          sha256={turn.before?.sha256}
          width={turn.before?.width_px}
          height={turn.before?.height_px}
          action={turn.action}
          alt={`Screenshot before turn ${turn.turn_index + 1}`}
        />
        <figcaption>
          <b>Before</b> <span className="dim">{action?.line ?? (turn.failure_kind ? "no action could be parsed" : "no action: the answer ends the rollout")}</span>
        </figcaption>
      </figure>
      <figure className="after">
        {turn.after ? (
          <Screenshot
            sha256={turn.after.sha256}
            width={turn.after.width_px}
            height={turn.after.height_px}
            alt={`Screenshot after turn ${turn.turn_index + 1}`}
          />
        ) : (
          <div className="screen missing" style={{ aspectRatio: `${turn.before?.width_px ?? 3} / ${turn.before?.height_px ?? 5}` }}>no action was executed</div>
        )}
        <figcaption>
          <b>After</b> <span className="dim">{turn.after && turn.after.sha256 === turn.before?.sha256 ? "unchanged" : ""}</span>
        </figcaption>
      </figure>
    </div>
  );
}
