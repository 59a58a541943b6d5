import { useEffect, useState } from "react";

const TICK_MS = 15_000;

/** The time, which goes on while a page is open: "5 min ago" does not stand still. */
export function useNow(): number {
  const [now, setNow] = useState(() => Date.now());
  useEffect(() => {
    const timer = window.setInterval(() => setNow(Date.now()), TICK_MS);
    return () => window.clearInterval(timer);
  }, []);
  return now;
}
