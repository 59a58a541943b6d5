import { useEffect } from "react";
import { prefetch, useKept, useQuery } from "../api/cache";
import { placePath, rolloutInSetPage, rolloutPath } from "../api/paths";
import type { Rollout, SetPlace } from "../api/types";
import { Link, navigate } from "../router";
import { describeSet } from "../sets";
import { Icon } from "../ui/icons";
import { useShortcuts } from "../ui/keys";

/** Through the set from which the rollout was opened, in the order of its table. */
export function SetWalk({ rollout, set }: { rollout: Rollout; set: string }) {
  const params = new URLSearchParams(set);
  const sort = params.get("sort") ?? "";
  params.delete("sort");
  const query = useQuery<SetPlace>(placePath(rollout.run_id, rollout.rollout_id, { of: params.toString(), sort }));
  const place = useKept(query).data;
  const { previous = null, next = null } = query.data ?? {};
  useEffect(() => {
    if (next) prefetch(rolloutPath(next.run_id, next.rollout_id));
  }, [next]);
  const go = (to: SetPlace["next"]) => to && navigate(rolloutInSetPage(to.run_id, to.rollout_id, set));
  useShortcuts({ n: () => go(next), p: () => go(previous) });
  return (
    <nav className="notice row wrap" aria-label="Set">
      <Link className="text-link grow" to={`/rollouts?${set}`}>{describeSet(params)}</Link>
      <span className="dim num" role="status">{place ? `${place.is_member ? place.num_before + 1 : "none"} of ${place.num_rollouts}` : "…"}</span>
      <button type="button" className="button" disabled={!previous} title="Previous rollout of the set  p" onClick={() => go(previous)}><Icon name="left" /> Previous</button>
      <button type="button" className="button" disabled={!next} title="Next rollout of the set  n" onClick={() => go(next)}>Next <Icon name="right" /></button>
    </nav>
  );
}
