# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""First stage of the tiny model: its vision tower learns to name and locate elements.

`python -m scripts.tiny_models.grounding FOLDER SEED NUM_STEPS [ladder|SCREENS]` changes a model folder in place. It
trains on random screens of phones, on those that demo tasks lead to (`ladder`), or on web pages in the file SCREENS.

Every image token on an element that can be tapped has three targets: the merger's output should point at the embedding
of the element's name, the two deepstack outputs at the embeddings of its centre's coordinates, x and y. On screens of
the `ladder`, other image tokens have the names of up to three digits that lie on them as targets. The language model,
which reads these features, then only has to learn where to look and what to copy. Without this stage it spends most of
its training finding out that the image matters at all.
"""

import io
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, normalize
from transformers.models.qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_vl import Qwen3VLForConditionalGeneration

from cua_rl.agent.tools import MAX_COORDINATE
from cua_rl.environments.phone.demo.expert import scannable_elements
from cua_rl.environments.phone.simulator import painter
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.environments.phone.simulator.start import Start, make_phone_state
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.supervised.demonstrations import COORDINATE_STEP
from cua_rl.training.layers import use_linear_patch_embedding
from cua_rl.training.vision import read_patches
from scripts.tiny_models.ladder_lessons import CELL_PX, draw_phone_at_work, draw_questions, find_digits, name_digits
from scripts.tiny_models.page_screens import POINT_STEP, LabelledBox, PageScreen, read_screens
from scripts.tiny_models.vocabulary import names

_SHARPNESS = 16.0
"""Factor from cosine similarities to logits."""
_UNKNOWN = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class _Screenshot:
    image: Image.Image
    targets: Tensor
    """[3, num_image_tokens]: ids of name, x and y, or of up to three digits; _UNKNOWN where there is neither."""
    is_digit: Tensor
    """[num_image_tokens]: whether the targets are digits."""


_Draw = Callable[[Random, Tokenizer], _Screenshot]


def train_grounding(
    folder: Path, draw: _Draw, *, seed: int, num_steps: int, batch_size: int, learning_rate: float
) -> None:
    """Train the vision tower of the model in `folder` in place, on screenshots from `draw`."""
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    processor = Qwen2VLImageProcessor.from_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tower, embeddings = model.model.visual, model.model.language_model.embed_tokens.weight.detach()
    use_linear_patch_embedding(tower)
    optimizer = torch.optim.AdamW(tower.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, num_steps, pct_start=0.1)
    random = Random(seed)

    def draw_batch() -> list[_Screenshot]:
        return [draw(random, tokenizer) for _ in range(batch_size)]

    drawer = ThreadPoolExecutor(1)  # draws while torch computes
    drawing = drawer.submit(draw_batch)
    for step in range(num_steps):
        screenshots, drawing = drawing.result(), drawer.submit(draw_batch)
        patches, grids = read_patches(processor, [screenshot.image for screenshot in screenshots])
        output = tower(patches, grid_thw=grids, return_dict=True)
        features = torch.stack([output.pooler_output, *output.deepstack_features])
        targets = torch.cat([screenshot.targets for screenshot in screenshots], dim=1)
        logits = _SHARPNESS * linear(normalize(features, dim=-1), normalize(embeddings, dim=-1))
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_UNKNOWN)
        is_digit = torch.cat([screenshot.is_digit for screenshot in screenshots])
        if is_digit.any():  # few, and hard to read
            loss = loss + cross_entropy(
                logits[:, is_digit].flatten(0, 1), targets[:, is_digit].flatten(), ignore_index=_UNKNOWN
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 24:
            known = targets != _UNKNOWN
            right = (logits.argmax(dim=-1) == targets) & known
            name, x, y = (right.sum(dim=1) / known.sum(dim=1)).tolist()
            read = (right & is_digit).sum() / max(1, (known & is_digit).sum())
            print(
                f"step={step + 1} loss={loss.item():.3f} name={name:.2f} x={x:.2f} y={y:.2f} digits={read:.2f}",
                flush=True,
            )
    drawer.shutdown(cancel_futures=True)
    model.save_pretrained(folder)


def draw_phone(random: Random, tokenizer: Tokenizer) -> _Screenshot:
    """A random home or Settings screen."""
    start = random.choice([Start(), Start(home_page=1), Start(app="settings"), Start(app="settings")])
    state = make_phone_state(random.randrange(2**31), start)
    return _draw_state(state, tokenizer, names())


def draw_ladder_screen(random: Random, tokenizer: Tokenizer) -> _Screenshot:
    """A phone on its way through a task, or one that shows what a task asks for."""
    phone = draw_phone_at_work(random) if random.random() < 0.5 else draw_questions(random)[0]
    screenshot = _draw_state(phone.state, tokenizer)
    width = screenshot.image.width // CELL_PX
    for (x, y), digits in find_digits(phone.state).items():
        if screenshot.targets[0, y * width + x] == _UNKNOWN:
            screenshot.is_digit[y * width + x] = True
            for row, number in enumerate(name_digits(digits)):
                screenshot.targets[row, y * width + x] = tokenizer.encode(number, add_special_tokens=False).ids[0]
    return screenshot


def _draw_state(state: PhoneState, tokenizer: Tokenizer, known: Collection[str] | None = None) -> _Screenshot:
    """The screen with what can be tapped there, of these labels if some are given."""
    screen = build_screen(state)
    elements = [element for element in scannable_elements(screen) if known is None or element.label in known]
    if state.screen == "calculator":
        elements += [element for element in screen.content if element.kind == "key"]
    boxes = [LabelledBox(label=one.label, **asdict(one.rect)) for one in elements]
    return _with_targets(painter.draw_phone(state, 1).convert("RGB"), boxes, tokenizer, COORDINATE_STEP)


def make_page_draw(screens: Sequence[PageScreen], *, factor_px: int = CELL_PX) -> _Draw:
    """Random choices of screens of web pages, at the size at which the model sees them."""

    def draw(random: Random, tokenizer: Tokenizer) -> _Screenshot:
        screen = random.choice(screens)
        image = Image.open(io.BytesIO(screen.observation.data)).convert("RGB")
        width, height = (round(side / factor_px) * factor_px for side in image.size)
        across, down = width / image.width, height / image.height
        boxes = [
            LabelledBox(
                label=box.label, x=box.x * across, y=box.y * down, width=box.width * across, height=box.height * down
            )
            for box in screen.boxes
        ]
        return _with_targets(image.resize((width, height), Image.Resampling.BICUBIC), boxes, tokenizer, POINT_STEP)

    return draw


def _with_targets(image: Image.Image, boxes: Sequence[LabelledBox], tokenizer: Tokenizer, step: int) -> _Screenshot:
    """With the ids of name, x and y of the box that covers most of each cell, if that is at least a quarter of the
    cell, or most of the box.
    """
    width, height = image.size
    targets: list[tuple[int, ...]] = []
    for cell in ((x, y) for y in range(0, height, CELL_PX) for x in range(0, width, CELL_PX)):
        best = max(boxes, key=lambda box: _overlap(cell, box))
        if _overlap(cell, best) < min(CELL_PX**2 / 4, best.width * best.height / 2):
            targets.append((_UNKNOWN, _UNKNOWN, _UNKNOWN))
            continue
        x, y = best.x + best.width / 2, best.y + best.height / 2
        texts = (_first_piece(best.label, tokenizer), _coordinate(x, width, step), _coordinate(y, height, step))
        targets.append(tuple(tokenizer.encode(text, add_special_tokens=False).ids[0] for text in texts))
    return _Screenshot(
        image=image, targets=torch.tensor(targets).T, is_digit=torch.zeros(len(targets), dtype=torch.bool)
    )


def _first_piece(label: str, tokenizer: Tokenizer) -> str:
    """Of a label that is no single token, its beginning without the space, which tells nothing."""
    return f" {label}" if tokenizer.token_to_id(f" {label}") is not None else label


def _coordinate(position: float, length: int, step: int) -> str:
    return str(round(position * MAX_COORDINATE / length / step) * step)


def _overlap(cell: tuple[int, int], box: LabelledBox) -> float:
    x, y = cell
    width = min(x + CELL_PX, box.x + box.width) - max(x, box.x)
    height = min(y + CELL_PX, box.y + box.height) - max(y, box.y)
    return max(0.0, width) * max(0.0, height)


if __name__ == "__main__":
    match sys.argv[4:]:
        case ["ladder"]:
            _draw = draw_ladder_screen
        case [_screens]:
            _draw = make_page_draw(read_screens(Path(_screens)))
        case _:
            _draw = draw_phone
    train_grounding(
        Path(sys.argv[1]), _draw, seed=int(sys.argv[2]), num_steps=int(sys.argv[3]), batch_size=16, learning_rate=2e-3
    )
