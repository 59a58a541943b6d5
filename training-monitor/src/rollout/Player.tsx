import { useEffect, useState } from "react";
import { Icon } from "../ui/icons";

const SPEEDS = [0.5, 1, 2, 4];
const TURN_S = 1.6; // what one turn takes at speed 1: its action, then what the device showed

type Props = {
  playing: boolean;
  setPlaying: (playing: boolean) => void;
  index: number;
  count: number;
  goTo: (turn: number) => void;
  step: (by: number) => void;
};

/** The rollout as a film, and the keys of a tape recorder. */
export function Player({ playing, setPlaying, index, count, goTo, step }: Props) {
  const [speed, setSpeed] = useState(1);
  useEffect(() => {
    if (!playing) return;
    const timer = window.setTimeout(() => {
      if (index + 1 < count) goTo(index + 1);
      else setPlaying(false);
    }, (TURN_S * 1000) / speed);
    return () => window.clearTimeout(timer);
  }, [playing, index, count, speed, goTo, setPlaying]);
  const start = () => {
    if (!playing && index + 1 >= count) goTo(0);
    setPlaying(!playing);
  };
  return (
    <div className="row">
      <button type="button" className="button quiet icon" aria-label="First turn" title="First turn  Home" disabled={index === 0} onClick={() => goTo(0)}>
        <Icon name="first" />
      </button>
      <button type="button" className="button quiet icon" aria-label="Previous turn" title="Previous turn  ←" disabled={index === 0} onClick={() => step(-1)}>
        <Icon name="left" />
      </button>
      <button type="button" className="button icon" aria-label={playing ? "Pause the film" : "Play as a film"} title="Play as a film  Space" onClick={start}>
        <Icon name={playing ? "pause" : "play"} />
      </button>
      <button type="button" className="button quiet icon" aria-label="Next turn" title="Next turn  →" disabled={index + 1 >= count} onClick={() => step(1)}>
        <Icon name="right" />
      </button>
      <button type="button" className="button quiet icon" aria-label="Last turn" title="Last turn  End" disabled={index + 1 >= count} onClick={() => goTo(count - 1)}>
        <Icon name="last" />
      </button>
      <select className="field speed" aria-label="Speed of the film" value={speed} onChange={(event) => setSpeed(Number(event.target.value))}>
        {SPEEDS.map((value) => (
          <option key={value} value={value}>{value}×</option>
        ))}
      </select>
    </div>
  );
}
