import { useEffect, useMemo, useRef, useState, type FormEvent, type KeyboardEvent } from "react";
import { ApiError, request, useQuery } from "../api/cache";
import { rolloutPage, sqlPath, taskPage } from "../api/paths";
import type { Run, SqlAnswer, SqlPage, SqlTable } from "../api/types";
import { MetricChart } from "../charts/MetricChart";
import { csvOf, download, paletteColor, type Series } from "../charts/series";
import { formatDuration, formatNumber, plural } from "../format";
import { Link, useSearchParam } from "../router";
import { Empty, Loaded, Panel, Problem } from "../ui/parts";
import { useMore } from "../ui/table";
import { CountBars } from "./TaskPage";

const MAX_LINES = 12;
const OWN = "cua_rl_queries";

type Own = Record<string, string>;

function readOwn(): Own {
  try {
    return (JSON.parse(localStorage.getItem(OWN) ?? "{}") ?? {}) as Own;
  } catch {
    return {};
  }
}

/** A query of one's own about the database of the run, with what it can read beside it. */
export function RunAsk({ run }: { run: Run }) {
  const query = useQuery<SqlPage>(sqlPath(run.run_id));
  return <Loaded query={query}>{(page) => (page.closed ? <Empty title="This database takes no queries"><p>{page.closed}</p></Empty> : <Ask run={run} page={page} />)}</Loaded>;
}

function Ask({ run, page }: { run: Run; page: SqlPage }) {
  // in the address it can be shared; a link fills the editor in, and the reader decides whether to run it
  const [shared, share] = useSearchParam("sql");
  const [sql, setSql] = useState(shared || (page.saved[0]?.sql ?? ""));
  const [own, setOwn] = useState(readOwn);
  const [answer, setAnswer] = useState<SqlAnswer | null>(null);
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  const running = useRef<AbortController>(undefined);
  useEffect(() => () => running.current?.abort(), []);
  const ask = async (text: string) => {
    running.current?.abort();
    const control = (running.current = new AbortController());
    setBusy(true);
    share(text.length < 2000 ? text : "");
    try {
      const found = await request<SqlAnswer>(sqlPath(run.run_id), { method: "POST", body: { sql: text }, signal: control.signal });
      if (control.signal.aborted) return;
      setAnswer(found);
      setProblem("");
    } catch (error) {
      if (control.signal.aborted) return;
      setAnswer(null);
      setProblem(error instanceof ApiError ? error.message : String(error));
    }
    setBusy(false);
  };
  const choose = (text: string) => {
    setSql(text);
    void ask(text);
  };
  const keep = (changed: Own) => {
    setOwn(changed);
    localStorage.setItem(OWN, JSON.stringify(changed));
  };
  const keys = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    if (sql.trim() !== "") void ask(sql);
  };
  const stop = () => {
    running.current?.abort();
    setBusy(false);
  };
  return (
    <div className="ask">
      <Panel title="Query" actions={<span className="faint">one SELECT, {formatDuration(page.time_limit_s)} at most, the first {page.max_rows.toLocaleString("en-US")} rows</span>}>
        <div className="stack">
          <textarea className="field mono" aria-label="SQL" rows={9} maxLength={20_000} spellCheck={false} autoCapitalize="off" autoComplete="off" value={sql} onChange={(event) => setSql(event.target.value)} onKeyDown={keys} />
          <div className="row wrap">
            <button type="button" className="button primary" title="Ctrl Enter" disabled={isBusy || sql.trim() === ""} onClick={() => void ask(sql)}>Run</button>
            {isBusy && <button type="button" className="button" onClick={stop}>Stop</button>}
            <SaveQuery save={(name) => keep({ ...own, [name]: sql })} />
          </div>
          <ul className="row wrap" aria-label="Saved queries">
            {page.saved.map((one) => <li key={one.name}><button type="button" className="button small" onClick={() => choose(one.sql)}>{one.name}</button></li>)}
            {Object.entries(own).map(([name, text]) => (
              <li key={name} className="row">
                <button type="button" className="button small" title="saved in this browser" onClick={() => choose(text)}>{name}</button>
                <button type="button" className="button quiet icon small" aria-label={`Delete ${name}`} title="Delete" onClick={() => keep(Object.fromEntries(Object.entries(own).filter(([other]) => other !== name)))}>×</button>
              </li>
            ))}
          </ul>
          {problem && <div role="alert"><Problem head="No answer">{problem}</Problem></div>}
        </div>
      </Panel>
      <Panel title={<>Tables <span className="faint">a click adds a name to the query</span></>}><Schema tables={page.tables} add={(name) => setSql((before) => `${before}${/\s$/.test(before) || before === "" ? "" : " "}${name}`)} /></Panel>
      {answer && <Answer run={run} answer={answer} />}
    </div>
  );
}

function SaveQuery({ save }: { save: (name: string) => void }) {
  const [name, setName] = useState("");
  const submit = (event: FormEvent) => {
    event.preventDefault();
    save(name.trim());
    setName("");
  };
  return (
    <form className="row" onSubmit={submit}>
      <input className="field" aria-label="Name for this query" placeholder="name, to save it" maxLength={80} value={name} onChange={(event) => setName(event.target.value)} />
      <button type="submit" className="button" disabled={name.trim() === ""}>Save</button>
    </form>
  );
}

function Schema({ tables, add }: { tables: readonly SqlTable[]; add: (name: string) => void }) {
  return (
    <div className="schema" tabIndex={0} role="group" aria-label="Tables and columns">
      {tables.map((table) => (
        <details key={table.name}>
          <summary className="mono">{table.name}</summary>
          <ul>
            {table.columns.map((column) => (
              <li key={column.name}>
                <button type="button" className="link-button mono" onClick={() => add(column.name)}>{column.name}</button>
                <span className="faint">{column.type}{column.refers_to ? ` → ${column.refers_to}` : ""}</span>
              </li>
            ))}
          </ul>
        </details>
      ))}
    </div>
  );
}

const CUTS = { rows: "only the first rows: more follow", size: "only the first rows: the rest is too large" };

function Answer({ run, answer }: { run: Run; answer: SqlAnswer }) {
  const { columns, rows } = answer;
  const { shown, more } = useMore(rows, 100);
  const save = () => {
    download(`query-${run.run_name}.csv`, new Blob([csvOf([columns.map((column) => column.name), ...rows])], { type: "text/csv" }));
  };
  return (
    <>
      <AnswerChart answer={answer} />
      <Panel
        title={<>Result <span className="faint" role="status">{plural(rows.length, "row")} in {formatDuration(answer.duration_s)}{answer.cut ? `, ${CUTS[answer.cut]}` : ""}</span></>}
        flush
        actions={<button type="button" className="button" onClick={save}>Save as CSV</button>}
      >
        <div className="table-scroll">
          <table className="data" aria-label="Result">
            <thead><tr>{columns.map((column, at) => <th key={at} className={column.is_number ? "right" : undefined} title={column.type}>{column.name}</th>)}</tr></thead>
            <tbody>
              {shown.map((row, line) => (
                <tr key={line}>
                  {row.map((value, at) => <td key={at} className={columns[at]?.is_number ? "right" : undefined}><Cell run={run} name={columns[at]?.name ?? ""} isNumber={columns[at]?.is_number ?? false} value={value} /></td>)}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
        {more}
      </Panel>
    </>
  );
}

function Cell({ run, name, isNumber, value }: { run: Run; name: string; isNumber: boolean; value: string | null }) {
  if (value === null) return <span className="faint">null</span>;
  if (name === "rollout_id") return <Link className="text-link mono" data-row to={rolloutPage(run.run_id, value)}>{value}</Link>;
  if (name === "task_id") return <Link className="text-link" to={taskPage(run.run_id, value)}>{value}</Link>;
  if (isNumber) return <span title={value}>{Number.isSafeInteger(Number(value)) || !Number.isFinite(Number(value)) ? value : formatNumber(Number(value))}</span>;
  return <div className="clamp-2 sql-value" title={value}>{value}</div>;
}

/** Two or three columns as a chart: lines over numbers, one for each value of a third column, or bars of texts. */
function AnswerChart({ answer }: { answer: SqlAnswer }) {
  const { columns, rows } = answer;
  const numbers = columns.flatMap((column, at) => (column.is_number ? [at] : []));
  const [chosen, choose] = useState<{ x?: number; y?: number; by?: number }>({});
  useEffect(() => choose({}), [columns.map((column) => column.name).join()]);
  const x = chosen.x ?? 0;
  const y = chosen.y ?? numbers.find((at) => at !== x) ?? -1;
  const isLine = columns[x]?.is_number ?? false;
  const by = chosen.by ?? columns.findIndex((column, at) => at !== x && column.type === "text");
  const series = useMemo<Series[]>(() => {
    const lines = new Map<string, { x: number; y: number }[]>();
    for (const row of isLine && y >= 0 ? rows : []) {
      if (row[x] == null || row[y] == null) continue;
      const name = by < 0 ? (columns[y]?.name ?? "") : (row[by] ?? "null");
      const point = { x: Number(row[x]), y: Number(row[y]) };
      if (Number.isFinite(point.x) && Number.isFinite(point.y)) lines.set(name, [...(lines.get(name) ?? []), point]);
    }
    const longest = [...lines].sort((a, b) => b[1].length - a[1].length).slice(0, MAX_LINES);
    return longest.map(([label, points], index) => ({ label, color: paletteColor(index), points: points.sort((a, b) => a.x - b.x) }));
  }, [rows, columns, x, y, by, isLine]);
  const bars = rows.flatMap((row, line) => (isLine || y < 0 || row[y] == null || !Number.isFinite(Number(row[y])) ? [] : [{ name: `${row[x] ?? "null"} ${line}`, label: row[x] ?? "null", count: Number(row[y]) }]));
  if (rows.length < 2 || y < 0) return null;
  const title = `${columns[y]?.name} by ${columns[x]?.name}`;
  const select = (label: string, value: number, set: (at: number) => void, offered: readonly number[], none?: string) => (
    <label className="field-label">
      {label}
      <select className="field" value={value} onChange={(event) => set(Number(event.target.value))}>
        {none && <option value={-1}>{none}</option>}
        {offered.map((at) => <option key={at} value={at}>{columns[at]?.name}</option>)}
      </select>
    </label>
  );
  const every = columns.map((_, at) => at);
  return (
    <Panel
      title="Chart"
      actions={
        <>
          {select("Across", x, (at) => choose({ ...chosen, x: at }), every)}
          {select("Up", y, (at) => choose({ ...chosen, y: at }), numbers)}
          {isLine && select("A line for each", by, (at) => choose({ ...chosen, by: at }), every, "none")}
        </>
      }
    >
      {isLine ? <MetricChart title={title} series={series} height={260} xLabel={columns[x]?.name ?? ""} /> : <CountBars counts={bars} />}
    </Panel>
  );
}
