"""A small run as events, with images that are images."""

from dataclasses import replace
from io import BytesIO

from PIL import Image

from cua_rl.events import Event
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.rollout import Chunk, ImageChunk, ModelInput, Rollout, RolloutGroup, Turn
from tests.real.database.recorded import make_group, source_events, step_end


def make_step_events(step: int) -> list[Event]:
    """A step of one group, trained."""
    group = with_images(make_group(seed=step, group_id=f"group-{step}"))
    return [*source_events(group, step), step_end(group, step)]


def with_images(group: RolloutGroup) -> RolloutGroup:
    """The group with screenshots that are images."""
    return replace(
        group,
        rollouts=tuple(map(_with_images, group.rollouts)),
        faulty=tuple(map(_with_images, group.faulty)),
    )


def _with_images(rollout: Rollout) -> Rollout:
    return replace(rollout, turns=tuple(map(_turn, rollout.turns)))


def _turn(turn: Turn) -> Turn:
    chunks: list[Chunk] = [
        replace(chunk, image=_screen(chunk.image)) if isinstance(chunk, ImageChunk) else chunk
        for chunk in turn.model.prompt.chunks
    ]
    model = replace(turn.model, prompt=ModelInput(chunks=tuple(chunks)))
    before, after = (None if one is None else _screen(one) for one in (turn.agent.before, turn.agent.after))
    return replace(turn, model=model, agent=replace(turn.agent, before=before, after=after))


def _screen(screen: EncodedImage) -> EncodedImage:
    return EncodedImage(data=_draw(screen.sha256, screen.format), format=screen.format, width_px=32, height_px=48)


def _draw(sha256: str, image_format: str) -> bytes:
    """An image that is different for every hash."""
    image = Image.frombytes("RGB", (32, 48), (bytes.fromhex(sha256) * 144)[: 32 * 48 * 3])
    buffer = BytesIO()
    image.save(buffer, image_format.upper())
    return buffer.getvalue()
