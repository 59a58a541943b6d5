import { useQuery } from "../api/cache";
import { reviewPage, rolloutPage, shortSourceName, verdictsPath } from "../api/paths";
import type { Run, Verdict } from "../api/types";
import { download } from "../charts/series";
import { formatAgo, formatNumber, formatTime } from "../format";
import { Link } from "../router";
import { Empty, Loaded, Outcome, Panel } from "../ui/parts";
import { useMore, useSorted, type Column } from "../ui/table";

const COLUMNS: readonly Column<Verdict>[] = [
  { label: "Rollout", value: (one) => one.task_id },
  { label: "Of", value: (one) => one.step },
  { label: "Verdict", value: (one) => String(one.success) },
  { label: "Validator", value: (one) => String(one.validator_success) },
  { label: "Reward", right: true, value: (one) => one.reward, title: "given by a person; the trained one in parentheses" },
  { label: "Reason" },
  { label: "By", value: (one) => one.actor },
  { label: "When", right: true, value: (one) => one.created_at },
];

/** All human verdicts on the run's rollouts, also as a file. */
export function RunVerdicts({ run }: { run: Run }) {
  const query = useQuery<Verdict[]>(verdictsPath(run.run_id));
  return <Loaded query={query}>{(verdicts) => <Verdicts run={run} verdicts={verdicts} />}</Loaded>;
}

function Verdicts({ run, verdicts }: { run: Run; verdicts: readonly Verdict[] }) {
  const { sorted, head } = useSorted(verdicts, COLUMNS);
  const { shown, more } = useMore(sorted, 300);
  const save = () => download(`verdicts-${run.run_name}.json`, new Blob([JSON.stringify(verdicts, null, 2)], { type: "application/json" }));
  if (verdicts.length === 0) {
    return <Empty title="No human verdict"><p>Verdicts that people give with “Override” on a rollout&apos;s page are listed here.</p><Link className="button" to={reviewPage(run.run_id)}>What validator and judge disagree about</Link></Empty>;
  }
  return (
    <Panel
      title={<>Human verdicts <span className="faint">{verdicts.length}</span></>}
      flush
      actions={
        <>
          <Link className="button" to={reviewPage(run.run_id)}>What validator and judge disagree about</Link>
          <button type="button" className="button" onClick={save}>Save as JSON</button>
        </>
      }
    >
      <div className="table-scroll">
        <table className="data">
          <thead>{head}</thead>
          <tbody>
            {shown.map((one) => (
              <tr key={one.override_id}>
                <td><Link className="text-link" data-row to={rolloutPage(run.run_id, one.rollout_id)}>{one.task_id}</Link> <span className="faint">seed {one.seed}</span></td>
                <td>{shortSourceName(one.phase, one.step)}</td>
                <td>{one.success === null && one.reward === null ? <span className="badge">withdrawn</span> : one.success === null ? "–" : <Outcome success={one.success} />}</td>
                <td>{one.validator_success === null ? <span className="faint">none</span> : <Outcome success={one.validator_success} />}</td>
                <td className="right">{formatNumber(one.reward, 3)} <span className="faint">({formatNumber(one.trained_reward, 3)})</span></td>
                <td className="wrap">{one.reason}</td>
                <td>{one.actor}</td>
                <td className="right dim" title={formatTime(one.created_at)}>{formatAgo(one.created_at)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {more}
    </Panel>
  );
}
