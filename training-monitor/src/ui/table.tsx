import { useMemo, useState, type ReactNode } from "react";
import { useSearchParam } from "../router";

type Value = number | string | null | undefined;

export type Column<Row> = {
  label: string;
  right?: boolean;
  /** The heading is only spoken. */
  hidden?: boolean;
  title?: string;
  /** What the column is sorted by; a column without it cannot be. */
  value?: (row: Row) => Value;
  /** What the server calls it, which then sorts. */
  sort?: string;
};

function compared(a: Value, b: Value): number {
  if (a == null || b == null) return a == null ? (b == null ? 0 : 1) : -1; // what is unknown comes last
  return typeof a === "string" || typeof b === "string" ? String(a).localeCompare(String(b)) : a - b;
}

/** The order that the address names (`?sort=-Success`: from the largest), and the header that changes it. */
export function useHead<Row>(columns: readonly Column<Row>[], name = "sort", without = ""): { chosen: Column<Row> | undefined; falls: boolean; head: ReactNode } {
  const [sort, setSort] = useSearchParam(name, without);
  const falls = sort.startsWith("-");
  const keyOf = (one: Column<Row>) => one.sort ?? (one.value ? one.label : null);
  const chosen = columns.find((one) => keyOf(one) === sort.replace(/^-/, ""));
  const turn = (one: Column<Row>) => setSort(chosen !== one ? `-${keyOf(one)}` : falls ? (keyOf(one) ?? "") : without);
  const head = (
    <tr>
      {columns.map((one) => (
        <th key={one.label} className={one.right ? "right" : undefined} title={one.title} aria-sort={keyOf(one) ? (chosen === one ? (falls ? "descending" : "ascending") : "none") : undefined}>
          {keyOf(one) ? <button type="button" onClick={() => turn(one)}>{one.label}{chosen === one ? (falls ? " ↓" : " ↑") : ""}</button> : one.hidden ? <span className="sr-only">{one.label}</span> : one.label}
        </th>
      ))}
    </tr>
  );
  return { chosen, falls, head };
}

/** Rows in the order that the address names, and the header that changes it. */
export function useSorted<Row>(rows: readonly Row[], columns: readonly Column<Row>[], name = "sort"): { sorted: readonly Row[]; head: ReactNode; isSorted: boolean } {
  const { chosen, falls, head } = useHead(columns, name);
  const sorted = useMemo(() => {
    const value = chosen?.value;
    if (!value) return rows;
    return [...rows].sort((a, b) => {
      const [one, other] = [value(a), value(b)];
      return falls && one != null && other != null ? compared(other, one) : compared(one, other);
    });
  }, [rows, chosen?.label, falls]);
  return { sorted, head, isSorted: chosen !== undefined };
}

/** Rows that the monitor has beyond those that came: how many there are, and how to ask for the first `count`. */
type Rest = { total: number; most: number; load: (count: number) => void };

/** The first rows of a long table, and a line below it that says how many there are and shows more. */
export function useMore<Row>(rows: readonly Row[], size: number, rest?: Rest): { shown: readonly Row[]; more: ReactNode } {
  const [count, setCount] = useState(size);
  const total = Math.max(rows.length, rest?.total ?? 0);
  const shown = rows.slice(0, count);
  if (total <= shown.length) return { shown, more: null };
  const most = rest ? Math.min(total, Math.max(rest.most, rows.length)) : total;
  const show = (wanted: number) => {
    setCount(wanted);
    if (wanted > rows.length && rows.length < most) rest?.load(Math.min(wanted, most));
  };
  const next = Math.min(size, most - shown.length);
  const more = (
    <div className="row wrap between panel-body">
      <span className="dim num">{shown.length.toLocaleString("en-US")} of {total.toLocaleString("en-US")} are shown</span>
      {next > 0 && (
        <span className="row">
          <button type="button" className="button" onClick={() => show(shown.length + next)}>Show {next} more</button>
          <button type="button" className="button quiet" onClick={() => show(most)}>Show {most < total ? most.toLocaleString("en-US") : "all"}</button>
        </span>
      )}
    </div>
  );
  return { shown, more };
}
