import { useState } from "react";
import { describeAction, type ShownAction, type StoredAction } from "./actions";

export type ScreenshotProps = {
  sha256: string | null | undefined;
  width?: number | null | undefined;
  height?: number | null | undefined;
  action?: StoredAction | null | undefined;
  alt: string;
  lazy?: boolean;
  /** What is said of one that the server does not have. */
  missing?: string | undefined;
  className?: string;
};

/** Where the bytes of a screenshot are: named by their content, so they never change. */
export function screenshotUrl(sha256: string): string {
  return `/api/screenshots/${sha256}`;
}

/** A screenshot with the action drawn on it. */
export function Screenshot(props: ScreenshotProps) {
  const { sha256, action, alt } = props;
  const [natural, setNatural] = useState<[number, number] | null>(null);
  const [failed, setFailed] = useState<string | null>(null);
  const shown = describeAction(action);
  if (!sha256) {
    return <div className={`screen missing ${props.className ?? ""}`}>no screenshot</div>;
  }
  if (failed === sha256) {
    return <div className={`screen missing ${props.className ?? ""}`}>{props.missing ?? "screenshot not stored"}</div>;
  }
  const width = props.width ?? natural?.[0] ?? 0;
  const height = props.height ?? natural?.[1] ?? 0;
  return (
    <div className={`screen ${props.className ?? ""}`} style={width && height ? { aspectRatio: `${width} / ${height}` } : undefined}>
      <img
        {...(props.lazy ? { loading: "lazy" as const } : {})}
        src={screenshotUrl(sha256)}
        alt={shown && alt ? `${alt}; ${shown.line}` : alt}
        decoding="async"
        draggable={false}
        {...(width && height ? { width, height } : {})}
        onLoad={(event) => setNatural([event.currentTarget.naturalWidth, event.currentTarget.naturalHeight])}
        onError={() => setFailed(sha256)}
      />
      {shown && width > 0 && height > 0 && <ActionOverlay action={shown} width={width} height={height} />}
      {shown?.caption && <span className="screen-caption">{shown.caption}</span>}
    </div>
  );
}

function ActionOverlay({ action, width, height }: { action: ShownAction; width: number; height: number }) {
  if (!action.at) return null;
  const [x, y] = action.at;
  const size = Math.min(width, height) * 0.045;
  const stroke = size * 0.28;
  return (
    <svg className="screen-overlay" viewBox={`0 0 ${width} ${height}`} aria-hidden="true" data-action={action.type}>
      {[
        { color: "rgb(0 0 0 / 65%)", width: stroke * 2.1 },
        { color: "var(--mark)", width: stroke },
      ].map((pass) => (
        <g key={pass.color} fill="none" stroke={pass.color} strokeWidth={pass.width} strokeLinecap="round">
          <Mark action={action} x={x} y={y} size={size} />
        </g>
      ))}
      <circle cx={x} cy={y} r={stroke * 0.9} fill="var(--mark)" />
      <MarkLetter action={action} x={x} y={y} size={size} width={width} />
    </svg>
  );
}

type MarkProps = { action: ShownAction; x: number; y: number; size: number };

function Mark({ action, x, y, size }: MarkProps) {
  if (action.to) return <Arrow from={[x, y]} to={action.to} size={size} />;
  const ring = size * 1.25;
  const ticks = [
    [0, -1],
    [0, 1],
    [-1, 0],
    [1, 0],
  ] as const;
  return (
    <>
      <circle cx={x} cy={y} r={ring} />
      {action.type === "DoubleClick" && <circle cx={x} cy={y} r={ring * 1.6} />}
      {action.type === "LongPress" && <circle cx={x} cy={y} r={ring * 1.6} strokeDasharray={`${ring} ${ring * 0.6}`} />}
      {action.type !== "DoubleClick" &&
        action.type !== "LongPress" &&
        ticks.map(([dx, dy]) => (
          <line key={`${dx}${dy}`} x1={x + dx * ring} y1={y + dy * ring} x2={x + dx * ring * 1.55} y2={y + dy * ring * 1.55} />
        ))}
    </>
  );
}

function Arrow({ from, to, size }: { from: [number, number]; to: [number, number]; size: number }) {
  const angle = Math.atan2(to[1] - from[1], to[0] - from[0]);
  const wing = (turn: number) =>
    `${to[0] - size * 1.5 * Math.cos(angle + turn)},${to[1] - size * 1.5 * Math.sin(angle + turn)}`;
  return (
    <>
      <circle cx={from[0]} cy={from[1]} r={size * 0.9} />
      <line x1={from[0]} y1={from[1]} x2={to[0]} y2={to[1]} />
      <polyline points={`${wing(0.5)} ${to[0]},${to[1]} ${wing(-0.5)}`} />
    </>
  );
}

const LETTERS: Record<string, string> = { DoubleClick: "2×", RightClick: "right", LongPress: "hold", Scroll: "scroll", MoveMouse: "move" };

function MarkLetter({ action, x, y, size, width }: MarkProps & { width: number }) {
  const letter = LETTERS[action.type];
  if (!letter) return null;
  const left = x + size * 9 > width;
  return (
    <text
      x={left ? x - size * 2.4 : x + size * 2.4}
      y={y + size * 0.6}
      textAnchor={left ? "end" : "start"}
      fontSize={size * 1.7}
      fontWeight={700}
      fill="var(--mark)"
      stroke="rgb(0 0 0 / 75%)"
      strokeWidth={size * 0.35}
      paintOrder="stroke"
    >
      {letter}
    </text>
  );
}
