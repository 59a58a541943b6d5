import type { RolloutCell } from "../api/types";

/** The verdict that counts for a reader: a person's, if there is one. */
export function shownSuccess(rollout: Pick<RolloutCell, "success" | "override_success">): boolean | null {
  return rollout.override_success ?? rollout.success;
}
