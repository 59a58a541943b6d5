import { useState, type FormEvent } from "react";
import { ApiError, invalidate, request } from "../api/cache";
import { overridesPath } from "../api/paths";
import type { Rollout } from "../api/types";
import { formatNumber } from "../format";
import { Dialog, Segments, TokenForm } from "../ui/parts";

type Verdict = "success" | "failure" | "none";

const VERDICTS = [
  { value: "success", label: "✓ Success" },
  { value: "failure", label: "✕ Failure" },
  { value: "none", label: "Withdraw earlier verdicts" },
] as const;

/** A person's verdict on a rollout; it is shown and kept, and changes nothing that is trained on. */
export function OverrideDialog({ rollout, onClose }: { rollout: Rollout; onClose: (saved: boolean) => void }) {
  const [verdict, setVerdict] = useState<Verdict>(rollout.success ? "failure" : "success");
  const [reward, setReward] = useState("");
  const [reason, setReason] = useState("");
  const [actor, setActor] = useState(localStorage.getItem("monitor.actor") ?? "");
  const [problem, setProblem] = useState<ApiError | null>(null);
  const [saving, setSaving] = useState(false);
  const save = async () => {
    setSaving(true);
    setProblem(null);
    localStorage.setItem("monitor.actor", actor);
    try {
      await request(overridesPath(rollout.run_id, rollout.rollout_id), {
        method: "POST",
        body: {
          success: verdict === "none" ? null : verdict === "success",
          reward: verdict === "none" || reward === "" ? null : Number(reward),
          reason,
          actor,
        },
      });
      invalidate((path) => /^\/api\/rollouts|\/place\?|\/verdicts$/.test(path)); // the sets that it leaves and enters
      onClose(true);
    } catch (error) {
      setProblem(error instanceof ApiError ? error : new ApiError(0, String(error)));
      setSaving(false);
    }
  };
  const submit = (event: FormEvent) => {
    event.preventDefault();
    void save();
  };
  return (
    <Dialog label="Override the verdict" onClose={() => onClose(false)}>
      <form className="panel-body stack" onSubmit={submit}>
        <h2>Override the verdict</h2>
        <p className="dim">
          Your verdict is shown beside the validator&apos;s and kept with its reason. What was trained on stays as it was.
        </p>
        <Segments label="Verdict" value={verdict} options={VERDICTS} onChange={setVerdict} />
        {verdict !== "none" && (
          <label className="stack-label">
            <span>Reward (optional; without one, the reward stays {formatNumber(rollout.reward)})</span>
            <input className="field" type="number" step="any" value={reward} onChange={(event) => setReward(event.target.value)} />
          </label>
        )}
        <label className="stack-label">
          <span>Reason</span>
          <textarea className="field" data-first rows={3} required maxLength={2000} value={reason} onChange={(event) => setReason(event.target.value)} placeholder="What the validator missed" />
        </label>
        <label className="stack-label">
          <span>Your name</span>
          <input className="field" required maxLength={200} value={actor} onChange={(event) => setActor(event.target.value)} />
        </label>
        <div className="row">
          <button className="button primary" type="submit" disabled={saving}>Save verdict</button>
          <button className="button quiet" type="button" onClick={() => onClose(false)}>Cancel</button>
        </div>
      </form>
      {problem && (
        <div className="panel-body stack">
          <div className="notice bad" role="alert">{problem.message}</div>
          {problem.status === 401 && <TokenForm submit="Sign in and save" onDone={() => void save()} />}
        </div>
      )}
    </Dialog>
  );
}
