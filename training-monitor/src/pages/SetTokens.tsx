import { useQuery } from "../api/cache";
import { outliersPath, rolloutPage } from "../api/paths";
import type { OutlyingToken } from "../api/types";
import { formatNumber } from "../format";
import { Link, useSearchParam } from "../router";
import { Empty, Loaded, Panel, Segments } from "../ui/parts";

const ORDERS = [
  { value: "", label: "Gap" },
  { value: "ratio", label: "Ratio" },
  { value: "surprise", label: "Surprise" },
] as const;

/** The tokens at which trainer and sampler disagree most, or that were least likely; each leads to itself. */
export function SetTokens({ set }: { set: URLSearchParams }) {
  const [by, setBy] = useSearchParam("by");
  const query = useQuery<OutlyingToken[]>(outliersPath(set, by || "gap"));
  const name = ORDERS.find((one) => one.value === by)?.label ?? "Gap";
  return (
    <Panel title="Outlying tokens, of those trained on" flush actions={<Segments label="Largest" value={by} options={ORDERS} onChange={setBy} />}>
      <Loaded query={query} height={420}>
        {(tokens) =>
          tokens.length === 0 ? (
            <Empty title="No token"><p>No token of these rollouts has been trained on.</p></Empty>
          ) : (
            <div className="table-scroll">
              <table className="data">
                <thead><tr><th>Token</th><th>Rollout</th><th className="right">Turn</th><th className="right">Sampler</th><th className="right">Trainer</th><th className="right" title="|trainer − sampler|; trainer / sampler; −sampler">{name}</th></tr></thead>
                <tbody>
                  {tokens.map((one) => (
                    <tr key={`${one.run_id}/${one.rollout_id}/${one.turn_index}/${one.token_index}`}>
                      <td className="mono"><Link className="text-link" data-row to={tokenPage(one, by === "surprise" ? "logprob" : "gap")}>{one.text === null ? `id ${one.token}` : JSON.stringify(one.text)}</Link></td>
                      <td className="wrap"><Link className="text-link" to={rolloutPage(one.run_id, one.rollout_id)}>{one.task_id}</Link></td>
                      <td className="right">{one.turn_index + 1}</td>
                      <td className="right">{formatNumber(one.sampling_logprob, 3)}</td>
                      <td className="right">{formatNumber(one.training_logprob, 3)}</td>
                      <td className="right"><b>{formatNumber(by === "ratio" && one.value !== null ? Math.exp(one.value) : one.value, 3)}</b></td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          )
        }
      </Loaded>
    </Panel>
  );
}

function tokenPage(one: OutlyingToken, color: string): string {
  const page = rolloutPage(one.run_id, one.rollout_id, one.turn_index);
  return `${page}${page.includes("?") ? "&" : "?"}token=${one.token_index}&color=${color}`;
}
