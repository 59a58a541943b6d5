import type { RolloutCell } from "../api/types";
import { words } from "../format";

/** The verdict that counts for a reader: a person's, if there is one. */
export function shownSuccess(rollout: Pick<RolloutCell, "success" | "override_success">): boolean | null {
  return rollout.override_success ?? rollout.success;
}

/** How a rollout ended, in words. Using up its turns is no failure where the goal was reached. */
export function endText(rollout: Pick<RolloutCell, "status" | "stop_reason"> & { success: boolean | null }): string {
  if (rollout.success && rollout.stop_reason === "max_turns") return "solved, all turns used";
  return words(rollout.stop_reason ?? (rollout.status === "cancelled" ? "stopped" : rollout.status));
}
