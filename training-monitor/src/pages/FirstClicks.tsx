import { useQuery } from "../api/cache";
import { firstActionsPath, rolloutPage } from "../api/paths";
import type { FirstActions } from "../api/types";
import { plural } from "../format";
import { describeAction } from "../rollout/actions";
import { screenshotUrl } from "../rollout/Screenshot";
import { navigate } from "../router";
import { Panel } from "../ui/parts";

const COLORS: Record<string, string> = { success: "var(--good)", failure: "var(--bad)", fault: "var(--warn)" };

/** Where rollouts acted first on the screen that they share, coloured by what came of it; nothing if hardly any do. */
export function FirstClicks({ set }: { set: URLSearchParams }) {
  const { data } = useQuery<FirstActions>(firstActionsPath(set));
  const screen = data?.screen;
  if (!data || !screen || data.actions.length < 2 || !screen.width_px || !screen.height_px) return null;
  const placed = data.actions.flatMap((one) => {
    const shown = describeAction(one.action);
    return shown?.at ? [{ ...one, at: shown.at, line: shown.line }] : [];
  });
  const size = Math.min(screen.width_px, screen.height_px) * 0.018;
  const won = placed.filter((one) => one.verdict === "success").length;
  const told = `First actions of ${plural(placed.length, "rollout")}, ${won} of which succeeded`;
  return (
    <Panel title={<>First action on a shared screen <span className="faint">{data.actions.length} of {plural(data.num_rollouts, "rollout")} began with it, {placed.length} acted at a place</span></>}>
      <div className="screen first-clicks" style={{ aspectRatio: `${screen.width_px} / ${screen.height_px}` }}>
        <img src={screenshotUrl(screen.sha256)} alt={told} width={screen.width_px} height={screen.height_px} decoding="async" />
        <svg className="screen-overlay" viewBox={`0 0 ${screen.width_px} ${screen.height_px}`} aria-hidden="true">
          {placed.map((one) => (
            <circle key={one.run_id + one.rollout_id} cx={one.at[0]} cy={one.at[1]} r={size} fill={COLORS[one.verdict] ?? "var(--text-dim)"} stroke="black" strokeWidth={size * 0.25} fillOpacity={0.75} onClick={() => navigate(rolloutPage(one.run_id, one.rollout_id))}>
              <title>{one.verdict}: {one.line}</title>
            </circle>
          ))}
        </svg>
      </div>
      <p className="faint legend"><i style={{ background: "var(--good)" }} /> success <i style={{ background: "var(--bad)" }} /> failure <i style={{ background: "var(--warn)" }} /> fault</p>
    </Panel>
  );
}
