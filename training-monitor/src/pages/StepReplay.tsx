import { useQuery } from "../api/cache";
import { replayPath, rolloutPage, setPage } from "../api/paths";
import type { StepReplay as Replay, Variant } from "../api/types";
import { formatAgo, formatNumber, formatSigned, plural } from "../format";
import { Link, navigate } from "../router";
import { Outcome, Panel } from "../ui/parts";
import { useMore, useSorted, type Column } from "../ui/table";

type Change = Replay["rollouts"][number];
type Task = Replay["tasks"][number];

/** A step made again, and with other settings: how the updates differ, and what each does to the answers. */
export function StepReplay({ runId, step }: { runId: string; step: number }) {
  const { data } = useQuery<Replay | null>(replayPath(runId, step));
  if (!data) return null;
  const { variants } = data;
  return (
    <Panel title={<>{variants.length > 0 ? "What if" : "Made again"} <span className="faint">{variants.length > 0 ? "the same data, trained on with other settings" : ""} {formatAgo(data.at)}</span></>} flush>
      <Fidelity replay={data} />
      {variants.length > 0 && (
        <>
          <Variants replay={data} runId={runId} />
          <TaskEffects replay={data} runId={runId} step={step} />
          <RolloutChanges replay={data} runId={runId} />
        </>
      )}
    </Panel>
  );
}

/** Whether the step that was made again is the one taken: what follows is about that one. */
function Fidelity({ replay }: { replay: Replay }) {
  const { adapter, start } = replay;
  const from = start > 0 ? `the checkpoint after step ${start}` : "the run’s beginning";
  return (
    <p className="panel-body row wrap" data-testid="replay">
      {adapter === null ? <span className="badge">not compared</span> : adapter.is_equal ? <span className="badge good">✓ equal</span> : <span className={`badge ${replay.is_same_machine ? "bad" : "warn"}`}>! differs</span>}
      <span className="num">
        Made again from {from}:{" "}
        {adapter === null ? "the run kept no adapter of the step" : adapter.is_equal ? `the same adapter, bit for bit${adapter.num > 0 ? ` (${plural(adapter.num, "number")})` : ", by its hash"}` : `another adapter, by up to ${formatNumber(adapter.largest, 2)} of numbers up to ${formatNumber(adapter.scale, 2)}${replay.is_same_machine ? "" : ", on another kind of machine"}`}
        {replay.logprob_gap ? `; log-probabilities before it differ by up to ${formatNumber(replay.logprob_gap, 2)} nats` : ""}.
      </span>
    </p>
  );
}

function Variants({ replay, runId }: { replay: Replay; runId: string }) {
  const widest = Math.max(1, ...replay.variants.map((one) => one.relative_norm ?? 0));
  const reach = Math.max(1e-12, ...replay.rollouts.flatMap((one) => one.changes.map((change) => Math.abs(change ?? 0))));
  return (
    <div className="table-scroll" tabIndex={0} role="group" aria-label="The step with other settings">
      <table className="data">
        <thead>
          <tr>
            <th>Settings</th>
            <th className="right" title="length of the update, as a multiple of that of the update taken">Norm</th>
            <th><span className="sr-only">Norm, drawn</span></th>
            <th className="right" title="of the angle to the update taken">Cosine</th>
            <th className="right" title="of the angle between the gradients, before AdamW">of gradients</th>
            <th className="right" title="mean change of the log-probability of all answers of a rollout, nats">Successes, nats</th>
            <th className="right" title="mean change of the log-probability of all answers of a rollout, nats">Failures, nats</th>
            <th title={`a dot for each rollout, from −${formatNumber(reach, 2)} to +${formatNumber(reach, 2)} nats`}>Change of each rollout</th>
          </tr>
        </thead>
        <tbody>
          {replay.variants.map((one, index) => (
            <tr key={index}>
              <td><b>{one.name}</b></td>
              <td className="right">{one.relative_norm === null ? formatNumber(one.norm, 3) : `${formatNumber(one.relative_norm, 3)} ×`}</td>
              <td><div className="share-bar" aria-hidden="true"><i style={{ width: `${(100 * (one.relative_norm ?? 0)) / widest}%` }} /></div></td>
              <td className={`right ${cosineTone(one)}`}>{formatNumber(one.cosine, 3)}</td>
              <td className="right">{formatNumber(one.gradient_cosine, 3)}</td>
              <td className="right">{formatSigned(one.successes)}</td>
              <td className="right">{formatSigned(one.failures)}</td>
              <td><Strip changes={replay.rollouts} index={index} reach={reach} runId={runId} /></td>
            </tr>
          ))}
        </tbody>
      </table>
      <p className="faint legend panel-body"><i style={{ background: "var(--good)" }} /> success <i style={{ background: "var(--bad)" }} /> failure; right of the line: more likely after the step</p>
    </div>
  );
}

const cosineTone = ({ cosine }: Variant) => (cosine === null || cosine > 0.5 ? "" : cosine < 0 ? "bad" : "warn");
const WIDTH = 240;

function Strip({ changes, index, reach, runId }: { changes: readonly Change[]; index: number; reach: number; runId: string }) {
  const up = changes.filter((one) => (one.changes[index] ?? 0) > 0).length;
  const middle = WIDTH / 2;
  return (
    <svg className="strip" width={WIDTH} height="28" viewBox={`0 0 ${WIDTH} 28`} role="img" aria-label={`${up} of ${plural(changes.length, "rollout")} became more likely`}>
      <line x1={middle} x2={middle} y1="0" y2="28" stroke="var(--line-strong)" />
      {changes.map((one) => (
        <circle key={one.rollout_id} cx={middle + ((middle - 5) * (one.changes[index] ?? 0)) / reach} cy={one.success ? 9 : 19} r="3.5" fill={one.success ? "var(--good)" : "var(--bad)"} fillOpacity="0.6" onClick={() => navigate(rolloutPage(runId, one.rollout_id))}>
          <title>{`${one.task_id}, ${one.success ? "success" : "failure"}: ${formatSigned(one.changes[index])} nats`}</title>
        </circle>
      ))}
    </svg>
  );
}

function TaskEffects({ replay, runId, step }: { replay: Replay; runId: string; step: number }) {
  const columns: Column<Task>[] = [
    { label: "Task", value: (one) => one.task_id },
    ...replay.variants.map(({ name }, index): Column<Task> => ({ label: name, right: true, title: "mean change of successes / of failures, nats", value: ({ effects }) => effects[index]?.successes ?? effects[index]?.failures })),
  ];
  const { sorted, head } = useSorted(replay.tasks, columns, "effects");
  const { shown, more } = useMore(sorted, 8);
  return (
    <>
      <h3 className="panel-body">Effect on each task <span className="faint">successes / failures, nats</span></h3>
      <div className="table-scroll">
        <table className="data">
          <thead>{head}</thead>
          <tbody>
            {shown.map((task) => (
              <tr key={task.task_id}>
                <td className="wrap"><Link className="text-link" data-row to={setPage({ run_id: runId, phase: "step", step, task_id: task.task_id })}>{task.task_id}</Link></td>
                {task.effects.map((one, index) => <td key={index} className="right">{formatSigned(one.successes)} <span className="faint">/</span> {formatSigned(one.failures)}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {more}
    </>
  );
}

function RolloutChanges({ replay, runId }: { replay: Replay; runId: string }) {
  const columns: Column<Change>[] = [
    { label: "Rollout", value: (one) => one.task_id },
    { label: "Outcome", value: (one) => Number(one.success) },
    { label: "Advantage", right: true, value: (one) => one.advantage },
    ...replay.variants.map(({ name }, index): Column<Change> => ({ label: name, right: true, title: "change of the log-probability of all its answers, nats", value: (one) => one.changes[index] })),
  ];
  const { sorted, head } = useSorted(replay.rollouts, columns, "changes");
  const { shown, more } = useMore(sorted, 8);
  return (
    <>
      <h3 className="panel-body">Change of each rollout <span className="faint">log-probability of all its answers, nats</span></h3>
      <div className="table-scroll">
        <table className="data">
          <thead>{head}</thead>
          <tbody>
            {shown.map((one) => (
              <tr key={one.rollout_id}>
                <td className="wrap"><Link className="text-link" data-row to={rolloutPage(runId, one.rollout_id)}>{one.task_id} <span className="mono">{one.rollout_id.slice(0, 8)}</span></Link></td>
                <td><Outcome success={one.success} /></td>
                <td className="right">{formatSigned(one.advantage)}</td>
                {one.changes.map((change, index) => <td key={index} className="right">{formatSigned(change)}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {more}
    </>
  );
}
