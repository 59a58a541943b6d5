import { Dialog } from "./parts";

const KEYS: [string, [string, string][]][] = [
  ["Everywhere", [["Ctrl K", "go to a run, step, task or rollout"], ["j k", "next and previous row"], ["Enter", "open it"], ["/", "search"], ["u", "up one level"], ["Backspace", "back"], ["t", "dark or light"], ["?", "this list"]]],
  ["Run", [["1 … 9", "its views"], ["a", "add a tag or a note"], ["r", "its rollouts"], ["f", "its failures"]]],
  ["Rollouts", [["1 … 5", "table, screens, figures, tokens, cost"], ["v", "go through them, one after the other"], ["s", "two chosen ones side by side"], ["c", "copy the link to the set"]]],
  ["Step, evaluation", [["[ ]", "previous and next"]]],
  ["Rollout", [["← →", "previous and next turn"], ["Home End", "first and last turn"], ["Space", "play as a film"], ["[ ]", "previous and next rollout of the group"], ["f", "follow the newest turn"], ["n p", "next and previous of the set"], ["o", "give a verdict"], ["a", "add a tag or a note"], ["e g w", "save as HTML, GIF, WebP"], ["c", "copy the link to the turn"]]],
  ["Group", [["← →", "to the moment before and after"], ["Space", "play all rollouts"], ["s", "two chosen ones side by side"]]],
  ["SQL", [["Ctrl Enter", "run the query"]]],
  ["Charts", [["drag", "zoom"], ["double-click", "reset"], ["← →", "along the points"], ["Enter, click", "open the step"]]],
];

export function Help({ onClose }: { onClose: () => void }) {
  return (
    <Dialog label="Keyboard" onClose={onClose}>
      <div className="panel-head"><h2>Keyboard</h2><button type="button" className="button small" onClick={onClose}>Close</button></div>
      <div className="panel-body help">
        {KEYS.map(([place, keys]) => (
          <section key={place}>
            <h3>{place}</h3>
            <dl>
              {keys.map(([key, meaning]) => (
                <div key={key} className="row"><dt><kbd>{key}</kbd></dt><dd>{meaning}</dd></div>
              ))}
            </dl>
          </section>
        ))}
      </div>
    </Dialog>
  );
}
