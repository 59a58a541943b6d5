import { useState, type FormEvent } from "react";
import { request } from "../api/cache";
import { markPath } from "../api/paths";
import type { RunSummary } from "../api/types";
import { nameOf } from "../runs";
import { Icon } from "./icons";
import { useSending } from "./Notes";
import { Dialog } from "./parts";

/** Every answer that names a run, or lists runs. */
const moved = (path: string) => /^\/api\/(runs|rollouts)/.test(path);

const send = (run: RunSummary, change: Partial<RunSummary>) => () =>
  request(markPath(run.run_id), { method: "PUT", body: { alias: run.alias, is_pinned: run.is_pinned, ...change } });

/** Pins the run to the top of the list of runs, or lets it go. */
export function PinButton({ run }: { run: RunSummary }) {
  const { go, sending, told, forget } = useSending(send(run, { is_pinned: !run.is_pinned }), () => undefined, moved);
  return (
    <>
      <button type="button" className={`button quiet icon small pin ${run.is_pinned ? "on" : ""}`} aria-pressed={run.is_pinned} aria-label={`Pin ${nameOf(run)}`} title={run.is_pinned ? "Pinned: first in the list of runs" : "Pin to the top of the list of runs"} disabled={sending} onClick={() => void go()}>
        <Icon name="pin" />
      </button>
      {told && <Dialog label={`Pin ${nameOf(run)}`} onClose={forget}>{told}</Dialog>}
    </>
  );
}

/** Asks what the run is to be called. */
export function AliasButton({ run }: { run: RunSummary }) {
  const [asking, setAsking] = useState(false);
  return (
    <>
      <button type="button" className="button small" title="What the run is called here; its own name stays" onClick={() => setAsking(true)}><Icon name="edit" /> Alias</button>
      {asking && <AliasDialog run={run} onClose={() => setAsking(false)} />}
    </>
  );
}

function AliasDialog({ run, onClose }: { run: RunSummary; onClose: () => void }) {
  const [alias, setAlias] = useState(run.alias ?? "");
  const { go, sending, told } = useSending(send(run, { alias: alias.trim() || null }), onClose, moved);
  const submit = (event: FormEvent) => {
    event.preventDefault();
    void go();
  };
  return (
    <Dialog label="Alias" onClose={onClose}>
      <form className="panel-body stack" onSubmit={submit}>
        <h2>Alias</h2>
        <label className="stack-label">
          <span>What {run.run_name} is called here; empty for its own name</span>
          <input className="field" maxLength={120} value={alias} onChange={(event) => setAlias(event.target.value)} placeholder="baseline of the paper" />
        </label>
        <div className="row">
          <button className="button primary" type="submit" disabled={sending}>Save</button>
          <button className="button quiet" type="button" onClick={onClose}>Cancel</button>
        </div>
      </form>
      {told}
    </Dialog>
  );
}
