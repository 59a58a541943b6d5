/** A line the size of a word; null leaves a gap. */
export function Sparkline(props: {
  values: readonly (number | null)[];
  label: string;
  width?: number;
  height?: number;
  range?: [number, number];
}) {
  const { values, label, width = 120, height = 28 } = props;
  const known = values.filter((value): value is number => value !== null);
  if (known.length === 0) return <span className="faint">no data yet</span>;
  const [low, high] = props.range ?? [Math.min(...known), Math.max(...known)];
  const scale = high > low ? (height - 4) / (high - low) : 0;
  const step = values.length > 1 ? (width - 4) / (values.length - 1) : 0;
  const at = (value: number, index: number) =>
    `${(2 + index * step).toFixed(1)},${(height - 2 - (value - low) * scale).toFixed(1)}`;
  const points = values.flatMap((value, index) => (value === null ? [] : [at(value, index)]));
  const lastIndex = values.findLastIndex((value) => value !== null);
  const [x, y] = at(values[lastIndex] as number, lastIndex).split(",");
  return (
    <svg className="sparkline" width={width} height={height} viewBox={`0 0 ${width} ${height}`} role="img" aria-label={label}>
      <polyline points={points.join(" ")} fill="none" stroke="var(--accent)" strokeWidth="1.5" strokeLinejoin="round" />
      <circle cx={x} cy={y} r="2.4" fill="var(--accent)" />
    </svg>
  );
}
