/** Letters and digits only, in lower case: "Wi-Fi", "wifi" and "WI_FI" are one word. */
function plain(text: string): string {
  return text.normalize("NFKD").toLowerCase().replaceAll(/[^\p{L}\p{N}]+/gu, "");
}

/** Whether every word of what was typed is in one of the texts, whatever case and punctuation either has. */
export function fits(typed: string, texts: readonly (string | null | undefined)[]): boolean {
  const all = texts.map((text) => plain(text ?? ""));
  const words = typed.split(/\s+/).filter(Boolean);
  return words.every((word) => plain(word) !== "" && all.some((text) => text.includes(plain(word))));
}

const VERDICT: Record<string, string> = { success: "success", successes: "success", failure: "failure", failures: "failure", fault: "fault", faults: "fault" };
const VERDICT_NAMES: Record<string, string> = { success: "Successes", failure: "Failures", fault: "Faults" };
const PHASE: Record<string, string> = { training: "step", evaluation: "eval", evaluations: "eval", baseline: "baseline" };
const PHASE_NAMES: Record<string, string> = { step: "in training", eval: "in evaluations", baseline: "in the baseline" };
const JOINING = ["in", "of", "the", "with", "on", "for"];

/** The set that "wi-fi failures in evaluation" means; null for words that name neither a verdict nor a phase. */
export function setOf(typed: string): { label: string; filter: { verdict?: string; phase?: string; search?: string } } | null {
  const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
  const [verdict, phase] = [VERDICT, PHASE].map((names) => words.map((word) => names[word]).find((one) => one !== undefined));
  if (verdict === undefined && phase === undefined) return null;
  const search = words.filter((word) => !VERDICT[word] && !PHASE[word] && !JOINING.includes(word)).join(" ");
  const label = [verdict ? VERDICT_NAMES[verdict] : "Rollouts", phase && PHASE_NAMES[phase], search && `with “${search}”`].filter(Boolean).join(" ");
  return { label, filter: { ...(verdict && { verdict }), ...(phase && { phase }), ...(search && { search }) } };
}
