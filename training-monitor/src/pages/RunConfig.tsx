import { useQuery } from "../api/cache";
import { comparePath } from "../api/paths";
import type { ConfigRow, Run, RunComparison } from "../api/types";
import { useSearchParam } from "../router";
import { nameOf, runLabels } from "../runs";
import { Empty, Loaded, Panel } from "../ui/parts";
import { useRunChoices } from "../ui/runChoices";
import { useMore } from "../ui/table";

/** The run's settings, beside those of another run if one is chosen. */
export function RunConfig({ run }: { run: Run }) {
  const [other, setOther] = useSearchParam("with");
  const [find, setFind] = useSearchParam("find");
  const [only, setOnly] = useSearchParam("only");
  const { runs, older } = useRunChoices();
  const comparison = useQuery<RunComparison>(other ? comparePath([run.run_id, other]) : null);
  const labels = runLabels(runs);
  const choices = runs.filter((one) => one.run_id !== run.run_id);
  return (
    <Panel
      title="Configuration"
      flush
      actions={
        <>
          <input className="field" type="search" aria-label="Find a setting" placeholder="Find a setting" value={find} onChange={(event) => setFind(event.target.value)} />
          <label className="field-label">
            compare with
            <select className="field" value={other} onChange={(event) => setOther(event.target.value)}>
              <option value="">no other run</option>
              {choices.map((one) => <option key={one.run_id} value={one.run_id}>{labels.get(one.run_id)}</option>)}
            </select>
          </label>
          {older}
          {other && (
            <label className="field-label">
              <input type="checkbox" checked={only === "1"} onChange={(event) => setOnly(event.target.checked ? "1" : "")} />
              differences only
            </label>
          )}
        </>
      }
    >
      {other ? (
        <Loaded query={comparison}>
          {(both) => <ConfigTable names={both.runs.map((one) => runLabels(both.runs).get(one.run_id) ?? nameOf(one))} rows={both.config} find={find} only={only === "1"} />}
        </Loaded>
      ) : (
        <ConfigTable names={[nameOf(run)]} rows={run.settings} find={find} only={false} />
      )}
    </Panel>
  );
}

export function ConfigTable(props: { names: readonly string[]; rows: readonly ConfigRow[]; find: string; only: boolean }) {
  const wanted = props.find.toLowerCase();
  const rows = props.rows.filter(
    (row) => (!props.only || row.is_different) && (wanted === "" || [row.key, ...row.values.map(settingText)].some((text) => text.toLowerCase().includes(wanted))),
  );
  const { shown, more } = useMore(rows, 300);
  if (rows.length === 0) {
    return (
      <Empty title={props.only ? "No difference" : "No such setting"}>
        <p>{props.only ? "The settings that are shown are the same in both runs." : "Clear the search to see all settings."}</p>
      </Empty>
    );
  }
  return (
    <>
    <div className="table-scroll">
      <table className="data config">
        <thead>
          <tr>
            <th>Setting</th>
            {props.names.map((name, index) => <th key={index}>{name}</th>)}
          </tr>
        </thead>
        <tbody>
          {shown.map((row) => (
            <tr key={row.key} className={row.is_different ? "different" : ""}>
              <td className="mono">{row.key}{row.is_different && <span className="badge warn">differs</span>}</td>
              {row.values.map((value, index) => <td key={index} className="mono config-value">{settingText(value)}</td>)}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
    {more}
    </>
  );
}

export function settingText(value: unknown): string {
  if (value === null || value === undefined) return "–";
  if (Array.isArray(value) && value.every((one) => typeof one !== "object")) return value.length ? value.join(", ") : "none";
  if (typeof value === "object") return Object.keys(value).length ? JSON.stringify(value) : "none";
  return value === "" ? "empty" : String(value);
}
