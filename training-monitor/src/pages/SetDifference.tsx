import { useQuery } from "../api/cache";
import { differencePath, setPage } from "../api/paths";
import type { Rate, SetArm, SetComparison } from "../api/types";
import { paletteColor } from "../charts/series";
import { formatPercent, plural } from "../format";
import { Link } from "../router";
import { runLabels } from "../runs";
import { describeSet, narrowed, signedPoints } from "../sets";
import { IntervalBar, Loaded, Panel } from "../ui/parts";
import { useMore, useSorted, type Column } from "../ui/table";

type Task = SetComparison["tasks"][number];
const SURE = 0.05;

/** Two sets of rollouts, by the queries of their addresses: the difference of their success, and at which tasks it is. */
export function SetDifference({ first, second }: { first: string; second: string }) {
  const query = useQuery<SetComparison>(differencePath(first, second));
  const [one, two] = [new URLSearchParams(first), new URLSearchParams(second)];
  return (
    <Loaded query={query} height={240}>
      {(found) => (
        <>
          <Panel title="Is the difference real?">
            <div className="columns">
              <Arm arm={found.first} set={one} color={paletteColor(0)} />
              <Arm arm={found.second} set={two} color={paletteColor(1)} />
            </div>
            <Verdict found={found} />
          </Panel>
          <Tasks found={found} first={one} second={two} />
        </>
      )}
    </Loaded>
  );
}

function Arm({ arm, set, color }: { arm: SetArm; set: URLSearchParams; color: string }) {
  const labels = runLabels(arm.runs);
  const alone = (runId: string) => {
    const next = new URLSearchParams(set);
    next.set("run_id", runId); // in place of all
    return narrowed(next, {});
  };
  return (
    <section className="stack">
      <h3 className="row"><i className="swatch" style={{ background: color }} />{arm.runs.map((run) => labels.get(run.run_id)).join(" + ")}</h3>
      <span className="dim">{describeSet(set)}</span>
      <div className="row">
        {arm.success.rate !== null && <IntervalBar value={arm.success.rate} low={arm.success.low} high={arm.success.high} />}
        <Link className="text-link num" to={narrowed(set, arm.success.rate === null ? {} : { status: "completed" })}>{rateText(arm.success)}</Link>
      </div>
      {arm.runs.length > 1 && (
        <span className="row wrap num">
          {arm.runs.map((run) => <Link key={run.run_id} className="text-link" to={alone(run.run_id)}>{labels.get(run.run_id)} {formatPercent(run.success.rate)}</Link>)}
        </span>
      )}
    </section>
  );
}

function rateText(rate: Rate): string {
  if (rate.rate === null) return "no rollout has ended";
  return `${formatPercent(rate.rate, 1)} (${formatPercent(rate.low)} to ${formatPercent(rate.high)}) of ${plural(rate.num_rollouts, "rollout")}`;
}

function Verdict({ found }: { found: SetComparison }) {
  if (found.difference === null) return <p className="dim">There is no difference to compute: one of the sets has no rollout with a verdict.</p>;
  const isSure = found.low > 0 || found.high < 0;
  return (
    <p className="set-verdict" data-testid="difference">
      <b className={`num ${isSure ? (found.difference > 0 ? "good" : "bad") : ""}`}>{signedPoints(found.difference)} points</b>
      <span className="num">95 % interval {signedPoints(found.low)} to {signedPoints(found.high)}</span>
      {found.p_value !== null ? (
        <span className="num">{found.p_value < 0.001 ? "p < 0.001" : `p = ${found.p_value.toFixed(3)}`}{found.p_value > SURE && isSure ? ", too few pairs to be sure" : ""}</span>
      ) : null}
      <span className="dim">
        {found.paired_by
          ? `${found.test}; ${plural(found.num_pairs, found.paired_by)} in both, ${found.num_better} better and ${found.num_worse} worse`
          : "the sets share too few tasks to be paired: Newcombe's interval of two rates, no test"}
      </span>
    </p>
  );
}

const change = (task: Task) => (task.first.rate === null || task.second.rate === null ? null : task.second.rate - task.first.rate);
const columns = (first: string, second: string): readonly Column<Task>[] => [
  { label: "Task", value: (one) => one.task_id },
  { label: first, right: true, value: (one) => one.first.rate },
  { label: second, right: true, value: (one) => one.second.rate },
  { label: "Change", right: true, title: "in percentage points", value: change },
  { label: "Rollouts", right: true, value: (one) => one.first.num_rollouts + one.second.num_rollouts },
];

type TasksProps = { found: SetComparison; first: URLSearchParams; second: URLSearchParams; names?: readonly [string, string] };

/** Success at each task in both sets; every rate leads to its rollouts. */
export function Tasks({ found, first, second, names = ["First", "Second"] }: TasksProps) {
  const { sorted, head } = useSorted(found.tasks, columns(...names), "tasks");
  const { shown, more } = useMore(sorted, 50);
  const both = [...new Set([...first.getAll("run_id"), ...second.getAll("run_id")])];
  return (
    <Panel title={<>By task <span className="faint">{found.tasks.length}</span></>} flush>
      <div className="table-scroll">
        <table className="data">
          <thead>{head}</thead>
          <tbody>
            {shown.map((task) => {
              const moved = change(task);
              return (
                <tr key={task.task_id}>
                  <td className="wrap"><Link className="run-name" data-row to={setPage({ run_id: both, task_id: task.task_id })}>{task.task_id}</Link></td>
                  {[{ rate: task.first, set: first }, { rate: task.second, set: second }].map(({ rate, set }, index) => (
                    <td key={index} className="right">{rate.rate === null ? "–" : <Link className="text-link" to={narrowed(set, { task_id: task.task_id })}>{formatPercent(rate.rate)}</Link>}</td>
                  ))}
                  <td className={`right ${moved === null || moved === 0 ? "faint" : moved > 0 ? "good" : "bad"}`}>{moved === null ? "–" : signedPoints(moved)}</td>
                  <td className="right">{task.first.num_rollouts} + {task.second.num_rollouts}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      {more}
    </Panel>
  );
}
