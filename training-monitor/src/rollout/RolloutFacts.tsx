import { useState } from "react";
import { sourcePage } from "../api/paths";
import type { Rollout } from "../api/types";
import { formatDuration, formatNumber, formatTime, words } from "../format";
import { rolloutCost } from "../pages/Costs";
import { Link } from "../router";
import { Icon } from "../ui/icons";
import { useShortcuts } from "../ui/keys";
import { Notes } from "../ui/Notes";
import { Clamped, Outcome, Panel } from "../ui/parts";
import { JudgementPanel } from "./JudgementPanel";
import { OverrideDialog } from "./OverrideDialog";

/** What was checked at the end, what people said about it, and how the rollout went through its states. */
export function RolloutFacts({ rollout, turn, reload }: { rollout: Rollout; turn?: number; reload: () => void }) {
  const [overriding, setOverriding] = useState(false);
  useShortcuts({ o: () => setOverriding(true) });
  return (
    <>
      <Panel
        title={<>Validation {rollout.validation && <Outcome success={rollout.validation.success} />}</>}
        actions={
          <button type="button" className="button small" title="Give your own verdict  o" onClick={() => setOverriding(true)}>
            <Icon name="edit" /> Override
          </button>
        }
      >
        <ValidationFacts rollout={rollout} />
        {rollout.overrides.length > 0 && <Overrides rollout={rollout} />}
      </Panel>
      {rollout.judgement && <JudgementPanel judgement={rollout.judgement} />}
      <Notes of={{ runId: rollout.run_id, rolloutId: rollout.rollout_id, ...(turn === undefined ? {} : { turn }) }}>
        {({ body, add, count }) => <Panel title={<>Notes {count > 0 && <span className="faint">{count}</span>}</>} actions={add}>{body || <p className="dim">No tags or notes yet.</p>}</Panel>}
      </Notes>
      <Panel title="Rollout">
        <dl className="facts">
          <dt>id</dt>
          <dd className="mono">{rollout.rollout_id}</dd>
          <dt>started</dt>
          <dd>{formatTime(rollout.started_at)}</dd>
          {rollout.device && (
            <>
              <dt>device</dt>
              <dd>{rollout.device.device_id} · {rollout.device.status}{rollout.device.error ? `: ${rollout.device.error}` : ""}</dd>
            </>
          )}
          {rollout.worker && (
            <>
              <dt>worker</dt>
              <dd>{rollout.worker}</dd>
            </>
          )}
          {rolloutCost(rollout) && (
            <>
              <dt>used</dt>
              <dd data-testid="rollout-cost">{rolloutCost(rollout)}</dd>
            </>
          )}
          {rollout.tags.length > 0 && (
            <>
              <dt>tags of the task</dt>
              <dd>{rollout.tags.join(", ")}</dd>
            </>
          )}
          {rollout.replayed_at_steps.length > 0 && (
            <>
              <dt>replayed</dt>
              <dd>
                {rollout.replayed_at_steps.map((step) => (
                  <Link key={step} className="text-link" to={sourcePage(rollout.run_id, "step", step)}>step {step} </Link>
                ))}
              </dd>
            </>
          )}
        </dl>
        <ol className="history">
          {rollout.history.map((change, index) => (
            <li key={index}><span className="badge">{words(change.new_status)}</span> <span className="faint num">{formatTime(change.changed_at)}</span></li>
          ))}
        </ol>
      </Panel>
      {overriding && (
        <OverrideDialog
          rollout={rollout}
          onClose={(saved) => {
            setOverriding(false);
            if (saved) reload();
          }}
        />
      )}
    </>
  );
}

function ValidationFacts({ rollout }: { rollout: Rollout }) {
  const { validation } = rollout;
  const parts = Object.entries(rollout.reward_parts ?? {});
  return (
    <dl className="facts">
      {validation ? (
        <>
          <dt>query</dt>
          <dd><code>{validation.query}</code></dd>
          <dt>expected</dt>
          <dd><Clamped lines={5}><code>{validation.expected}</code></Clamped></dd>
          <dt>actual</dt>
          <dd><Clamped lines={5}><code className={validation.success ? "good" : "bad"}>{validation.actual}</code></Clamped></dd>
          <dt>took</dt>
          <dd className="num">{formatDuration(validation.duration_s)}</dd>
        </>
      ) : (
        <>
          <dt>validation</dt>
          <dd className="dim">{rollout.status !== "running" ? "none: an infrastructure fault ended the rollout" : rollout.is_run_alive ? "available when the rollout has ended" : "none: the run was interrupted"}</dd>
        </>
      )}
      {rollout.answer !== null && (
        <>
          <dt>the agent said</dt>
          <dd><Clamped lines={6}>{rollout.answer}</Clamped></dd>
        </>
      )}
      {parts.map(([name, value]) => (
        <div className="fact-pair" key={name}>
          <dt>reward · {words(name)}</dt>
          <dd className="num">{formatNumber(value)}</dd>
        </div>
      ))}
    </dl>
  );
}

function Overrides({ rollout }: { rollout: Rollout }) {
  return (
    <div className="overrides" data-testid="overrides">
      <h3>Human verdicts</h3>
      <ol>
        {rollout.overrides.map((one) => (
          <li key={one.override_id}>
            <div className="row wrap">
              {one.success === null ? <span className="badge">withdrawn</span> : <Outcome success={one.success} />}
              {one.reward !== null && <span className="num">reward {formatNumber(one.reward)}</span>}
              <span className="faint">{one.actor}, {formatTime(one.created_at)}</span>
            </div>
            <p>{one.reason}</p>
          </li>
        ))}
      </ol>
    </div>
  );
}
