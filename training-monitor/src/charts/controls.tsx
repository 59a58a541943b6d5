import { useCallback, useState } from "react";
import { useSearchParam } from "../router";

export type ChartView = {
  smoothing: number;
  log: boolean;
  range: [number, number] | null;
  setRange: (range: [number, number] | null) => void;
};

/** Smoothing, log scale and zoom shared by all charts of a page, kept in its address. */
export function useChartView(): ChartView & { setSmoothing: (value: number) => void; setLog: (on: boolean) => void } {
  const [smoothText, setSmooth] = useSearchParam("smooth");
  const [logText, setLogText] = useSearchParam("log");
  const [range, setRange] = useState<[number, number] | null>(null);
  const smoothing = Math.min(0.99, Math.max(0, Number(smoothText) || 0));
  const setSmoothing = useCallback((value: number) => setSmooth(value > 0 ? String(value) : ""), [setSmooth]);
  const setLog = useCallback((on: boolean) => setLogText(on ? "1" : ""), [setLogText]);
  return { smoothing, setSmoothing, log: logText === "1", setLog, range, setRange };
}

export function ChartControls({ view }: { view: ReturnType<typeof useChartView> }) {
  return (
    <div className="row wrap chart-controls">
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
