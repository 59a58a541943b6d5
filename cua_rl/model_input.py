"""Model inputs: text tokens and images in the order in which the model reads them."""

from dataclasses import dataclass

from cua_rl.conversation import EncodedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTextChunk:
    """A run of text tokens."""

    tokens: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageChunk:
    """An image that takes `expected_tokens` image tokens (its vision start and end marks are text tokens)."""

    image: EncodedImage
    expected_tokens: int

    @property
    def length(self) -> int:
        return self.expected_tokens


Chunk = EncodedTextChunk | ImageChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """Text and images in the order in which the model reads them."""

    chunks: tuple[Chunk, ...]

    @property
    def length(self) -> int:
        """Number of tokens, image tokens included."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def image_chunks(self) -> tuple[ImageChunk, ...]:
        return tuple(chunk for chunk in self.chunks if isinstance(chunk, ImageChunk))

    @property
    def images(self) -> tuple[EncodedImage, ...]:
        return tuple(chunk.image for chunk in self.image_chunks)

    def token_ids(self, image_token_id: int) -> list[int]:
        """The flat ids, every image token as `image_token_id`."""
        ids: list[int] = []
        for chunk in self.chunks:
            ids += [image_token_id] * chunk.length if isinstance(chunk, ImageChunk) else chunk.tokens
        return ids
