"""Screenshots' features kept from request to request: a frozen vision tower sees each distinct screenshot once."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from cua_rl.types import ImageChunk

Encode = Callable[[Mapping[str, ImageChunk]], Mapping[str, Tensor]]
"""Images by sha256 -> features by sha256, as from `encode_images`."""


class FeatureCache:
    """The most recently used features, at most `max_bytes` of them, in the computer's main memory.

    Features depend on nothing but the image and the frozen tower, so they never grow stale; an adapter on the language
    model does not touch them. All levels of a screenshot (merger and deepstack) are one entry.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, Tensor] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def features(self, images: Iterable[ImageChunk], encode: Encode) -> dict[str, Tensor]:
        """Features of every distinct image; `encode` is asked for those that are not held, even if these are none."""
        wanted = {chunk.image.sha256: chunk for chunk in images}
        found = {name: self._use(name) for name in wanted if name in self._entries}
        missing = {name: image for name, image in wanted.items() if name not in found}
        encoded = encode(missing)
        for name, features in encoded.items():
            self._keep(name, features)
        return {**found, **encoded}

    def _use(self, name: str) -> Tensor:
        self._entries.move_to_end(name)
        return self._entries[name]

    def _keep(self, name: str, features: Tensor) -> None:
        if features.nbytes > self._max_bytes:
            return
        kept = features.detach().cpu().clone()  # a copy: slices of a larger tensor would keep all of it alive
        self._entries[name] = kept
        self.num_bytes += kept.nbytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._entries.popitem(last=False)[1].nbytes
