import { useState } from "react";
import type { TurnDetail, TurnTokens } from "../api/types";
import { plural } from "../format";
import { Segments } from "../ui/parts";
import { Screenshot } from "./Screenshot";

type Item = Record<string, unknown>;

const VIEWS = [
  { value: "messages", label: "Messages" },
  { value: "prompt", label: "Prompt as rendered" },
  { value: "json", label: "JSON" },
] as const;

type View = (typeof VIEWS)[number]["value"];

/** Exactly what the model saw: the request's messages and images, the rendered prompt, or the raw JSON. */
export function PromptView({ turn, tokens, missing }: { turn: TurnDetail; tokens: TurnTokens | undefined; missing: string | undefined }) {
  const [view, setView] = useState<View>("messages");
  return (
    <div className="stack" data-testid="prompt">
      <div className="row between wrap">
        <Segments label="Show the request as" value={view} options={VIEWS} onChange={setView} />
        <span className="faint num">
          {plural(turn.num_prompt_tokens, "token")}, {turn.cached_tokens} cached
          {turn.prompt_matches_renderer ? "" : ", differs from the renderer"}
        </span>
      </div>
      {view === "messages" && <Messages request={turn.request} missing={missing} />}
      {view === "prompt" && <RenderedPrompt tokens={tokens} missing={missing} />}
      {view === "json" && (
        <pre className="code" tabIndex={0} aria-label="Request as JSON">
          {JSON.stringify(turn.request, null, 2)}
        </pre>
      )}
    </div>
  );
}

function isItem(value: unknown): value is Item {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function listOf(value: unknown): Item[] {
  return Array.isArray(value) ? value.filter(isItem) : [];
}

function Messages({ request, missing }: { request: Item; missing: string | undefined }) {
  const items = listOf(request["input"] ?? request["messages"]);
  const tools = listOf(request["tools"]);
  return (
    <div className="messages-box" tabIndex={0} role="group" aria-label="Messages of the request">
      <ol className="messages">
        {typeof request["instructions"] === "string" && <Message role="system" parts={[{ text: request["instructions"] }]} missing={missing} />}
        {items.map((item, index) => (
          <Message key={index} role={String(item["role"] ?? item["type"] ?? "item")} parts={partsOf(item)} missing={missing} />
        ))}
        {tools.length > 0 && (
          <li className="message">
            <span className="role">tools</span>
            <details>
              <summary>{tools.map((tool) => String(tool["name"] ?? "tool")).join(", ")}</summary>
              <pre className="code" tabIndex={0} aria-label="Tools as JSON">{JSON.stringify(tools, null, 2)}</pre>
            </details>
          </li>
        )}
      </ol>
    </div>
  );
}

function partsOf(item: Item): Item[] {
  const content = item["content"] ?? item["output"] ?? item["summary"];
  if (typeof content === "string") return [{ text: content }];
  if (Array.isArray(content)) return listOf(content);
  if (item["type"] === "function_call") return [{ text: `${String(item["name"])} ${String(item["arguments"])}`, code: true }];
  return [{ text: JSON.stringify(item), code: true }];
}

function imageOf(part: Item): string | null {
  const address = part["image_url"];
  const text = isItem(address) ? address["url"] : address;
  return typeof text === "string" && text.startsWith("sha256:") ? text.slice(7) : null;
}

function Message({ role, parts, missing }: { role: string; parts: Item[]; missing: string | undefined }) {
  return (
    <li className={`message ${role}`}>
      <span className="role">{role.replaceAll("_", " ")}</span>
      <div className="parts">
        {parts.map((part, index) => {
          const sha256 = imageOf(part);
          if (sha256) return <Screenshot key={index} sha256={sha256} alt="Screenshot in the prompt" lazy missing={missing} className="in-prompt" />;
          const text = String(part["text"] ?? JSON.stringify(part));
          return part["code"] ? <code key={index}>{text}</code> : <p key={index}>{text}</p>;
        })}
      </div>
    </li>
  );
}

function RenderedPrompt({ tokens, missing }: { tokens: TurnTokens | undefined; missing: string | undefined }) {
  if (!tokens) return <div className="skeleton" style={{ height: 120 }} />;
  return (
    <div className="code rendered" tabIndex={0} role="group" aria-label="The prompt as the model read it">
      {tokens.prompt.map((part, index) =>
        part.kind === "image" ? (
          <span key={index} className="prompt-image">
            <Screenshot sha256={part.sha256} alt="Image in the prompt" lazy missing={missing} className="in-prompt" />
            <span className="faint">{part.num_tokens} image tokens</span>
          </span>
        ) : (
          <span key={index}>{part.text ?? `[${part.num_tokens} text tokens]`}</span>
        ),
      )}
    </div>
  );
}
