import { useState } from "react";
import { useQuery } from "../api/cache";
import { askedPath, rolloutPage } from "../api/paths";
import type { AskedAnswer, AskedCheckpoint, AskedTurn, Rollout, TurnDetail } from "../api/types";
import { formatNumber, plural } from "../format";
import { Link } from "../router";
import { Panel } from "../ui/parts";
import { describeAction } from "./actions";
import { screenshotUrl } from "./Screenshot";

/** What checkpoints answer to a turn, and how likely each finds the answer that was recorded; nothing if none was asked. */
export function AskedCheckpoints({ rollout, turn }: { rollout: Rollout; turn: TurnDetail }) {
  const { data = [] } = useQuery<AskedTurn[]>(askedPath(rollout.run_id, rollout.rollout_id));
  const [pointed, point] = useState<number | null>(null);
  const asked = data.find((one) => one.turn_index === turn.turn_index);
  const others = data.filter((one) => one !== asked);
  if (data.length === 0) return null;
  return (
    <Panel title={<>Checkpoints asked {asked && <span className="faint">{asked.checkpoints.length} about this turn, at temperature {formatNumber(asked.temperature)}</span>}</>}>
      <div className="stack" data-testid="asked">
        {asked && (
          <>
            <div className="asked">
              <Clicks asked={asked} turn={turn} pointed={pointed} />
              <Curve asked={asked} pointed={pointed} />
            </div>
            <Answers asked={asked} point={point} />
          </>
        )}
        {others.length > 0 && (
          <p className="row wrap dim">
            {asked ? "Also asked about" : "Asked about"} {others.map((one) => <Link key={one.turn_index} className="text-link" to={rolloutPage(rollout.run_id, rollout.rollout_id, one.turn_index)}>turn {one.turn_index + 1}</Link>)}
          </p>
        )}
      </div>
    </Panel>
  );
}

/** From blue to red, in the order in which they were asked. */
const colorOf = (index: number, count: number) => `hsl(${Math.round(223 * (1 - index / Math.max(1, count - 1)))} 80% 50%)`;

function placesOf(answers: readonly AskedAnswer[]): [number, number][] {
  return answers.flatMap(({ actions }) => actions.flatMap((action) => {
    const at = describeAction(action)?.at;
    return at ? [at] : [];
  }));
}

/** The screenshot with a ring where answers act: those of later checkpoints are wider. */
function Clicks({ asked, turn, pointed }: { asked: AskedTurn; turn: TurnDetail; pointed: number | null }) {
  const screen = turn.before;
  if (!screen?.width_px || !screen.height_px) return null;
  const { width_px: width, height_px: height } = screen;
  const unit = Math.min(width, height) * 0.02;
  const count = asked.checkpoints.length;
  const placed = asked.checkpoints.reduce((sum, one) => sum + placesOf(one.samples).length, 0);
  return (
    <div className="screen asked-screen" style={{ aspectRatio: `${width} / ${height}` }}>
      <img src={screenshotUrl(screen.sha256)} alt={`Screenshot before turn ${asked.turn_index + 1} with ${plural(placed, "action")} that checkpoints answered`} width={width} height={height} decoding="async" />
      <svg className="screen-overlay" viewBox={`0 0 ${width} ${height}`} aria-hidden="true">
        {asked.checkpoints.map((one, index) =>
          placesOf(one.samples).map(([x, y], sample) => (
            <circle key={`${index}.${sample}`} cx={x} cy={y} r={unit * (1.4 + (4 * index) / Math.max(1, count - 1))} fill="none" stroke={colorOf(index, count)} strokeWidth={unit * 0.5} opacity={pointed === null || pointed === index ? 1 : 0.12}>
              <title>{one.name}</title>
            </circle>
          )),
        )}
        {placesOf([asked.recorded]).map(([x, y], index) => <circle key={index} cx={x} cy={y} r={unit * 0.7} fill="white" stroke="black" strokeWidth={unit * 0.35} />)}
      </svg>
    </div>
  );
}

const [WIDTH, HEIGHT, EDGE] = [260, 150, 12];

/** The log-probability of the recorded answer under each checkpoint; dotted: as it was sampled. */
function Curve({ asked, pointed }: { asked: AskedTurn; pointed: number | null }) {
  const values = asked.checkpoints.map((one) => one.logprob);
  const known = [...values, asked.logprob].filter((value): value is number => value !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const x = (index: number) => EDGE + ((WIDTH - 2 * EDGE) * index) / Math.max(1, values.length - 1);
  const y = (value: number) => (high > low ? EDGE + ((HEIGHT - 2 * EDGE) * (high - value)) / (high - low) : HEIGHT / 2);
  const points = values.flatMap((value, index) => (value === null ? [] : [{ index, value }]));
  const [first, last] = [asked.checkpoints[0], asked.checkpoints.at(-1)];
  return (
    <figure className="asked-curve">
      <figcaption>Log-probability of the recorded answer <span className="faint num">{formatNumber(low, 3)} to {formatNumber(high, 3)} nats</span></figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`From ${formatNumber(values[0], 3)} under ${first?.name} to ${formatNumber(values.at(-1), 3)} under ${last?.name}`}>
        {asked.logprob !== null && <line x1="0" x2={WIDTH} y1={y(asked.logprob)} y2={y(asked.logprob)} stroke="var(--text-dim)" strokeDasharray="2 4" />}
        <polyline points={points.map(({ index, value }) => `${x(index)},${y(value)}`).join(" ")} fill="none" stroke="var(--line-strong)" strokeWidth="1.5" />
        {points.map(({ index, value }) => (
          <circle key={index} cx={x(index)} cy={y(value)} r={pointed === index ? 6.5 : 4.5} fill={colorOf(index, values.length)}>
            <title>{`${asked.checkpoints[index]?.name}: ${formatNumber(value)} nats`}</title>
          </circle>
        ))}
      </svg>
      <div className="row between faint"><span>{first?.name}</span><span>dotted: as sampled</span><span>{last?.name}</span></div>
    </figure>
  );
}

const MOST_KINDS = 3;

/** What an answer does, in words; its text if the agent cannot read it. */
const told = ({ actions, done }: AskedAnswer) => actions.map((action) => describeAction(action)?.line).join(", ") || done;

function counted(answers: readonly AskedAnswer[]): [string, number][] {
  const counts = new Map<string, number>();
  for (const answer of answers) counts.set(told(answer), (counts.get(told(answer)) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

function Answers({ asked, point }: { asked: AskedTurn; point: (index: number | null) => void }) {
  const count = asked.checkpoints.length;
  return (
    <div className="table-scroll" tabIndex={0} role="group" aria-label="Answers of each checkpoint">
      <table className="data">
        <thead><tr><th>Checkpoint</th><th className="right" title="log-probability of the recorded answer">Recorded, nats</th><th className="right" title="mean difference of the recorded answer’s tokens from the log-probabilities with which it was sampled, nats">Gap</th><th className="right" title="answers that do what the recorded one does">Same</th><th>Answers</th></tr></thead>
        <tbody>
          <tr><td><i className="swatch recorded" /> recorded</td><td className="right">{formatNumber(asked.logprob, 4)}</td><td className="right faint">–</td><td className="right faint">–</td><td className="wrap">{told(asked.recorded)}</td></tr>
          {asked.checkpoints.map((one: AskedCheckpoint, index) => {
            const kinds = counted(one.samples);
            return (
              <tr key={one.name} onMouseEnter={() => point(index)} onMouseLeave={() => point(null)}>
                <td><i className="swatch" style={{ background: colorOf(index, count) }} /> {one.name} {one.is_own && <span className="badge" title="Its log-probabilities must be the recorded ones, within the run’s parity limit">sampled it</span>}</td>
                <td className="right">{formatNumber(one.logprob, 4)}</td>
                <td className="right">{formatNumber(one.mean_abs_gap, 2)}</td>
                <td className="right">{one.num_same} of {one.samples.length}</td>
                <td className="wrap">{kinds.slice(0, MOST_KINDS).map(([done, num]) => <div key={done}><span className="faint num">{num} ×</span> {done}</div>)}{kinds.length > MOST_KINDS && <span className="faint">and {kinds.length - MOST_KINDS} others</span>}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}
