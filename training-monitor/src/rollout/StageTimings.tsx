import type { TurnDetail } from "../api/types";
import { formatDuration, words } from "../format";

const COLORS: Record<string, string> = { respond: "var(--accent)", execute: "var(--good)", observe: "var(--warn)" };
const FALLBACKS = ["var(--info)", "#e07ac0", "#a98bf5"];

/** Where a turn's time went, to scale. */
export function StageTimings({ turn }: { turn: TurnDetail }) {
  const stages = Object.entries(turn.durations_s)
    .map(([name, seconds]) => ({ name, seconds: seconds ?? 0 }))
    .sort((a, b) => order(a.name) - order(b.name));
  const total = stages.reduce((sum, stage) => sum + stage.seconds, 0);
  if (total === 0) return <p className="faint">No stage was timed.</p>;
  const color = (name: string, index: number) => COLORS[name] ?? FALLBACKS[index % FALLBACKS.length] ?? "var(--info)";
  return (
    <div className="stack">
      <div className="timing-bar" role="img" aria-label={stages.map((stage) => `${stage.name} ${formatDuration(stage.seconds)}`).join(", ")}>
        {stages.map((stage, index) => (
          <i key={stage.name} style={{ width: `${(stage.seconds / total) * 100}%`, background: color(stage.name, index) }} />
        ))}
      </div>
      <dl className="timing-legend num">
        {stages.map((stage, index) => (
          <div key={stage.name} className="fact">
            <dt><i style={{ background: color(stage.name, index) }} />{words(stage.name)}</dt>
            <dd>{formatDuration(stage.seconds)}</dd>
          </div>
        ))}
        <div className="fact">
          <dt>of which the model server</dt>
          <dd>{formatDuration(turn.duration_s)}</dd>
        </div>
      </dl>
    </div>
  );
}

function order(name: string): number {
  const place = Object.keys(COLORS).indexOf(name);
  return place < 0 ? 99 : place;
}
