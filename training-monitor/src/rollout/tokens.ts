import type { TurnTokens } from "../api/types";

export const TOKEN_MODES = [
  { value: "logprob", label: "Log-prob" },
  { value: "gap", label: "Gap" },
  { value: "advantage", label: "Advantage" },
  { value: "version", label: "Version" },
] as const;

export type TokenMode = (typeof TOKEN_MODES)[number]["value"];

export type TokenView = {
  index: number;
  id: number;
  text: string;
  sampling: number | null;
  training: number | null;
  /** Trainer minus sampler; null while the trainer has not scored the token. */
  gap: number | null;
};

/** Tokens with everything known about each; ids stand in for texts where the tokenizer is missing. */
export function tokenViews(tokens: TurnTokens): TokenView[] {
  return tokens.tokens.map((id, index) => {
    const sampling = tokens.sampling_logprobs[index] ?? null;
    const training = tokens.training_logprobs?.[index] ?? null;
    return {
      index,
      id,
      text: tokens.texts?.[index] ?? `#${id}`,
      sampling,
      training,
      gap: sampling === null || training === null ? null : training - sampling,
    };
  });
}

/** Background of a token: how strong the mode's value is, from 0 (nothing) to 1. */
export function tokenTint(view: TokenView, mode: TokenMode, tokens: TurnTokens): string | undefined {
  const tint = (color: string, share: number) =>
    share <= 0.02 ? undefined : `color-mix(in srgb, ${color} ${Math.round(Math.min(1, share) * 62)}%, transparent)`;
  switch (mode) {
    case "logprob": // a chance of 1 is plain, one of 1 in 50 or less is full
      return view.sampling === null ? undefined : tint("var(--bad)", -view.sampling / 4);
    case "gap": // 0.2 nats apart is far for one token at the same weights
      return view.gap === null ? undefined : tint(view.gap > 0 ? "var(--info)" : "var(--warn)", Math.abs(view.gap) / 0.2);
    case "advantage":
      return tokens.advantage === null
        ? undefined
        : tint(tokens.advantage > 0 ? "var(--good)" : "var(--bad)", Math.abs(tokens.advantage) / 2);
    case "version":
      return tint(`hsl(${(tokens.policy_version * 47) % 360} 70% 55%)`, 0.55);
  }
}

/** White space that would not be seen. */
export function visibleText(text: string): string {
  return text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥");
}
