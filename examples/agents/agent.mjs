// A whole agent for Node 18 or newer, with nothing but fetch, in the Chat Completions API:
// agent_command="node examples/agents/agent.mjs"

const { OPENAI_BASE_URL, OPENAI_API_KEY, CUA_DEVICE_URL, CUA_DEVICE_TOKEN, CUA_INSTRUCTION, CUA_MAX_TURNS } = process.env;

async function call(url, body, key = CUA_DEVICE_TOKEN) {
  const response = await fetch(url, {
    method: body ? "POST" : "GET",
    headers: { Authorization: `Bearer ${key}`, "Content-Type": "application/json" },
    body,
  });
  if (!response.ok) throw new Error(`${url} answered ${response.status}: ${await response.text()}`);
  return response.json();
}

const image = (url) => ({ type: "image_url", image_url: { url } });
const { prompt, tool } = await call(CUA_DEVICE_URL);
const { type, strict, ...description } = tool;
const first = await call(`${CUA_DEVICE_URL}/screenshot?as=url`);
const messages = [
  { role: "system", content: prompt },
  { role: "user", content: [{ type: "text", text: CUA_INSTRUCTION }, image(first.url)] },
];

for (let turn = 0; turn < Number(CUA_MAX_TURNS); turn++) {
  const request = { model: "policy", messages, tools: [{ type, function: description }] };
  const completion = await call(`${OPENAI_BASE_URL}/chat/completions`, JSON.stringify(request), OPENAI_API_KEY);
  const { message } = completion.choices[0];
  messages.push(message);
  if (!message.tool_calls) messages.push({ role: "user", content: "Answer with one tool call." });
  for (const { id, function: wanted } of message.tool_calls ?? []) {
    const reply = await call(`${CUA_DEVICE_URL}/action`, wanted.arguments);
    if (reply.finished) process.exit();
    const said = reply.error ? [{ type: "text", text: reply.error }] : [];
    messages.push({ role: "tool", tool_call_id: id, content: [...said, image(reply.screenshot.url)] });
  }
}
