import { useState } from "react";
import { useKept, useQuery } from "../api/cache";
import { rolloutPage, rolloutsPath, setPage, shortSourceName } from "../api/paths";
import type { Page, RolloutItem, Run } from "../api/types";
import { formatNumber, plural } from "../format";
import { Screenshot } from "../rollout/Screenshot";
import { shownSuccess } from "../rollout/verdict";
import { Link } from "../router";
import { Empty, Loaded, Outcome, Panel, StatusBadge } from "../ui/parts";

const SHOWN = 24;
const MOST = 200; // that the API hands out at once
const NONE: Page<RolloutItem> = { items: [], next_cursor: null };

function idleTitle(run: Run): string {
  if (run.is_alive) return "No rollout is in progress: the trainer is working. The latest ones:";
  return run.status === "running" ? "The run shows no sign of life. Its latest rollouts:" : "The run has ended. Its latest rollouts:";
}

/** What the devices show right now; when none is in use, how the latest rollouts ended. */
export function RunLive({ run }: { run: Run }) {
  const [limit, setLimit] = useState(SHOWN);
  const more = () => setLimit(Math.min(MOST, 4 * limit));
  const underWay = useKept(useQuery<Page<RolloutItem>>(run.is_alive ? rolloutsPath(run.run_id, { status: "running", limit }) : null));
  const running = run.is_alive ? underWay : { ...underWay, data: NONE };
  const idle = running.data?.items.length === 0;
  const latest = useKept(useQuery<Page<RolloutItem>>(idle ? rolloutsPath(run.run_id, { limit }) : null));
  return (
    <Loaded query={running}>
      {(now) =>
        now.items.length > 0 ? (
          <Panel title={<>In progress <span className="faint">{plural(run.num_running_rollouts, "rollout")}</span></>} actions={<span className="faint">Click a card to follow its rollout.</span>}>
            <Wall run={run} rollouts={now.items} follow />
            <Others run={run} page={now} of={run.num_running_rollouts} more={more} />
          </Panel>
        ) : (
          <Loaded query={latest}>
            {(page) =>
              page.items.length === 0 ? (
                <Empty title={run.is_alive ? "No rollout yet" : "No rollout"}>
                  <p>{run.is_alive ? "The first ones appear here as soon as a device is ready." : "The run ended before its first rollout began."}</p>
                </Empty>
              ) : (
                <Panel title={idleTitle(run)}>
                  <Wall run={run} rollouts={page.items} follow={false} />
                  <Others run={run} page={page} of={run.num_rollouts} more={more} />
                </Panel>
              )
            }
          </Loaded>
        )
      }
    </Loaded>
  );
}

/** How many rollouts the wall leaves out, and where they are. */
function Others({ run, page, of, more }: { run: Run; page: Page<RolloutItem>; of: number; more: () => void }) {
  if (!page.next_cursor) return null;
  const shown = page.items.length;
  return (
    <div className="row wrap between wall-more">
      <span className="dim num">{shown.toLocaleString("en-US")} of {Math.max(of, shown + 1).toLocaleString("en-US")} rollouts are shown</span>
      {shown < MOST ? <button type="button" className="button" onClick={more}>Show more</button> : <Link className="text-link" to={setPage({ run_id: run.run_id, view: "gallery", ...(of === run.num_rollouts ? {} : { status: "running" }) })}>All of them</Link>}
    </div>
  );
}

function Wall({ run, rollouts, follow }: { run: Run; rollouts: readonly RolloutItem[]; follow: boolean }) {
  return (
    <div className="wall">
      {rollouts.map((rollout) => <Card key={rollout.rollout_id} run={run} rollout={rollout} follow={follow} />)}
    </div>
  );
}

function Card({ run, rollout, follow }: { run: Run; rollout: RolloutItem; follow: boolean }) {
  const title = rollout.instruction ?? rollout.task_id;
  const outcome = shownSuccess(rollout);
  return (
    <article className="member">
      <Link to={`${rolloutPage(run.run_id, rollout.rollout_id)}${follow ? "?follow=1" : ""}`} data-row aria-label={`Rollout of ${title}`}>
        {rollout.last_sha256 ? (
          <Screenshot sha256={rollout.last_sha256} action={rollout.last_action} alt="Latest screenshot" />
        ) : (
          <div className="screen missing" style={{ aspectRatio: "3 / 5" }}>getting a device</div>
        )}
      </Link>
      <div className="clamp-2">{title}</div>
      <div className="row between">
        <span className="faint num">{shortSourceName(rollout.phase, rollout.step)}</span>
        {rollout.status === "running" ? <StatusBadge status="running" alive={run.is_alive} /> : <Outcome success={outcome} fault={rollout.status === "failed"} />}
      </div>
      <div className="member-facts num">
        <span>{plural(rollout.num_turns, "turn")}</span>
        <span className="truncate">{rollout.reward === null ? "" : `reward ${formatNumber(rollout.reward, 3)}`}</span>
      </div>
    </article>
  );
}
