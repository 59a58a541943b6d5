"""Exports rollouts as one self-contained HTML file: embedded images with actions drawn on them, no scripts."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import exp

from pybase64 import b64encode

from cua_rl.database.screenshots import load_images
from cua_rl.monitor import rollout_schemas as schemas
from cua_rl.monitor.databases import RunAccess
from cua_rl.monitor.rollout_queries import load_rollout
from cua_rl.monitor.token_texts import load_rollout_tokens
from cua_rl.types.conversation import EncodedImage

Images = Mapping[str, tuple[bytes, str]]
"""Bytes and format by hash."""

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--dim:#66707c;--line:#d9dee4;--card:#fff;--page:#f4f6f8;--mark:#d6336c;
--good:#2b8a3e;--bad:#c92a2a}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--dim:#98a2ad;--line:#343a42;--card:#1c2026;--page:#14171b;
--mark:#ff6b9d;--good:#69db7c;--bad:#ff8787}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);font:14px/1.5 system-ui,sans-serif}
main{max-width:1100px;margin:0 auto;padding:24px 16px 64px}h1{font-size:20px;margin:0 0 4px}h2{font-size:15px;margin:0}
.dim{color:var(--dim)}.good{color:var(--good)}.bad{color:var(--bad)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:12px 0}dt{color:var(--dim)}dd{margin:0;
overflow-wrap:anywhere}
article{margin-top:48px}section{background:var(--card);border:1px solid var(--line);border-radius:8px;margin-top:16px;
padding:16px}.row{display:flex;gap:16px;flex-wrap:wrap;align-items:flex-start}.row>.text{flex:1 1 320px;min-width:0}
figure{margin:8px 0 0}figcaption{color:var(--dim);font-size:12px}.shot{position:relative;display:inline-block}
.shot img{display:block;height:360px;max-width:100%;border:1px solid var(--line);border-radius:4px}
.shot svg{position:absolute;inset:0;width:100%;height:100%}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--page);border-radius:4px;padding:8px;margin:8px 0}
.tokens{font:12px/1.9 ui-monospace,monospace;overflow-wrap:anywhere}.tokens span{border-radius:3px;padding:1px 0;
white-space:pre-wrap}summary{cursor:pointer;color:var(--dim)}
"""


def shown_bytes(image: EncodedImage) -> tuple[bytes, str]:
    """The bytes and the format of an image; of a pruned one, those of a drawing of its size that says so."""
    if image.data:
        return image.data, image.format
    width, height = image.width_px or 400, image.height_px or 300
    drawing = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        '<rect width="100%" height="100%" fill="#8884"/><text x="50%" y="50%" text-anchor="middle" fill="#888" '
        f'font-family="sans-serif" font-size="{min(width, height) / 8:.0f}">pruned</text></svg>'
    )
    return drawing.encode(), "svg+xml"


async def export_rollouts(run: RunAccess, rollout_ids: Sequence[str]) -> tuple[str, int]:
    """The page of these rollouts of a run, and how many screenshots it has; raises `NotFoundError`."""
    rollouts = [await load_rollout(run, rollout_id) for rollout_id in rollout_ids]
    tokens = {
        (rollout.rollout_id, turn.turn_index): turn
        for rollout in rollouts
        for turn in await load_rollout_tokens(run, rollout.rollout_id)
    }
    found = await load_images(run.session, image_hashes(rollouts))
    images = {digest: shown_bytes(image) for digest, image in found.items()}
    return await asyncio.to_thread(render_rollouts, rollouts, tokens, images), len(images)


def render_rollouts(
    rollouts: Sequence[schemas.Rollout], tokens: Mapping[tuple[str, int], schemas.TurnTokens], images: Images
) -> str:
    """The page; `tokens` are by rollout id and turn index."""
    title = (
        f"{rollouts[0].alias or rollouts[0].run_name}, {rollouts[0].phase} {rollouts[0].step}"
        if rollouts
        else "no rollouts"
    )
    body = "".join(_rollout(rollout, tokens, images) for rollout in rollouts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        '<meta name="viewport" content="width=device-width"><meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
        f"<style>{_STYLE}</style></head><body><main><h1>{_text(title)}</h1>"
        f'<p class="dim">{len(rollouts)} {"rollout" if len(rollouts) == 1 else "rollouts"}</p>'
        f"{body}</main></body></html>\n"
    )


def _text(value: object) -> str:
    return escape(str(value).encode("utf-8", "replace").decode())


def _rollout(rollout: schemas.Rollout, tokens: Mapping[tuple[str, int], schemas.TurnTokens], images: Images) -> str:
    outcome = {True: '<b class="good">success</b>', False: '<b class="bad">failed</b>', None: "no verdict"}
    parts = ", ".join(f"{_text(name)} {_number(value)}" for name, value in (rollout.reward_parts or {}).items())
    facts: dict[str, str] = {
        "outcome": f"{outcome[rollout.success]}, {_text(rollout.stop_reason or rollout.status)}",
        "reward": f"{_number(rollout.reward)} ({parts})" if parts else _number(rollout.reward),
        "advantage": _number(rollout.advantage),
        "device": _text(rollout.device_id or "none"),
        "turns": f"{rollout.num_turns} of at most {rollout.max_turns}",
        "duration": f"{_number(rollout.duration_s)} s",
    }
    if rollout.answer is not None:
        facts["answer"] = _text(rollout.answer)
    if rollout.validation is not None:
        check = rollout.validation
        facts["validation"] = (
            f"{_text(check.query)}: expected <code>{_text(check.expected)}</code>, got "
            f"<code>{_text(check.actual)}</code>"
        )
    if rollout.judgement is not None:
        said = rollout.judgement
        facts["judge"] = (
            f"{_text(said.model)}: {outcome[said.success]}, {_text(said.reason)} ({len(said.votes)} votes, "
            f"{_number(said.agreement)} of them agree)"
        )
    if rollout.error is not None:
        facts["error"] = f'<span class="bad">{_text(rollout.error)}</span>'
    for verdict in rollout.overrides:
        facts[f"verdict {verdict.override_id}"] = (
            f"success {verdict.success}, reward {_number(verdict.reward)}: {_text(verdict.reason)} "
            f"({_text(verdict.actor)})"
        )
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{value}</dd>" for name, value in facts.items())
    turns = "".join(_turn(turn, tokens.get((rollout.rollout_id, turn.turn_index)), images) for turn in rollout.turns)
    return (
        f"<article><h1>{_text(rollout.instruction or rollout.task_id)}</h1>"
        f'<p class="dim">{_text(rollout.task_id)}, seed {rollout.seed}, rollout {_text(rollout.rollout_id)}</p>'
        f"<dl>{rows}</dl>{turns}</article>"
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _turn(turn: schemas.TurnDetail, tokens: schemas.TurnTokens | None, images: Images) -> str:
    shots = _figure(turn.before, "before", images, turn.action) + _figure(turn.after, "after", images, None)
    thinking = "" if turn.thinking is None else f'<p class="dim">{_text(turn.thinking)}</p>'
    said = f"<p>{_text(turn.answer)}</p>" if turn.answer else ""
    calls = "".join(f"<pre>{_text(call.name)} {_text(call.arguments)}</pre>" for call in turn.tool_calls)
    action = ""
    if turn.action is not None:
        values = ", ".join(f"{name}={value!r}" for name, value in turn.action.items() if name != "type")
        action = f"<p>did <code>{_text(turn.action.get('type'))}({_text(values)})</code></p>"
    problems = "".join(
        f'<p class="bad">{_text(text)}</p>' for text in (turn.failure_message, turn.action_error) if text
    )
    times = ", ".join(f"{_text(name)} {_number(value)} s" for name, value in turn.durations_s.items())
    return (
        f'<section><h2>Turn {turn.turn_index + 1}</h2><p class="dim">policy {turn.policy_version}, '
        f"{turn.num_prompt_tokens} prompt tokens, {turn.num_sampled_tokens} sampled; {times}</p>"
        f'<div class="row">{shots}<div class="text">{thinking}{said}{calls}{action}{problems}'
        f"{_tokens(tokens)}</div></div></section>"
    )


def _figure(
    shot: schemas.ScreenshotRef | None, caption: str, images: Images, action: Mapping[str, object] | None
) -> str:
    if shot is None or shot.sha256 not in images:
        return ""
    data, image_format = images[shot.sha256]
    uri = f"data:image/{image_format};base64,{b64encode(data).decode()}"
    drawing = "" if action is None else _drawing(action, shot.width_px or 0, shot.height_px or 0)
    return (
        f'<figure><div class="shot"><img src="{uri}" alt="screen {caption} the action">{drawing}</div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _drawing(action: Mapping[str, object], width: int, height: int) -> str:
    """A circle for a touch, an arrow for a drag or scroll."""
    x, y = action.get("x"), action.get("y")
    if not (isinstance(x, int | float) and isinstance(y, int | float) and width and height):
        return ""
    unit = max(width, height) / 100
    to_x, to_y = action.get("to_x"), action.get("to_y")
    if action.get("type") == "Scroll":
        to_x, to_y = x + _as_number(action.get("right_px")), y + _as_number(action.get("down_px"))
    line = ""
    if isinstance(to_x, int | float) and isinstance(to_y, int | float):
        line = (
            f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="#d6336c" stroke-width="{unit:.2f}" '
            'marker-end="url(#tip)"/>'
        )
    rings = 2 if action.get("type") == "DoubleClick" else 1
    circles = "".join(
        f'<circle cx="{x}" cy="{y}" r="{unit * (3 + 2 * ring):.2f}" fill="none" stroke="#d6336c" '
        f'stroke-width="{unit * 0.8:.2f}"/>'
        for ring in range(rings)
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" aria-hidden="true"><defs><marker id="tip" viewBox="0 0 6 6" refX="4" '
        'refY="3" markerWidth="5" markerHeight="5" orient="auto">'
        '<path d="M0 0L6 3L0 6z" fill="#d6336c"/></marker></defs>'
        f'{line}{circles}<circle cx="{x}" cy="{y}" r="{unit * 0.7:.2f}" fill="#d6336c"/></svg>'
    )


def _as_number(value: object) -> float:
    return value if isinstance(value, int | float) else 0.0


def _tokens(tokens: schemas.TurnTokens | None) -> str:
    """Sampled tokens on a background that is redder for less probable tokens."""
    if tokens is None or not tokens.tokens:
        return ""
    texts = tokens.texts or [str(token) for token in tokens.tokens]
    training = tokens.training_logprobs or [None] * len(texts)
    spans = ""
    for token, text, sampling, trained in zip(tokens.tokens, texts, tokens.sampling_logprobs, training, strict=False):
        doubt = 0.0 if sampling is None else 1.0 - exp(min(0.0, sampling))
        hint = f"id {token}, sampler {_number(sampling)}, trainer {_number(trained)}"
        shown = _text(text.replace("\n", "⏎\n")) or "∅"
        spans += f'<span style="background:rgba(214,51,108,{doubt * 0.6:.3f})" title="{escape(hint)}">{shown}</span>'
    advantage = "" if tokens.advantage is None else f", advantage {_number(tokens.advantage)}"
    return f'<details open><summary>{len(texts)} tokens{advantage}</summary><p class="tokens">{spans}</p></details>'


def image_hashes(rollouts: Iterable[schemas.Rollout]) -> set[str]:
    shots = (shot for rollout in rollouts for turn in rollout.turns for shot in (turn.before, turn.after))
    return {shot.sha256 for shot in shots if shot is not None}
