import type { Judgement } from "../api/types";
import { formatDollars, formatDuration, formatNumber, formatPercent, plural } from "../format";
import { Clamped, Outcome, Panel } from "../ui/parts";

/** What a judge said: its verdict, every vote, what it was asked with and what it cost. */
export function JudgementPanel({ judgement }: { judgement: Judgement }) {
  return (
    <Panel
      title={<>Judge {judgement.success === null ? <span className="badge">no verdict</span> : <Outcome success={judgement.success} />}</>}
      actions={<span className="faint">{judgement.decides ? "decides, without a validator" : "beside the validator, which decides"}</span>}
    >
      <dl className="facts" data-testid="judgement">
        <dt>model</dt>
        <dd className="mono">{judgement.model}</dd>
        <dt>reason</dt>
        <dd><Clamped lines={6}>{judgement.reason}</Clamped></dd>
        {judgement.score !== null && (
          <>
            <dt>score</dt>
            <dd className="num">{formatNumber(judgement.score)}</dd>
          </>
        )}
        <dt>agreement</dt>
        <dd className="num">{judgement.success === null ? "–" : `${formatPercent(judgement.agreement)} of ${plural(judgement.votes.length, "vote")}`}</dd>
        <dt>saw</dt>
        <dd>{judgement.screenshots === "all" ? "all screenshots" : "the final screenshot"}</dd>
        <dt>took</dt>
        <dd className="num">{formatDuration(judgement.duration_s)}</dd>
        <dt>tokens</dt>
        <dd className="num">{formatNumber(judgement.num_prompt_tokens)} in, {formatNumber(judgement.num_answer_tokens)} out</dd>
        <dt>cost</dt>
        <dd className="num">{judgement.cost_usd === null ? "no prices set" : formatDollars(judgement.cost_usd)}</dd>
      </dl>
      <details className="judge-details">
        <summary>{plural(judgement.votes.length, "vote")}</summary>
        <ol>
          {judgement.votes.map((vote, index) => (
            <li key={index}>
              <div className="row wrap">
                {vote.success === null ? <span className="badge">{vote.is_malformed ? "malformed" : "no answer"}</span> : <Outcome success={vote.success} />}
                {vote.score !== null && <span className="num">score {formatNumber(vote.score)}</span>}
                <span className="faint num">{formatDuration(vote.duration_s)}</span>
              </div>
              <Clamped lines={6}>{vote.error ?? vote.reason}</Clamped>
              {vote.is_malformed && <pre className="code" tabIndex={0} aria-label="the raw response">{vote.text}</pre>}
            </li>
          ))}
        </ol>
      </details>
      <details className="judge-details">
        <summary>Prompt <span className="faint mono">{judgement.prompt_sha256.slice(0, 12)}</span></summary>
        <pre className="code" tabIndex={0} aria-label="the judge's prompt">{judgement.prompt}</pre>
      </details>
    </Panel>
  );
}
