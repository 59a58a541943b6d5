import { useEffect, useState } from "react";
import { request, useQuery, type Query } from "../api/cache";
import { rolloutPage, rolloutPath, sourceName, tokensPath } from "../api/paths";
import type { Rollout, TurnDetail, TurnTokens } from "../api/types";
import { formatNumber, formatSigned } from "../format";
import { describeAction } from "../rollout/actions";
import { firstDifference, firstOther } from "../rollout/pair";
import { Screenshot, screenshotUrl } from "../rollout/Screenshot";
import { TokenStrip } from "../rollout/TokenStrip";
import { endText, shownSuccess } from "../rollout/verdict";
import { Link, navigate, replaceSearch, useLocation, useSearchParam } from "../router";
import { nameOf, runCrumb } from "../runs";
import { useShortcuts } from "../ui/keys";
import { Empty, Loaded, Outcome, PageHead, Panel, Segments } from "../ui/parts";

const SCREENS = [
  { value: "", label: "Before" },
  { value: "after", label: "After" },
  { value: "change", label: "What the action changed" },
  { value: "between", label: "Between the two" },
] as const;
type Screens = (typeof SCREENS)[number]["value"];

type Shown = ReturnType<typeof refOf>;
const refOf = (turn: TurnDetail | undefined, place: "before" | "after") => turn?.[place] ?? null;

/** Two rollouts turn by turn, from the first in which they differ. */
export function PairPage() {
  const { search } = useLocation();
  const [first, second] = search.getAll("of").map((name) => {
    const at = name.lastIndexOf("/");
    return rolloutPath(name.slice(0, at), name.slice(at + 1));
  });
  const one = useQuery<Rollout>(first ?? null);
  const other = useQuery<Rollout>(second ?? null);
  if (!first || !second) return <Empty title="No two rollouts chosen" page><p>Choose two in a table of rollouts or in a group.</p></Empty>;
  return <Loaded query={one} height={560}>{(left) => <Loaded query={other} height={560}>{(right) => <PairView left={left} right={right} />}</Loaded>}</Loaded>;
}

function PairView({ left, right }: { left: Rollout; right: Rollout }) {
  const count = Math.max(left.turns.length, right.turns.length);
  const parted = useParted(left, right);
  const { search } = useLocation();
  const within = (turn: number) => Math.min(Math.max(0, turn), Math.max(0, count - 1));
  const turnOf = (params: URLSearchParams) => within(params.has("turn") ? Number(params.get("turn")) - 1 || 0 : (parted ?? 0));
  const index = turnOf(search);
  const goTo = (turn: number) => replaceSearch({ token: "", turn: String(within(turn) + 1) });
  const step = (by: number) => goTo(turnOf(new URLSearchParams(window.location.search)) + by); // keys may come faster than pages
  const [screensText, setScreens] = useSearchParam("screens");
  const screens: Screens = SCREENS.find((one) => one.value === screensText)?.value ?? "";
  useShortcuts({ ArrowLeft: () => step(-1), ArrowRight: () => step(1), Home: () => goTo(0), End: () => goTo(count - 1), u: () => navigate(rolloutPage(left.run_id, left.rollout_id)) });
  const [one, other] = [left.turns[index], right.turns[index]];
  const [here, there] = [useTokens(left, one), useTokens(right, other)];
  const token = here.data && there.data ? firstOther(here.data.tokens, there.data.tokens) : null;
  return (
    <>
      <PageHead
        crumbs={[{ label: "Runs", to: "/" }, runCrumb(left), { label: "Side by side" }]}
        title="Two rollouts"
        note={<span data-testid="parted">{parted === null ? "They are equal, turn by turn." : parted === 0 ? "They differ from the first turn." : `They are equal up to turn ${parted}, and differ from turn ${parted + 1}.`}</span>}
      />
      <div className="row wrap">
        <button type="button" className="button" disabled={index === 0} title="←" onClick={() => step(-1)}>Turn before</button>
        <b className="num" role="status">Turn {index + 1} of {count}</b>
        <button type="button" className="button" disabled={index + 1 >= count} title="→" onClick={() => step(1)}>Turn after</button>
        {parted !== null && <button type="button" className="button" disabled={index === parted} onClick={() => goTo(parted)}>First difference</button>}
        {token !== null && <button type="button" className="button" title={`token ${token + 1}`} onClick={() => replaceSearch({ token: String(token) })}>First other token</button>}
        <Segments label="Screens" value={screens} options={SCREENS} onChange={setScreens} />
      </div>
      {screens === "between" && <Panel title="Before the turn, the one minus the other"><Difference first={refOf(one, "before")} second={refOf(other, "before")} what="the screens of the two rollouts" /></Panel>}
      <div className="pair">
        <Side rollout={left} turn={one} tokens={here} screens={screens} />
        <Side rollout={right} turn={other} tokens={there} screens={screens} />
      </div>
    </>
  );
}

/** The first turn in which they differ: by screen, text or action or, where all of these agree, by tokens. */
function useParted(left: Rollout, right: Rollout): number | null {
  const visibly = firstDifference(left.turns, right.turns);
  const [parted, setParted] = useState(visibly);
  useEffect(() => {
    let isWanted = true;
    const tokensOf = async (one: Rollout, turn: number) => (await request<TurnTokens>(tokensPath(one.run_id, one.rollout_id, turn))).tokens;
    const search = async () => {
      for (let turn = 0; turn < (visibly ?? left.turns.length) && isWanted; turn += 1) {
        const [one, other] = await Promise.all([tokensOf(left, turn), tokensOf(right, turn)]);
        if (firstOther(one, other) !== null) return turn;
      }
      return visibly;
    };
    void search().then((found) => isWanted && setParted(found), () => undefined);
    return () => {
      isWanted = false;
    };
  }, [left, right, visibly]);
  return parted;
}

const useTokens = (rollout: Rollout, turn: TurnDetail | undefined) => useQuery<TurnTokens>(turn ? tokensPath(rollout.run_id, rollout.rollout_id, turn.turn_index) : null);

function Side({ rollout, turn, tokens, screens }: { rollout: Rollout; turn: TurnDetail | undefined; tokens: Query<TurnTokens>; screens: Screens }) {
  const name = `${nameOf(rollout)}, ${sourceName(rollout.phase, rollout.step)}, rollout ${rollout.member_index + 1}`;
  const head = (
    <div className="pair-head">
      <Link className="run-name" data-row to={rolloutPage(rollout.run_id, rollout.rollout_id, turn?.turn_index)}>{rollout.instruction ?? rollout.task_id}</Link>
      <div className="faint">{name} · {rollout.task_id} · seed {rollout.seed}</div>
      <div className="row wrap num"><Outcome success={shownSuccess(rollout)} fault={rollout.status === "failed"} /> <span className="dim">{endText(rollout)}</span> <span>reward {formatNumber(rollout.reward, 3)}</span> <span>advantage {formatSigned(rollout.advantage)}</span></div>
    </div>
  );
  if (!turn) return <Panel>{head}<p className="dim">It had ended after {rollout.turns.length} turns.</p></Panel>;
  const place = screens === "after" ? "after" : "before";
  const shown = refOf(turn, place);
  return (
    <Panel>
      <div className="stack">
        {head}
        {screens === "change" ? (
          <Difference first={turn.before} second={turn.after} what={`the screens before and after turn ${turn.turn_index + 1}`} />
        ) : (
          <div className="pair-screen"><Screenshot sha256={shown?.sha256} width={shown?.width_px} height={shown?.height_px} action={place === "before" ? turn.action : null} alt={`Screenshot ${place} turn ${turn.turn_index + 1} of ${name}`} /></div>
        )}
        <p>{describeAction(turn.action)?.line ?? (turn.failure_kind ? "no action could be parsed" : "no action: the answer ends the rollout")}</p>
        {tokens.error && <div className="notice bad">{tokens.error.message}</div>}
        {tokens.data && <TokenStrip tokens={tokens.data} turn={turn} rollout={rollout} />}
      </div>
    </Panel>
  );
}

/** One image minus the other: black where they are equal. */
function Difference({ first, second, what }: { first: Shown; second: Shown; what: string }) {
  if (!first || !second) return <p className="dim">One of the screens is missing.</p>;
  if (first.sha256 === second.sha256) return <p className="dim">No pixel differs: {what} are the same image.</p>;
  return (
    <div className="pair-screen">
      <div className="screen difference" role="img" aria-label={`Difference of ${what}: black where they are equal`} style={first.width_px && first.height_px ? { aspectRatio: `${first.width_px} / ${first.height_px}` } : undefined}>
        <img src={screenshotUrl(first.sha256)} alt="" />
        <img src={screenshotUrl(second.sha256)} alt="" />
      </div>
    </div>
  );
}
