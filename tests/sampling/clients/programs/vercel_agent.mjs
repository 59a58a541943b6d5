// Vercel AI SDK: its loop over tools.
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, isStepCount, jsonSchema, streamText, tool } from "ai";

const world = JSON.parse(readFileSync(new URL("world.json", import.meta.url)));
const [name, style] = process.argv[2].split("_");
const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
const screen = { type: "file", mediaType: "image/png", data: { type: "data", data: world.screen.split(",")[1] } };

const shown = {
  execute: async () => "Here.",
  toModelOutput: ({ output }) => ({ type: "content", value: [{ type: "text", text: output }, screen] }),
};
const tools = Object.fromEntries(
  world.functions.map(({ name, description, parameters }) => [
    name,
    tool({
      description,
      inputSchema: jsonSchema(parameters),
      ...(name === "screenshot" ? shown : { execute: async () => "ok" }),
    }),
  ]),
);

const messages = [
  { role: "user", content: [{ type: "text", text: world.task }, screen] },
];
for (const said of [...world.follow_ups, null]) {
  const asked = {
    model: name === "chat" ? openai.chat("policy") : openai.responses("policy"),
    instructions: world.instructions,
    messages,
    tools,
    stopWhen: isStepCount(20),
    maxRetries: 0,
    providerOptions: style === "unstored" ? { openai: { store: false } } : {},
  };
  if (style === "stream") {
    const result = streamText(asked);
    await result.consumeStream({ onError: (error) => { throw error; } });
    messages.push(...(await result.responseMessages));
  } else {
    messages.push(...(await generateText(asked)).responseMessages);
  }
  if (said) messages.push({ role: "user", content: said });
}
