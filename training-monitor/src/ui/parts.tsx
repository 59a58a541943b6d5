import { useEffect, useLayoutEffect, useRef, useState, type FormEvent, type KeyboardEvent, type ReactNode } from "react";
import { ApiError, signIn, type Query } from "../api/cache";
import type { FaultBounds, Rate } from "../api/types";
import { formatPercent, plural, words } from "../format";
import { Link } from "../router";

const STATUS_TONES: Record<string, string> = {
  running: "accent running",
  rollouts: "accent running",
  training: "accent running",
  completed: "good",
  finished: "good",
  failed: "bad",
  cancelled: "warn",
  stalled: "warn",
};

/** A status; what a dead run left under way was interrupted. */
export function StatusBadge({ status, alive = true }: { status: string; alive?: boolean }) {
  if (!alive && STATUS_TONES[status]?.endsWith("running")) {
    return <span className="badge warn" title="No sign of life for more than a minute">interrupted</span>;
  }
  return <span className={`badge ${STATUS_TONES[status] ?? ""}`}>{status === "cancelled" ? "stopped" : words(status)}</span>;
}

/** Success, failure or an infrastructure fault, shown by shape and colour. */
export function Outcome({ success, fault }: { success: boolean | null | undefined; fault?: boolean }) {
  if (fault) return <span className="badge warn">! fault</span>;
  if (success === null || success === undefined) return <span className="badge">… open</span>;
  return success ? <span className="badge good">✓ success</span> : <span className="badge bad">✕ failure</span>;
}

export function Panel(props: { title?: ReactNode; actions?: ReactNode; flush?: boolean; children: ReactNode }) {
  return (
    <section className="panel">
      {(props.title || props.actions) && (
        <div className="panel-head">
          <h2 className="row wrap">{props.title}</h2>
          {props.actions && <div className="row wrap">{props.actions}</div>}
        </div>
      )}
      {props.flush ? props.children : <div className="panel-body">{props.children}</div>}
    </section>
  );
}

export function Stat({ label, children, hint }: { label: string; children: ReactNode; hint?: string }) {
  return (
    <div className="stat" title={hint}>
      <dt>{label}</dt>
      <dd>{children}</dd>
    </div>
  );
}

/** Text of at most so many lines; the rest on demand. */
export function Clamped({ as: Tag = "div", lines, children }: { as?: "div" | "h1"; lines: number; children: ReactNode }) {
  const box = useRef<HTMLDivElement & HTMLHeadingElement>(null);
  const [isCut, setCut] = useState(false);
  const [whole, setWhole] = useState(false);
  useLayoutEffect(() => {
    const target = box.current;
    if (!target || whole) return;
    const measure = () => setCut(target.scrollHeight > target.clientHeight + 2);
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(target);
    return () => observer.disconnect();
  }, [children, lines, whole]);
  return (
    <>
      <Tag ref={box} className={whole ? "clamped" : "clamped cut"} style={{ WebkitLineClamp: lines }}>{children}</Tag>
      {(isCut || whole) && (
        <button type="button" className="link-button" aria-expanded={whole} onClick={() => setWhole(!whole)}>
          {whole ? "Show less" : "Show all"}
        </button>
      )}
    </>
  );
}

/** What went wrong, in a box: what kind of thing, then the message, of which long ones are cut. */
export function Problem({ head, children }: { head: string; children: string }) {
  return (
    <div className="notice bad">
      <b>{head}</b>
      <Clamped lines={8}>{children}</Clamped>
    </div>
  );
}

/** What the browser's tab says: the page first, then what it is a part of. */
function usePageTitle(names: readonly string[]): void {
  const title = [...names, "cua_rl"].join(" · ");
  useEffect(() => {
    document.title = title;
  }, [title]);
}

export type Crumb = { label: string; to?: string; title?: string };

/** A page's heading. `view` names the part of the page that is shown. */
export function PageHead(props: { crumbs?: Crumb[]; title: ReactNode; view?: string; note?: ReactNode; actions?: ReactNode }) {
  const names = props.crumbs?.slice(1).reverse().map((crumb) => crumb.label) ?? [String(props.title)];
  usePageTitle(props.view ? [props.view, ...names] : names);
  return (
    <header className="page-head">
      <div className="titles">
        {props.crumbs && (
          <nav aria-label="Breadcrumb">
            <ol className="crumbs">
              {props.crumbs.map((crumb) => (
                <li key={crumb.label}>
                  {crumb.to ? <Link to={crumb.to} title={crumb.title}>{crumb.label}</Link> : <span>{crumb.label}</span>}
                </li>
              ))}
            </ol>
          </nav>
        )}
        {typeof props.title === "string" ? <Clamped as="h1" lines={3}>{props.title}</Clamped> : <h1 className="row wrap">{props.title}</h1>}
        {props.note && <div className="dim row wrap page-note">{props.note}</div>}
      </div>
      {props.actions && <div className="row wrap">{props.actions}</div>}
    </header>
  );
}

/** Says that there is nothing, and what to do; `page` if it is all that the page shows. */
export function Empty({ title, page, children }: { title: string; page?: boolean; children?: ReactNode }) {
  useEffect(() => {
    if (page) document.title = `${title} · cua_rl`;
  }, [page, title]);
  return (
    <div className="empty">
      {page ? <h1>{title}</h1> : <strong>{title}</strong>}
      {children}
    </div>
  );
}

/** Asks for the monitor's token; `onDone` is called once it has been accepted, `submit` says what happens then. */
export function TokenForm({ onDone, submit: label = "Sign in" }: { onDone?: () => void; submit?: string }) {
  const [token, setToken] = useState("");
  const [problem, setProblem] = useState("");
  const submit = async (event: FormEvent) => {
    event.preventDefault();
    try {
      await signIn(token.trim());
      setProblem("");
      onDone?.();
    } catch (error) {
      setProblem(error instanceof ApiError ? error.message : String(error));
    }
  };
  return (
    <form className="stack" onSubmit={(event) => void submit(event)}>
      <div className="row">
        <input
          className="field grow"
          type="password"
          aria-label="Access token"
          placeholder="token, as the monitor printed it"
          autoComplete="off"
          autoFocus
          value={token}
          onChange={(event) => setToken(event.target.value)}
        />
        <button className="button primary" type="submit" disabled={token.trim() === ""}>
          {label}
        </button>
      </div>
      {problem && <p className="bad" role="alert">{problem}</p>}
    </form>
  );
}

export function ErrorState({ error, reload }: { error: ApiError; reload?: () => void }) {
  const [isPage] = useState(() => !document.querySelector("h1")); // its own does not count when it is drawn again
  if (error.status === 401 || error.status === 403) {
    return (
      <Empty title="This monitor requires a token" page>
        <p>{error.message}</p>
        <TokenForm />
      </Empty>
    );
  }
  return (
    <Empty title={error.status === 404 ? "Nothing found at this address" : "This could not be loaded"} page={isPage}>
      <p>{error.message}</p>
      <div className="row">
        {reload && (
          <button className="button" type="button" onClick={reload}>
            Try again
          </button>
        )}
        <Link className="button" to="/">
          All runs
        </Link>
      </div>
    </Empty>
  );
}

/** Shows data when there is some (also while it is loaded again), else a placeholder or what went wrong. */
export function Loaded<T>({ query, children, height = 240 }: {
  query: Query<T>;
  children: (data: T) => ReactNode;
  height?: number;
}) {
  if (query.data !== undefined) return <>{children(query.data)}</>;
  if (query.error) return <ErrorState error={query.error} reload={query.reload} />;
  return <div className="skeleton" role="status" aria-label="Loading" style={{ height }} />;
}

export function Segments<T extends string>(props: {
  label: string;
  value: T;
  options: readonly { value: T; label: string }[];
  onChange: (value: T) => void;
}) {
  return (
    <div className="segments" role="group" aria-label={props.label}>
      {props.options.map((option) => (
        <button
          key={option.value}
          type="button"
          aria-pressed={option.value === props.value}
          onClick={() => props.onChange(option.value)}
        >
          {option.label}
        </button>
      ))}
    </div>
  );
}

const TAB_ROOM_PX = 24; // a part of the next tab shows that there is one

/** Tabs as the ARIA pattern has them: arrow keys move, the panel follows. */
export function Tabs<T extends string>(props: {
  label: string;
  value: T;
  options: readonly { value: T; label: string; count?: number | null }[];
  onChange: (value: T) => void;
  children: ReactNode;
}) {
  const list = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const [box, tab] = [list.current, list.current?.querySelector('[aria-selected="true"]')];
    if (!box || !tab) return;
    const [outer, inner] = [box.getBoundingClientRect(), tab.getBoundingClientRect()];
    if (inner.left < outer.left) box.scrollLeft -= outer.left - inner.left + TAB_ROOM_PX;
    else if (inner.right > outer.right) box.scrollLeft += inner.right - outer.right + TAB_ROOM_PX;
  }, [props.value]);
  const move = (event: KeyboardEvent) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const index = props.options.findIndex((option) => option.value === props.value);
    const next = (index + step + props.options.length) % props.options.length;
    const option = props.options[next];
    if (option) props.onChange(option.value);
    list.current?.querySelectorAll<HTMLElement>('[role="tab"]')[next]?.focus();
  };
  return (
    <>
      <div className="tabs" role="tablist" aria-label={props.label} ref={list} onKeyDown={move}>
        {props.options.map((option) => (
          <button
            key={option.value}
            type="button"
            role="tab"
            id={`tab-${option.value}`}
            aria-selected={option.value === props.value}
            aria-controls="tab-panel"
            tabIndex={option.value === props.value ? 0 : -1}
            onClick={() => props.onChange(option.value)}
          >
            {option.label}
            {option.count !== undefined && option.count !== null && <span className="count">{option.count}</span>}
          </button>
        ))}
      </div>
      <div role="tabpanel" id="tab-panel" aria-labelledby={`tab-${props.value}`} className="stack">
        {props.children}
      </div>
    </>
  );
}

/** A share with its 95 % interval on a scale from 0 to 1. */
export function IntervalBar(props: { value: number; low: number | null | undefined; high: number | null | undefined }) {
  const { value, low, high } = props;
  const percent = (share: number) => `${Math.min(1, Math.max(0, share)) * 100}%`;
  const spoken = `${formatPercent(value, 1)}${low == null || high == null ? "" : `, 95 % interval ${formatPercent(low)} to ${formatPercent(high)}`}`;
  return (
    <div className="interval" role="img" aria-label={spoken} title={spoken}>
      <i className="bar" style={{ width: percent(value) }} />
      {low != null && high != null && <i className="range" style={{ left: percent(low), width: percent(high - low) }} />}
      <i className="mark" style={{ left: `calc(${percent(value)} - 1px)` }} />
    </div>
  );
}

/** Bounds of an evaluation's success with faults; nothing without faults. */
export function FaultBoundsNote({ bounds }: { bounds: FaultBounds | null | undefined }) {
  if (!bounds) return null;
  return (
    <span className="warn nowrap" title="Success rate of first tries if all faulty ones had failed, and if all had succeeded">
      {plural(bounds.num_faults, "fault")}: {formatPercent(bounds.worst)} to {formatPercent(bounds.best)}
    </span>
  );
}

/** Tasks that say nothing of the policy, because all of their attempts met faults; nothing if there are none. */
export function LostNote({ rate }: { rate: Pick<Rate, "num_lost_tasks"> | null | undefined }) {
  if (!rate?.num_lost_tasks) return null;
  return (
    <span className="warn nowrap" title="All attempts at these tasks ended in faults: they count as failed at the lower end of the interval, as solved at the upper end">
      {plural(rate.num_lost_tasks, "task")} lost to faults
    </span>
  );
}

export function Progress({ value, label }: { value: number; label: string }) {
  const percent = Math.round(Math.min(1, Math.max(0, value)) * 100);
  return (
    <div className="progress" role="progressbar" aria-label={label} aria-valuenow={percent} aria-valuemin={0} aria-valuemax={100}>
      <i style={{ width: `${percent}%` }} />
    </div>
  );
}

const FOCUSED = "input, textarea, select, button, a[href], summary";

/** A modal that keeps the focus, closes with Escape and gives the focus back; `data-first` is focused first. */
export function Dialog({ label, onClose, children }: { label: string; onClose: () => void; children: ReactNode }) {
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const before = document.activeElement as HTMLElement | null;
    const first = box.current?.querySelector<HTMLElement>("[data-first]") ?? box.current?.querySelector<HTMLElement>(FOCUSED);
    (first ?? box.current)?.focus();
    return () => before?.focus();
  }, []);
  const keys = (event: KeyboardEvent) => {
    event.stopPropagation();
    if (event.key === "Escape") onClose();
    if (event.key !== "Tab" || !box.current) return;
    const all = [...box.current.querySelectorAll<HTMLElement>(FOCUSED)].filter((one) => !one.matches(":disabled"));
    const edge = event.shiftKey ? all[0] : all.at(-1);
    if (document.activeElement === edge || document.activeElement === box.current) {
      event.preventDefault();
      (event.shiftKey ? all.at(-1) : all[0])?.focus();
    }
  };
  return (
    <div className="backdrop" onMouseDown={(event) => event.target === event.currentTarget && onClose()}>
      <div className="dialog" role="dialog" aria-modal="true" aria-label={label} tabIndex={-1} ref={box} onKeyDown={keys}>
        {children}
      </div>
    </div>
  );
}
