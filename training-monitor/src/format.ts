/** Numbers and times as people read them. */

const MINUS = "\u2212";

/** Four significant digits, thousands grouped, small numbers in powers of ten. */
export function formatNumber(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e9) return value.toExponential(Math.max(0, digits - 2)).replaceAll("-", MINUS);
  if (Number.isInteger(value)) return value.toLocaleString("en-US").replace("-", MINUS);
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value
    .toLocaleString("en-US", { maximumFractionDigits: Math.min(decimals, 9) })
    .replace("-", MINUS);
}

export function formatPercent(value: number | null | undefined, decimals = 0): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return `${(value * 100).toFixed(decimals)} %`;
}

/** $12.35, $0.25, $0.00083: two digits at least, however small. */
export function formatDollars(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const digits = value === 0 || value >= 1 ? { minimumFractionDigits: 2, maximumFractionDigits: 2 } : { minimumSignificantDigits: 2, maximumSignificantDigits: 2 };
  return value.toLocaleString("en-US", { style: "currency", currency: "USD", ...digits });
}

export function formatSigned(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  return value > 0 ? `+${formatNumber(value, 3)}` : formatNumber(value, 3);
}

/** 0.012 s, 3.4 s, 2 min 05 s, 3 h 12 min, 2 d 4 h. */
export function formatDuration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86_400) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}

export function formatAgo(iso: string | null | undefined, now = Date.now()): string {
  if (!iso) return "–";
  const seconds = Math.max(0, (now - Date.parse(iso)) / 1000);
  if (seconds < 10) return "just now";
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86_400)} d ago`;
}

export function formatTime(iso: string | null | undefined): string {
  if (!iso) return "–";
  return new Date(iso).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

/** "max_turns" as words: "max turns". */
export function words(name: string): string {
  return name.replaceAll("_", " ");
}

/** 640 B, 12 KB, 1.7 GB, in powers of a thousand. */
export function formatBytes(bytes: number): string {
  const power = Math.min(4, Math.floor(Math.log10(Math.max(1, bytes)) / 3));
  const value = bytes / 1000 ** power;
  return `${value < 9.95 && power > 0 ? value.toFixed(1) : Math.round(value)} ${["B", "KB", "MB", "GB", "TB"][power]}`;
}

export function plural(count: number, noun: string): string {
  return `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
}
