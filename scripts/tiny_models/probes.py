"""What a ladder model sees and types, apart from what it plans: `python -m scripts.tiny_models.probes FOLDER`.

Prints a JSON line for each kind of lesson, with the right ones, all and their share for each part of an answer. The
model is given the right answer up to each token, and a part is right if each of its tokens is more likely than not: the
name of the next target (in tasks: planning), the labels of a scan (reading), where the scan ends (finding), a tap or a
swipe (scrolling), the place of a tap (locating), a typed text, a told answer and the digits or counts named before it.
`whole` is the answer with all its parts. Lessons are drawn with seeds of their own.
"""

import argparse
import asyncio
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random

from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.renderers.renderer import Renderer, make_renderer
from cua_rl.supervised.demonstrations import Demonstration, build_supervised_datum
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import TrainerConfig
from cua_rl.types.rollout import Datum
from scripts.tiny_models.ladder_lessons import (
    NUM_SEEDS,
    demonstrate_on,
    draw_copies,
    draw_reading,
    draw_search,
    without_sight,
)

ANSWER = re.compile(
    r"(?:<think>\n(?:Answer:(?P<digits>[^\n]*)|(?P<target>[^\n]*?:)(?P<labels>[^\n]*))(?P<end>\n</think>)\s*)?"
    r'<tool_call>.*?"action": (?P<action>"\w+")'
    r'(?:, "coordinate": \[(?P<place>[^\]]*)\]|, "text": "(?P<text>[^"]*)")?.*?</tool_call>',
    re.DOTALL,
)
"""A turn; its groups are the parts that are judged."""


async def draw_task(random: Random) -> Demonstration:
    """A demo task, held out or not, on a phone that training never draws."""
    return await demonstrate_on(NUM_SEEDS + random.randrange(NUM_SEEDS), random.choice(list(TEMPLATES.values())))


PROBES: dict[str, Callable[[Random], Awaitable[Demonstration]]] = {
    "search": draw_search,
    "copies": draw_copies,  # without screenshots: what they would show is left out
    "reading": draw_reading,
    "tasks": draw_task,
}


def judge_parts(datum: Datum, likely: Sequence[bool], renderer: Renderer) -> Counter[tuple[str, bool]]:
    """How many parts of each kind are right and wrong; `likely` says it for each token of the sequence."""
    tokens = datum.model_input.token_ids(-1)
    texts = [renderer.decode([token]) if token >= 0 else "" for token in tokens]
    ends = list(accumulate(map(len, texts)))
    trained = [
        (range(end - len(text), end), is_likely)
        for text, end, is_trained, is_likely in zip(texts, ends, datum.loss_mask, likely, strict=True)
        if is_trained
    ]
    found = Counter[tuple[str, bool]]()
    for match in ANSWER.finditer("".join(texts), trained[0][0].start):
        for part in ("whole", *(part for part, text in match.groupdict().items() if text)):
            start, end = match.span(0 if part == "whole" else part)
            judged = [is_likely for place, is_likely in trained if place.start < end and start < place.stop]
            name = "answer" if part == "text" and match["action"] == '"answer"' else part
            found[name, all(judged)] += bool(judged)
    return found


async def probe(model: Path, num_lessons: int, seed: int) -> None:
    """Draw and score the lessons of each probe, and print the shares."""
    renderer = make_renderer(model)
    config = TrainerConfig(model_path=model, lora_rank=0, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        async with TrainingClient(config, Path(folder) / "trainer.log") as client:
            for name, draw in PROBES.items():
                random = Random(f"probe-{name}-{seed}")
                teach = partial(build_supervised_datum, renderer, name=name)
                datums = [teach(await draw(random)) for _ in range(num_lessons)]
                if draw is draw_copies:
                    datums = [without_sight(datum, renderer) for datum in datums]
                found = Counter[tuple[str, bool]]()
                for datum, row in zip(datums, await client.forward(datums), strict=True):
                    found += judge_parts(datum, [logprob > math.log(0.5) for logprob in row], renderer)
                line: dict[str, object] = {"figure": "probe", "probe": name}
                for part in sorted({part for part, _ in found}):
                    num_right, num = found[part, True], found[part, True] + found[part, False]
                    line[part] = [num_right, num, round(num_right / num, 3)]
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--lessons", type=int, default=60, help="of each probe")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    asyncio.run(probe(given.model, given.lessons, given.seed))
