import { rolloutPage } from "../api/paths";
import type { Rollout, RolloutCell } from "../api/types";
import { formatNumber, plural } from "../format";
import { Link } from "../router";
import { Outcome, Panel } from "../ui/parts";
import { endText, shownSuccess } from "./verdict";

/** The rollouts that share turns with this one, itself among them: the parent first. */
function treeOf(rollout: Rollout): RolloutCell[] {
  const root = rollout.parent_id ?? rollout.rollout_id;
  return rollout.siblings.filter((one) => (one.parent_id ?? one.rollout_id) === root);
}

/** What became of the rollouts that share turns with this one; nothing if none does. */
export function Branches({ rollout }: { rollout: Rollout }) {
  const tree = treeOf(rollout);
  const fork = Math.max(0, ...tree.map((one) => one.fork_turn));
  if (tree.length < 2) return null;
  return (
    <Panel title="Branches" actions={<span className="faint num">branched after turn {fork}</span>}>
      <dl className="facts" data-testid="branches">
        {tree.map((one) => (
          <div className="fact-pair" key={one.rollout_id}>
            <dt>
              {one.rollout_id === rollout.rollout_id ? <b>Rollout {one.member_index + 1}</b> : <Link className="text-link" to={rolloutPage(rollout.run_id, one.rollout_id, fork)}>Rollout {one.member_index + 1}</Link>}
              {one.parent_id ? "" : ", the parent"}
            </dt>
            <dd className="row wrap num">
              <Outcome success={shownSuccess(one)} fault={one.status === "failed"} />
              <span>reward {formatNumber(one.override_reward ?? one.reward)}</span>
              <span className="faint">{plural(Math.max(0, one.num_turns - one.fork_turn), "own turn")}, {endText(one)}</span>
            </dd>
          </div>
        ))}
      </dl>
    </Panel>
  );
}
