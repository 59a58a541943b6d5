import { useState } from "react";
import { pairPage } from "../api/paths";
import type { TurnDetail } from "../api/types";
import { Link, navigate } from "../router";
import { useShortcuts } from "../ui/keys";

type Named = { run_id: string; rollout_id: string };

export type Pair = { chosen: readonly Named[]; toggle: (one: Named) => void; clear: () => void };

const isSame = (one: Named, other: Named) => one.run_id === other.run_id && one.rollout_id === other.rollout_id;

/** Two rollouts of a list that are to stand side by side; a third takes the place of the first. */
export function usePair(): Pair {
  const [chosen, setChosen] = useState<readonly Named[]>([]);
  const toggle = (one: Named) => setChosen((before) => (before.some((other) => isSame(one, other)) ? before.filter((other) => !isSame(one, other)) : [...before.slice(-1), one]));
  const clear = () => setChosen([]);
  useShortcuts({ s: () => chosen.length === 2 && navigate(pairPage(chosen)) });
  return { chosen, toggle, clear };
}

export function ChoosePair({ pair, one, label }: { pair: Pair; one: Named; label: string }) {
  return <input type="checkbox" aria-label={`Choose ${label}`} title="Choose two to see them side by side" checked={pair.chosen.some((other) => isSame(one, other))} onChange={() => pair.toggle(one)} />;
}

/** Appears with the first choice and leads on with the second; stays in sight wherever the page is scrolled to. */
export function PairLink({ pair }: { pair: Pair }) {
  if (pair.chosen.length === 0) return null;
  return (
    <div className="row pair-bar" role="status">
      <span className="dim">{pair.chosen.length === 2 ? "Two rollouts are chosen." : "Choose another rollout to see both side by side."}</span>
      <span className="row">
        <button type="button" className="button quiet" onClick={pair.clear}>Clear</button>
        {pair.chosen.length === 2 && <Link className="button primary" title="The two rollouts, turn by turn  s" to={pairPage(pair.chosen)}>Side by side</Link>}
      </span>
    </div>
  );
}

/** What can be seen of a turn. */
const contentOf = (turn: TurnDetail | undefined) => turn && JSON.stringify([turn.before?.sha256, turn.text, turn.num_sampled_tokens, turn.stop, turn.action]);

/** The first turn with another screen, text or action in the second list, or that only one has; null if there is none. */
export function firstDifference(first: readonly TurnDetail[], second: readonly TurnDetail[]): number | null {
  const longest = Math.max(first.length, second.length);
  const at = Array.from({ length: longest }, (_, turn) => turn).find((turn) => contentOf(first[turn]) !== contentOf(second[turn]));
  return at ?? null;
}

/** The place of the first token that differs; null if the lists are equal. */
export function firstOther(first: readonly number[], second: readonly number[]): number | null {
  const at = first.findIndex((token, index) => token !== second[index]);
  return at >= 0 ? at : first.length < second.length ? first.length : null;
}
