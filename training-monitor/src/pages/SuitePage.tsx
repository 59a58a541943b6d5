import { useQuery } from "../api/cache";
import { differencePath, runPage, setPage, suitePage, suitePath } from "../api/paths";
import type { SetComparison, Suite, SuiteComparison, SuiteModel } from "../api/types";
import { formatAgo, formatNumber, formatPercent, formatTime, plural } from "../format";
import { Link, useSearchParam } from "../router";
import { signedPoints } from "../sets";
import { Empty, Loaded, PageHead, Panel, Stat } from "../ui/parts";
import { useMore } from "../ui/table";
import { Tasks } from "./SetDifference";

/** A regression suite: which checkpoint is accepted, how each one compared with it, and at which tasks. */
export function SuitePage({ runId }: { runId: string }) {
  const query = useQuery<Suite | null>(suitePath(runId));
  return (
    <Loaded query={query} height={420}>
      {(suite) =>
        suite === null ? (
          <Empty title="Not compared yet" page>
            <p>A suite compares a checkpoint with the last one accepted, on the same tasks and seeds.</p>
            <pre>python -m cua_rl.recipes.suite log_path=suites/phone models=…</pre>
          </Empty>
        ) : (
          <SuiteView suite={suite} runId={runId} />
        )
      }
    </Loaded>
  );
}

function SuiteView({ suite, runId }: { suite: Suite; runId: string }) {
  const [at] = useSearchParam("at");
  const all = suite.comparisons;
  const chosen = all.find((one) => one.at === at) ?? all.find((one) => one.candidate.run_id === runId) ?? all[0];
  return (
    <>
      <PageHead crumbs={[{ label: "Runs", to: "/" }, { label: "Suite" }, { label: suite.name }]} title={suite.name} note={<>Regression suite; accepted now: <Model of={suite.accepted} /></>} />
      {chosen && <Verdict one={chosen} />}
      <Comparisons all={all} chosen={chosen} runId={runId} />
      {chosen && <ByTask one={chosen} />}
    </>
  );
}

function Model({ of }: { of: SuiteModel }) {
  return of.run_id === null ? <b>{of.name}</b> : <Link className="text-link" to={runPage(of.run_id)}>{of.name}</Link>;
}

function VerdictBadge({ one }: { one: SuiteComparison }) {
  if (one.is_regression) return <span className="badge bad">✕ regression</span>;
  return <span className="badge good">✓ {one.is_accepted ? "accepted" : "no regression"}</span>;
}

const pValue = (value: number) => (value < 0.001 ? "< 0.001" : formatNumber(value, 2));

function Verdict({ one }: { one: SuiteComparison }) {
  return (
    <dl className="stats" data-testid="suite-verdict">
      <Stat label="Checkpoint"><Model of={one.candidate} /><small>against <Model of={one.accepted} /></small></Stat>
      <Stat label="Verdict" hint="McNemar's exact test, one-sided"><VerdictBadge one={one} /><small>p {pValue(one.p_value)}, alarm at {formatNumber(one.false_alarms)}</small></Stat>
      <Stat label="Difference" hint="of the success rates, in percentage points, with its 95 % interval">
        <span className={tone(one)}>{signedPoints(one.pair.difference)}</span><small>{signedPoints(one.pair.low)} to {signedPoints(one.pair.high)} points</small>
      </Stat>
      <Stat label="Tasks that changed"><span>{one.pair.num_only_first} worse</span><small>{one.pair.num_only_second} better, of {plural(one.pair.num_tasks, "task")}</small></Stat>
      <Stat label="Power" hint="probability with which such a fall is found among so many tasks">{formatPercent(one.power)}<small>for a fall of {formatNumber(100 * one.fall)} points, churn {formatPercent(one.churn)}</small></Stat>
    </dl>
  );
}

const tone = (one: SuiteComparison) => (one.pair.high < 0 ? "bad" : one.pair.low > 0 ? "good" : "");

function Comparisons({ all, chosen, runId }: { all: readonly SuiteComparison[]; chosen: SuiteComparison | undefined; runId: string }) {
  const { shown, more } = useMore(all, 20);
  const reach = Math.max(...all.flatMap((one) => [Math.abs(one.pair.low), Math.abs(one.pair.high)]), 0.01);
  return (
    <Panel title={<>Comparisons <span className="faint">{all.length}</span></>} flush>
      <div className="table-scroll">
        <table className="data">
          <thead><tr><th>Checkpoint</th><th>Against</th><th>Difference, 95 % interval</th><th className="right">Points</th><th className="right">Worse</th><th className="right">Better</th><th className="right" title="one-sided, McNemar's exact test">p</th><th className="right" title="probability with which the fall that was asked for is found">Power</th><th>Verdict</th><th className="right">When</th></tr></thead>
          <tbody>
            {shown.map((one) => (
              <tr key={one.at} className={one === chosen ? "selected" : undefined}>
                <td><Link className="run-name" data-row aria-current={one === chosen ? "true" : undefined} to={suitePage(runId, one.at)}>{one.candidate.name}</Link></td>
                <td><Model of={one.accepted} /></td>
                <td className="interval-cell"><Whiskers one={one} reach={reach} /></td>
                <td className={`right ${tone(one)}`}>{signedPoints(one.pair.difference)}</td>
                <td className="right">{one.pair.num_only_first}</td>
                <td className="right">{one.pair.num_only_second}</td>
                <td className="right">{pValue(one.p_value)}</td>
                <td className="right">{formatPercent(one.power)}</td>
                <td><VerdictBadge one={one} /></td>
                <td className="right dim" title={formatTime(one.at)}>{formatAgo(one.at)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {more}
    </Panel>
  );
}

/** A difference with its interval about a line at zero; all rows have one scale. */
function Whiskers({ one, reach }: { one: SuiteComparison; reach: number }) {
  const at = (value: number) => 60 + (58 * value) / reach;
  const color = one.is_regression ? "var(--bad)" : "var(--good)";
  return (
    <svg width="120" height="16" viewBox="0 0 120 16" role="img" aria-label={`${signedPoints(one.pair.difference)} points, from ${signedPoints(one.pair.low)} to ${signedPoints(one.pair.high)}`}>
      <line x1="60" x2="60" y1="0" y2="16" stroke="var(--line-strong)" />
      <line x1={at(one.pair.low)} x2={at(one.pair.high)} y1="8" y2="8" stroke={color} strokeWidth="2" />
      <circle cx={at(one.pair.difference)} cy="8" r="3.5" fill={color} />
    </svg>
  );
}

/** The tasks of the comparison, those that got worse most first. */
function ByTask({ one }: { one: SuiteComparison }) {
  const [first, second] = [one.accepted.run_id, one.candidate.run_id].map((run_id) => setPage({ run_id, phase: "eval" }).split("?")[1] ?? "");
  const isWhole = one.accepted.run_id !== null && one.candidate.run_id !== null && first !== undefined && second !== undefined;
  const query = useQuery<SetComparison>(isWhole ? differencePath(first, second) : null);
  if (!isWhole) return <p className="dim">The rollouts of {one.accepted.run_id === null ? one.accepted.name : one.candidate.name} were deleted.</p>;
  return <Loaded query={query} height={240}>{(found) => <Tasks found={found} first={new URLSearchParams(first)} second={new URLSearchParams(second)} names={[one.accepted.name, one.candidate.name]} />}</Loaded>;
}
