import { useCallback, useMemo, useState, type FormEvent } from "react";
import { replaceSearch, useLocation, useSearchParam } from "../router";
import { Icon } from "../ui/icons";
import { PickList, Popup } from "../ui/PickList";
import { X_UNITS, type XUnit } from "./xUnits";

export type ChartView = {
  smoothing: number;
  log: boolean;
  range: [number, number] | null;
  setRange: (range: [number, number] | null) => void;
  unit: XUnit;
  shows: (title: string) => boolean;
};

const UNITS = Object.keys(X_UNITS) as XUnit[];
const slug = (title: string) => title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-");

/** Which charts a page shows, over what, and how, kept in its address. */
export function useChartView(): ChartView & { setSmoothing: (value: number) => void; setLog: (on: boolean) => void } {
  const [smoothText, setSmooth] = useSearchParam("smooth");
  const [logText, setLogText] = useSearchParam("log");
  const [zoom, setZoom] = useSearchParam("zoom");
  const [unitText] = useSearchParam("x");
  const [chartsText] = useSearchParam("charts");
  const smoothing = Math.min(0.99, Math.max(0, Number(smoothText) || 0));
  const setSmoothing = useCallback((value: number) => setSmooth(value > 0 ? String(value) : ""), [setSmooth]);
  const setLog = useCallback((on: boolean) => setLogText(on ? "1" : ""), [setLogText]);
  const range = useMemo((): [number, number] | null => {
    const [from = NaN, to = NaN] = zoom.split("~").map(Number);
    return zoom !== "" && to > from ? [from, to] : null;
  }, [zoom]);
  const setRange = useCallback((next: [number, number] | null) => setZoom(next?.map((end) => Number(end.toPrecision(6))).join("~") ?? ""), [setZoom]);
  const unit = UNITS.find((one) => one === unitText) ?? "step";
  const shows = useCallback((title: string) => chartsText === "" || chartsText.split("~").includes(slug(title)), [chartsText]);
  return { smoothing, setSmoothing, log: logText === "1", setLog, range, setRange, unit, shows };
}

/** With `charts`, the titles of what may be shown, also which of them are, over what, and views to come back to. */
export function ChartControls({ view, charts }: { view: ReturnType<typeof useChartView>; charts?: readonly string[] }) {
  return (
    <div className="row wrap chart-controls">
      {charts && (
        <>
          <PickList label="Charts" all={charts} chosen={charts.filter(view.shows)} onChange={(chosen) => replaceSearch({ charts: chosen.length === charts.length ? "" : chosen.map(slug).join("~") || "none" })} />
          <SavedViews />
          <label className="field-label">
            over
            <select className="field" value={view.unit} onChange={(event) => replaceSearch({ x: event.target.value === "step" ? "" : event.target.value, zoom: "" })}>
              {UNITS.map((unit) => <option key={unit} value={unit}>{X_UNITS[unit].plural}</option>)}
            </select>
          </label>
        </>
      )}
      <label className="field-label">
        Smoothing
        <input type="range" min={0} max={0.95} step={0.05} value={view.smoothing} onChange={(event) => view.setSmoothing(Number(event.target.value))} />
        <span className="num smoothing-value">{view.smoothing.toFixed(2)}</span>
      </label>
      <button type="button" className="button small" aria-pressed={view.log} onClick={() => view.setLog(!view.log)}>
        Log scale
      </button>
      <button type="button" className="button small" disabled={view.range === null} onClick={() => view.setRange(null)}>
        Reset zoom
      </button>
      <span className="faint hint">Drag to zoom, double-click to reset, click a point to open its step.</span>
    </div>
  );
}

type Saved = Record<string, Record<string, string>>;
const [STORE, KEPT] = ["monitor.views", ["charts", "x", "smooth", "log"]];

function readViews(): Saved {
  try {
    return (JSON.parse(localStorage.getItem(STORE) ?? "{}") ?? {}) as Saved;
  } catch {
    return {}; // not ours
  }
}

/** Views of charts by name, in this browser; the address of one is for others. */
function SavedViews() {
  const [views, setViews] = useState(readViews);
  const [name, setName] = useState("");
  const { search } = useLocation();
  const keep = (next: Saved) => {
    localStorage.setItem(STORE, JSON.stringify(next));
    setViews(next);
  };
  const save = (event: FormEvent) => {
    event.preventDefault();
    keep({ ...views, [name.trim()]: Object.fromEntries(KEPT.map((one) => [one, search.get(one) ?? ""])) });
    setName("");
  };
  return (
    <Popup label={<>Views <span className="faint num">{Object.keys(views).length}</span></>}>
      {Object.entries(views).map(([one, view]) => (
        <div key={one} className="row between">
          <button type="button" className="button small" onClick={() => replaceSearch({ ...view, zoom: "" })}>{one}</button>
          <button type="button" className="button quiet icon small" aria-label={`Forget ${one}`} onClick={() => keep(Object.fromEntries(Object.entries(views).filter(([other]) => other !== one)))}><Icon name="close" size={12} /></button>
        </div>
      ))}
      <form className="row" onSubmit={save}>
        <input className="field" aria-label="Name of the view" placeholder="Name what is shown" maxLength={60} value={name} onChange={(event) => setName(event.target.value)} />
        <button type="submit" className="button small" disabled={name.trim() === ""}>Save</button>
      </form>
      <span className="faint">Kept in this browser; the address shows others the same.</span>
    </Popup>
  );
}
