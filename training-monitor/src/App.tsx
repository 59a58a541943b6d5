import { useEffect, useRef, useState, type RefObject } from "react";
import { useLive, type LiveState } from "./api/live";
import { BenchmarksPage } from "./pages/BenchmarksPage";
import { ComparePage } from "./pages/ComparePage";
import { GroupPage } from "./pages/GroupPage";
import { PairPage } from "./pages/PairPage";
import { RolloutPage } from "./pages/RolloutPage";
import { RolloutsPage } from "./pages/RolloutsPage";
import { RunPage } from "./pages/RunPage";
import { RunsPage } from "./pages/RunsPage";
import { SourcePage } from "./pages/SourcePage";
import { SuitePage } from "./pages/SuitePage";
import { TaskPage } from "./pages/TaskPage";
import { Link, matchPath, Router, useLocation, useRoute, type Params, type Route } from "./router";
import { Help } from "./ui/Help";
import { Icon } from "./ui/icons";
import { useShortcuts } from "./ui/keys";
import { Palette } from "./ui/Palette";
import { Empty } from "./ui/parts";
import { toggleTheme, useTheme } from "./ui/theme";

const of = (params: Params, name: string) => params[name] ?? "";

const ROUTES: readonly Route[] = [
  { pattern: "/", render: () => <RunsPage /> },
  { pattern: "/compare", render: () => <ComparePage /> },
  { pattern: "/benchmarks", render: () => <BenchmarksPage /> },
  { pattern: "/pair", render: () => <PairPage /> },
  { pattern: "/rollouts", render: () => <RolloutsPage /> },
  { pattern: "/runs/:run", render: (at) => <RunPage key={of(at, "run")} runId={of(at, "run")} /> },
  { pattern: "/runs/:run/suite", render: (at) => <SuitePage runId={of(at, "run")} /> },
  { pattern: "/runs/:run/tasks/:task", render: (at) => <TaskPage key={of(at, "task")} runId={of(at, "run")} taskId={of(at, "task")} /> },
  { pattern: "/runs/:run/rollouts/:rollout", render: (at) => <RolloutPage key={of(at, "rollout")} runId={of(at, "run")} rolloutId={of(at, "rollout")} /> },
  { pattern: "/runs/:run/:phase/:step", render: (at) => <SourcePage runId={of(at, "run")} phase={of(at, "phase")} step={of(at, "step")} /> },
  {
    pattern: "/runs/:run/:phase/:step/groups/:group",
    render: (at) => <GroupPage runId={of(at, "run")} phase={of(at, "phase")} step={of(at, "step")} groupId={of(at, "group")} />,
  },
];

export function App() {
  return (
    <Router>
      <Shell />
    </Router>
  );
}

function currentRun(path: string): string | null {
  const [first, runId = ""] = path.split("/").filter(Boolean);
  return (first === "runs" && matchPath(":run", runId)?.["run"]) || null;
}

/** Moves the focus to the next or previous row of the page. */
function moveRow(step: number): void {
  const rows = [...document.querySelectorAll<HTMLElement>("[data-row]")];
  const at = rows.indexOf(document.activeElement as HTMLElement);
  rows[Math.min(rows.length - 1, Math.max(0, at + step))]?.focus();
}

/** The focus goes to a page that takes the place of another, or of the focused link, so that Tab goes on from there. */
function useFocusOfPage(): RefObject<HTMLElement | null> {
  const { path, search } = useLocation();
  const main = useRef<HTMLElement>(null);
  const shown = useRef({ path, search });
  useEffect(() => {
    const before = shown.current;
    shown.current = { path, search };
    const isLost = document.activeElement === document.body && before.search !== search;
    if (document.querySelector('[role="dialog"]')) return; // it has the focus
    if (isLost || (before.path !== path && !main.current?.contains(document.activeElement))) main.current?.focus({ preventScroll: true });
  }, [path, search]);
  return main;
}

function Shell() {
  const { path } = useLocation();
  const main = useFocusOfPage();
  const [palette, setPalette] = useState(false);
  const [help, setHelp] = useState(false);
  const runId = currentRun(path);
  const live = useLive(runId);
  const page = useRoute(ROUTES);
  useEffect(() => {
    const listen = (event: KeyboardEvent) => {
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
        event.preventDefault();
        setPalette(true);
      }
    };
    window.addEventListener("keydown", listen);
    return () => window.removeEventListener("keydown", listen);
  }, []);
  useShortcuts({
    j: () => moveRow(1),
    k: () => moveRow(-1),
    t: toggleTheme,
    "?": () => setHelp(true),
    "/": () => document.querySelector<HTMLElement>('input[type="search"]')?.focus(),
    ...(path === "/" ? {} : { Backspace: () => window.history.back() }),
  });
  return (
    <div className="shell">
      <a className="skip" href="#content">Skip to content</a>
      <TopBar path={path} live={live} openPalette={() => setPalette(true)} openHelp={() => setHelp(true)} />
      <main id="content" ref={main} tabIndex={-1}>
        {GONE_TEXT[live] && <div className="notice">{GONE_TEXT[live]}</div>}
        {page ?? (
          <Empty title="Page not found" page>
            <p>There is no page at this address.</p>
            <Link className="button" to="/">All runs</Link>
          </Empty>
        )}
      </main>
      {palette && <Palette runId={runId} onClose={() => setPalette(false)} />}
      {help && <Help onClose={() => setHelp(false)} />}
    </div>
  );
}

const LIVE_TEXT: Record<LiveState, string> = {
  on: "live",
  off: "offline, trying again",
  away: "monitor off",
  ended: "run ended, monitor off",
  connecting: "connecting",
};

/** What to do about a monitor that is gone: what has been loaded can still be read. */
const GONE_TEXT: Partial<Record<LiveState, string>> = {
  away: "The monitor no longer responds. `make monitor` shows the runs again.",
  ended: "The run has ended, and its monitor with it. `make monitor` shows the run again.",
};

function TopBar(props: { path: string; live: LiveState; openPalette: () => void; openHelp: () => void }) {
  const theme = useTheme();
  const at = (to: string) => (to === "/" ? props.path === "/" || /^\/(runs|rollouts|pair)/.test(props.path) : props.path.startsWith(to));
  return (
    <header className="topbar">
      <Link to="/" className="brand" aria-label="cua_rl monitor, all runs"><img src="/icon.svg" alt="" /><span>cua_rl</span></Link>
      <nav className="topnav" aria-label="Pages">
        {[["/", "Runs"], ["/compare", "Compare"], ["/benchmarks", "Benchmarks"]].map(([to = "/", label]) => (
          <Link key={to} to={to} aria-current={at(to) ? "page" : undefined}>{label}</Link>
        ))}
      </nav>
      <span className="grow" />
      <span className={`live-dot ${props.live}`} role="status" title={GONE_TEXT[props.live]}><span className="live-text">{LIVE_TEXT[props.live]}</span></span>
      <button type="button" className="button" aria-label="Go to Ctrl K" onClick={props.openPalette}>
        <Icon name="search" /><span className="hint">Go to <kbd>Ctrl K</kbd></span>
      </button>
      <button type="button" className="button quiet icon" aria-label={theme === "dark" ? "Light colours" : "Dark colours"} title="Dark or light  t" onClick={toggleTheme}>
        <Icon name={theme === "dark" ? "sun" : "moon"} />
      </button>
      <button type="button" className="button quiet icon" aria-label="Keyboard" title="Keyboard  ?" onClick={props.openHelp}>
        <Icon name="help" />
      </button>
    </header>
  );
}
