import { useState, type FormEvent, type ReactNode } from "react";
import { ApiError, invalidate, request, useQuery } from "../api/cache";
import { notePath, notesPath } from "../api/paths";
import type { Note } from "../api/types";
import { formatTime } from "../format";
import { Icon } from "./icons";
import { useShortcuts } from "./keys";
import { Dialog, TokenForm } from "./parts";

type Of = { runId: string; rolloutId?: string; turn?: number };

/** Sets, lists and notes that a change may have moved. */
const touched = (path: string) => /\/notes|^\/api\/rollouts|^\/api\/runs(\?|$)|\/place\?/.test(path);

/** Tags and notes of people on a run, or on a rollout and its turns, with what adds and removes them. */
export function Notes({ of, children }: { of: Of; children?: (parts: { body: ReactNode; add: ReactNode; count: number }) => ReactNode }) {
  const notes = useQuery<Note[]>(notesPath(of.runId, of.rolloutId)).data ?? [];
  const [adding, setAdding] = useState(false);
  const [removing, setRemoving] = useState<Note | null>(null);
  useShortcuts({ a: () => setAdding(true) });
  const tags = notes.filter((one) => one.tag !== null);
  const texts = notes.filter((one) => one.text !== null);
  const add = <button type="button" className="button small" title="Add a tag or a note  a" onClick={() => setAdding(true)}><Icon name="edit" /> Note</button>;
  const remove = (one: Note) => (
    <button type="button" className="button quiet icon small" aria-label={`Remove ${one.tag === null ? "the note" : `the tag ${one.tag}`}`} onClick={() => setRemoving(one)}><Icon name="close" size={12} /></button>
  );
  const body = notes.length > 0 && (
    <div className="stack" data-testid="notes">
      {tags.length > 0 && (
        <ul className="row wrap" aria-label="Tags">
          {tags.map((one) => <li key={one.note_id} className="run-chip" title={`${one.actor}, ${formatTime(one.created_at)}`}>{one.tag}{at(one)} {remove(one)}</li>)}
        </ul>
      )}
      {texts.map((one) => (
        <div key={one.note_id}>
          <p className="note-text">{one.text}</p>
          <div className="row"><span className="faint">{one.actor}, {formatTime(one.created_at)}{at(one)}</span>{remove(one)}</div>
        </div>
      ))}
    </div>
  );
  return (
    <>
      {children ? children({ body, add, count: notes.length }) : <>{body}{add}</>}
      {adding && <NoteDialog of={of} onClose={() => setAdding(false)} />}
      {removing && <RemoveDialog of={of} note={removing} onClose={() => setRemoving(null)} />}
    </>
  );
}

const at = (note: Note) => (note.turn_index === null ? "" : ` · turn ${note.turn_index + 1}`);

/** Sends what a form asks for; signs in first where that is needed. */
export function useSending(send: () => Promise<unknown>, onDone: () => void, moved = touched) {
  const [problem, setProblem] = useState<ApiError | null>(null);
  const [sending, setSending] = useState(false);
  const go = async () => {
    setSending(true);
    setProblem(null);
    try {
      await send();
      invalidate(moved);
      setSending(false);
      onDone();
    } catch (error) {
      setProblem(error instanceof ApiError ? error : new ApiError(0, String(error)));
      setSending(false);
    }
  };
  const told = problem && (
    <div className="panel-body stack">
      <div className="notice bad" role="alert">{problem.message}</div>
      {problem.status === 401 && <TokenForm submit="Sign in and save" onDone={() => void go()} />}
    </div>
  );
  return { go, sending, told, forget: () => setProblem(null) };
}

function NoteDialog({ of, onClose }: { of: Of; onClose: () => void }) {
  const [tag, setTag] = useState("");
  const [text, setText] = useState("");
  const [actor, setActor] = useState(localStorage.getItem("monitor.actor") ?? "");
  const [ofTurn, setOfTurn] = useState(false);
  const send = async () => {
    localStorage.setItem("monitor.actor", actor);
    const place = { rollout_id: of.rolloutId ?? null, turn_index: ofTurn ? (of.turn ?? null) : null, actor };
    for (const part of [tag.trim() && { tag: tag.trim() }, text.trim() && { text: text.trim() }]) {
      if (part) await request(notesPath(of.runId), { method: "POST", body: { ...place, ...part } });
    }
  };
  const { go, sending, told } = useSending(send, onClose);
  const submit = (event: FormEvent) => {
    event.preventDefault();
    void go();
  };
  return (
    <Dialog label="Add a tag or a note" onClose={onClose}>
      <form className="panel-body stack" onSubmit={submit}>
        <h2>Add a tag or a note</h2>
        <label className="stack-label">
          <span>Tag{of.rolloutId && ": rollouts with the same one are a set"}</span>
          <input className="field" maxLength={60} value={tag} onChange={(event) => setTag(event.target.value)} placeholder="wrong icon" />
        </label>
        <label className="stack-label">
          <span>Note</span>
          <textarea className="field" rows={3} maxLength={5000} value={text} onChange={(event) => setText(event.target.value)} />
        </label>
        {of.turn !== undefined && (
          <label className="row"><input type="checkbox" checked={ofTurn} onChange={(event) => setOfTurn(event.target.checked)} /> about turn {of.turn + 1} only</label>
        )}
        <label className="stack-label">
          <span>Your name</span>
          <input className="field" required maxLength={200} value={actor} onChange={(event) => setActor(event.target.value)} />
        </label>
        <div className="row">
          <button className="button primary" type="submit" disabled={sending || (tag.trim() === "" && text.trim() === "")}>Save</button>
          <button className="button quiet" type="button" onClick={onClose}>Cancel</button>
        </div>
      </form>
      {told}
    </Dialog>
  );
}

function RemoveDialog({ of, note, onClose }: { of: Of; note: Note; onClose: () => void }) {
  const { go, sending, told } = useSending(() => request(notePath(of.runId, note.note_id), { method: "DELETE" }), onClose);
  return (
    <Dialog label="Remove" onClose={onClose}>
      <div className="panel-body stack">
        <h2>Remove {note.tag === null ? "the note" : "the tag"}?</h2>
        <p className="note-text">{note.tag ?? note.text}</p>
        <p className="dim">By {note.actor}. It cannot be brought back.</p>
        <div className="row">
          <button className="button primary" type="button" disabled={sending} onClick={() => void go()}>Remove</button>
          <button className="button quiet" type="button" onClick={onClose}>Cancel</button>
        </div>
      </div>
      {told}
    </Dialog>
  );
}
