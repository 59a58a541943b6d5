import { formatDuration } from "../format";

/** An action as it is stored: its type and its values, coordinates in pixels of the screenshot before. */
export type StoredAction = Record<string, unknown>;

export type ShownAction = {
  type: string;
  /** One word for a filmstrip. */
  verb: string;
  /** The whole action in a line. */
  line: string;
  at: [number, number] | null;
  to: [number, number] | null;
  /** What cannot be drawn at a place: typed text, keys, buttons. */
  caption: string | null;
};

function numberOf(action: StoredAction, name: string): number {
  const value = action[name];
  return typeof value === "number" ? value : 0;
}

function textOf(action: StoredAction, name: string): string {
  const value = action[name];
  if (Array.isArray(value)) return value.join(" + ");
  return value === undefined || value === null ? "" : String(value);
}

const POINT_VERBS: Record<string, string> = {
  Click: "tap",
  DoubleClick: "double tap",
  RightClick: "right click",
  MoveMouse: "move",
  LongPress: "hold",
};

/** How an action is described and drawn. */
export function describeAction(action: StoredAction | null | undefined): ShownAction | null {
  if (!action) return null;
  const type = textOf(action, "type");
  const at: [number, number] = [numberOf(action, "x"), numberOf(action, "y")];
  const place = `${at[0]}, ${at[1]}`;
  const nowhere = { type, at: null, to: null };
  const verb = POINT_VERBS[type];
  if (verb) {
    const held = type === "LongPress" ? ` for ${formatDuration(numberOf(action, "duration_s"))}` : "";
    return { type, verb, line: `${verb} at ${place}${held}`, at, to: null, caption: null };
  }
  if (type === "Drag") {
    const to: [number, number] = [numberOf(action, "to_x"), numberOf(action, "to_y")];
    return { type, verb: "swipe", line: `swipe from ${place} to ${to[0]}, ${to[1]}`, at, to, caption: null };
  }
  if (type === "Scroll") {
    const [right, down] = [numberOf(action, "right_px"), numberOf(action, "down_px")];
    const to: [number, number] = [at[0] + right, at[1] + down];
    return { type, verb: "scroll", line: `scroll at ${place} by ${right}, ${down} px`, at, to, caption: null };
  }
  if (type === "TypeText") {
    const text = textOf(action, "text");
    return { ...nowhere, verb: "type", line: `type “${text}”`, caption: `⌨ ${text}` };
  }
  if (type === "PressKey") {
    const keys = textOf(action, "keys");
    return { ...nowhere, verb: "key", line: `press ${keys}`, caption: `⌨ ${keys}` };
  }
  if (type === "PressButton") {
    const button = textOf(action, "button");
    return { ...nowhere, verb: button || "button", line: `press the ${button} button`, caption: `◉ ${button}` };
  }
  if (type === "OpenApp") {
    const name = textOf(action, "name");
    return { ...nowhere, verb: "open", line: `open the app ${name}`, caption: `▸ open ${name}` };
  }
  if (type === "Wait") {
    const time = formatDuration(numberOf(action, "duration_s"));
    return { ...nowhere, verb: "wait", line: `wait ${time}`, caption: `⏱ wait ${time}` };
  }
  return { ...nowhere, verb: type || "action", line: JSON.stringify(action), caption: type };
}
