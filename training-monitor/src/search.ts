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
