// Shows the screenshot of the turn, and sends lines, of which clicks and drags on the screenshot become some.
const token = location.hash.slice(1);
const [task, turn, form, line, screen, said] = ["task", "turn", "form", "line", "screen", "said"].map((id) =>
  document.getElementById(id),
);
const DRAG_PX = 8;
let shown = { seen: "" };

async function call(path, options = {}) {
  const headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json" };
  const answer = await fetch(path, { ...options, headers });
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  return answer.json();
}

async function look() {
  const found = await call(`/api/turn?seen=${shown.seen}`);
  if (found.image) screen.src = found.image;
  shown = found;
  task.textContent = document.title = found.task;
  turn.textContent = `Turn ${found.turn}`;
  said.textContent = found.said.join("\n");
}

async function say(...lines) {
  await call("/api/lines", { method: "POST", body: JSON.stringify({ lines }) });
}

function pixel(event) {
  const box = screen.getBoundingClientRect();
  const along = (from, length, side) => Math.max(0, Math.min(side - 1, Math.floor((from * side) / length)));
  return [
    along(event.clientX - box.left, box.width, screen.naturalWidth),
    along(event.clientY - box.top, box.height, screen.naturalHeight),
  ];
}

let pressed = null;
let done = -1;
screen.addEventListener("pointerdown", (event) => {
  event.preventDefault();
  // a second click would act on a screen that nobody has seen
  if (done === shown.turn && !shown.said.at(-1).startsWith("not done")) return;
  screen.setPointerCapture(event.pointerId);
  pressed = pixel(event);
});
screen.addEventListener("pointerup", (event) => {
  if (pressed === null) return;
  const [from, to] = [pressed, pixel(event)];
  pressed = null;
  done = shown.turn;
  if (Math.hypot(to[0] - from[0], to[1] - from[1]) < DRAG_PX) say(`click ${from.join(" ")}`);
  else if (shown.is_phone) say(`swipe ${[...from, ...to].join(" ")}`);
  else say(`mouse_move ${from.join(" ")}`, `left_click_drag ${to.join(" ")}`);
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  say(line.value);
  line.value = "";
});

for (;;) {
  try {
    await look();
  } catch (error) {
    turn.textContent = `No answer: the rollout has ended, or the address is another one (${error.message})`;
  }
  await new Promise((resolve) => setTimeout(resolve, 300));
}
