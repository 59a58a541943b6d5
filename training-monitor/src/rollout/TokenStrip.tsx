import { useEffect, useRef, type KeyboardEvent } from "react";
import type { RolloutCell, TurnDetail, TurnTokens } from "../api/types";
import { formatNumber, formatPercent, formatSigned } from "../format";
import { useSearchParam } from "../router";
import { Segments } from "../ui/parts";
import { TOKEN_MODES, tokenTint, tokenViews, visibleText, type TokenMode, type TokenView } from "./tokens";

type Props = { tokens: TurnTokens; turn: TurnDetail; rollout: RolloutCell };

function modeOf(value: string): TokenMode {
  return TOKEN_MODES.find((mode) => mode.value === value)?.value ?? "logprob";
}

/** What the model sampled, token by token; the chosen token and the colouring are part of the address. */
export function TokenStrip({ tokens, turn, rollout }: Props) {
  const [modeText, setMode] = useSearchParam("color", "logprob");
  const [tokenText, setToken] = useSearchParam("token");
  const strip = useRef<HTMLDivElement>(null);
  const mode = modeOf(modeText);
  const views = tokenViews(tokens);
  const chosen = tokenText === "" ? null : (views[Number(tokenText)] ?? null);
  useEffect(() => {
    strip.current?.querySelector('[aria-selected="true"]')?.scrollIntoView({ block: "nearest" });
  }, [tokenText]);
  const keys = (event: KeyboardEvent) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const now = new URLSearchParams(window.location.search).get("token"); // keys may come faster than pages
    const next = Math.min(views.length - 1, Math.max(0, Number(now ?? -1) + step));
    setToken(String(next));
  };
  return (
    <div className="tokens">
      <div className="row between wrap">
        <Segments label="Colour tokens by" value={mode} options={TOKEN_MODES} onChange={setMode} />
        <TokenLegend mode={mode} tokens={tokens} />
      </div>
      <div
        className="token-strip"
        role="listbox"
        aria-label={`${views.length} sampled tokens. Arrow keys move along them.`}
        tabIndex={0}
        ref={strip}
        onKeyDown={keys}
      >
        {views.map((view) => (
          <span
            key={view.index}
            role="option"
            aria-selected={view.index === chosen?.index}
            style={{ background: tokenTint(view, mode, tokens) }}
            title={tokenTitle(view)}
            onClick={() => setToken(view.index === chosen?.index ? "" : String(view.index))}
          >
            {visibleText(view.text)}
          </span>
        ))}
      </div>
      {tokens.texts === null && (
        <p className="faint">Token ids are shown: the run&apos;s tokenizer is not on the monitor&apos;s machine.</p>
      )}
      {chosen ? (
        <TokenFacts view={chosen} tokens={tokens} turn={turn} rollout={rollout} />
      ) : (
        <p className="faint">Choose a token to see its probabilities, adapter and reward.</p>
      )}
    </div>
  );
}

function tokenTitle(view: TokenView): string {
  const probability = view.sampling === null ? "–" : formatPercent(Math.exp(view.sampling), 1);
  return `token ${view.index}, p ${probability}${view.gap === null ? "" : `, gap ${formatSigned(view.gap)}`}`;
}

function TokenLegend({ mode, tokens }: { mode: TokenMode; tokens: TurnTokens }) {
  switch (mode) {
    case "logprob":
      return <span className="faint legend"><i style={{ background: "color-mix(in srgb, var(--bad) 60%, transparent)" }} /> less probable when sampled</span>;
    case "gap":
      if (!tokens.training_logprobs) return <span className="faint">the trainer has not scored this turn: its group was constant, or not yet trained</span>;
      return (
        <span className="faint legend">
          <i style={{ background: "var(--info)" }} /> trainer higher <i style={{ background: "var(--warn)" }} /> sampler higher
        </span>
      );
    case "advantage":
      return <span className="faint">advantage <b className="num">{formatSigned(tokens.advantage)}</b>, the same for every token of the turn</span>;
    case "version":
      return <span className="faint">sampled by <b className="mono">{adapterName(tokens.policy_version)}</b></span>;
  }
}

/** The name under which the model server knew the adapter of a version. */
export function adapterName(version: number): string {
  return `policy-${String(version).padStart(6, "0")}`;
}

function TokenFacts({ view, tokens, turn, rollout }: { view: TokenView } & Props) {
  const facts: [string, string][] = [
    ["token", `${view.index + 1} of ${tokens.tokens.length}, id ${view.id}`],
    ["sampler", `log p ${formatNumber(view.sampling)}, p ${view.sampling === null ? "–" : formatPercent(Math.exp(view.sampling), 2)}`],
    ["trainer", view.training === null ? "not scored" : `log p ${formatNumber(view.training)}`],
    ["gap, ratio", view.gap === null ? "–" : `${formatSigned(view.gap)} nats, ratio ${formatNumber(Math.exp(view.gap))}`],
    ["adapter", adapterName(tokens.policy_version)],
    ["trained in step", turn.trained_at_step === null ? "not trained" : String(turn.trained_at_step)],
    ["advantage", formatSigned(tokens.advantage)],
    ["reward", formatNumber(rollout.reward)],
  ];
  return (
    <div className="token-facts" data-testid="token-facts" aria-live="polite">
      <code className="token-text">{visibleText(view.text)}</code>
      <dl className="facts num">
        {facts.map(([name, value]) => (
          <div key={name} className="fact">
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
}
