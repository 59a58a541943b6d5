import { useEffect, useRef, type ReactNode } from "react";

/** What opens below a button, and closes with Escape or a click elsewhere. */
export function Popup({ label, children }: { label: ReactNode; children: ReactNode }) {
  const box = useRef<HTMLDetailsElement>(null);
  useEffect(() => {
    const listen = (event: Event) => {
      const isElsewhere = event instanceof KeyboardEvent ? event.key === "Escape" : !box.current?.contains(event.target as Node);
      if (!isElsewhere || !box.current?.open) return;
      const hadFocus = box.current.contains(document.activeElement);
      box.current.open = false;
      if (hadFocus && event instanceof KeyboardEvent) box.current.querySelector("summary")?.focus();
    };
    document.addEventListener("pointerdown", listen);
    document.addEventListener("keydown", listen);
    return () => {
      document.removeEventListener("pointerdown", listen);
      document.removeEventListener("keydown", listen);
    };
  }, []);
  return (
    <details className="popup" ref={box}>
      <summary className="button small">{label}</summary>
      <div className="panel">{children}</div>
    </details>
  );
}

/** Which of many are shown, as boxes to tick. */
export function PickList(props: { label: string; all: readonly string[]; chosen: readonly string[]; onChange: (chosen: string[]) => void }) {
  const { all, chosen } = props;
  const toggle = (name: string) => props.onChange(all.filter((one) => chosen.includes(one) !== (one === name)));
  return (
    <Popup label={<>{props.label} <span className="faint num">{chosen.length} of {all.length}</span></>}>
      <div className="row">
        <button type="button" className="button small" onClick={() => props.onChange([...all])}>All</button>
        <button type="button" className="button small" onClick={() => props.onChange([])}>None</button>
      </div>
      {all.map((name) => <label key={name}><input type="checkbox" checked={chosen.includes(name)} onChange={() => toggle(name)} /> {name}</label>)}
    </Popup>
  );
}
