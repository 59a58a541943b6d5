import { useState } from "react";
import { Icon } from "./icons";
import { useShortcuts } from "./keys";
import { Dialog } from "./parts";

/** Copies the address of what is shown; where the browser lets no page write to the clipboard, shows it to copy. */
export function CopyLink({ of }: { of: string }) {
  const [done, setDone] = useState(false);
  const [shown, setShown] = useState<string | null>(null);
  const copy = async () => {
    const address = window.location.href;
    try {
      await navigator.clipboard.writeText(address);
      setDone(true);
      window.setTimeout(() => setDone(false), 2000);
    } catch {
      setShown(address); // without TLS there is no clipboard, and people may refuse it
    }
  };
  useShortcuts({ c: () => void copy() });
  return (
    <>
      <button type="button" className="button" title={`Copy the address of ${of}  c`} onClick={() => void copy()}>
        <Icon name="link" /> Copy link
      </button>
      <span className="sr-only" role="status">{done ? "Link copied" : ""}</span>
      {done && <span className="badge good" aria-hidden="true">copied</span>}
      {shown !== null && (
        <Dialog label="Copy link" onClose={() => setShown(null)}>
          <div className="panel-body stack">
            <h2>Copy link</h2>
            <p className="dim">The browser does not let this page copy. Press Ctrl C to copy the address:</p>
            <input className="field" aria-label="Address" readOnly value={shown} onFocus={(event) => event.currentTarget.select()} />
            <div className="row"><button type="button" className="button" onClick={() => setShown(null)}>Close</button></div>
          </div>
        </Dialog>
      )}
    </>
  );
}
