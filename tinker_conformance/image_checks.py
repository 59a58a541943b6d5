"""T2, pictures: their place, their content, and that an adapter is applied to them too.

How many tokens a picture is, the server's own answers tell: a prompt has a log-probability for each position.
"""

from functools import partial

import numpy as np
import numpy.typing as npt
import tinker
from tinker import types

from tinker_conformance import data
from tinker_conformance.data import Chunk, logprobs
from tinker_conformance.expect import Numbers, expect, expect_close
from tinker_conformance.server import Server, client_of, refusal_of, wait
from tinker_conformance.text_checks import SAME, expect_gradient_of_its_loss

START, MIDDLE, END = data.tokens(1, 4), data.tokens(2, 4), data.tokens(3, 5)


def a_picture_takes_the_same_positions_in_sampler_and_trainer(server: Server) -> None:
    model = server.new_model()
    seen = _Seen(server, START, data.picture(1), END)
    expect(seen.num_image_tokens > 0, "positions of the picture", seen.num_image_tokens)
    row = logprobs(model, seen.datum())[0]
    expect(len(row) == seen.length - 1, f"{seen.length - 1} log-probabilities", len(row))
    expect(bool(np.isfinite(row[seen.of_text]).all()), "finite log-probabilities of the text", row[seen.of_text])


def the_expected_number_of_tokens_is_checked(server: Server) -> None:
    seen = _Seen(server, START, data.picture(1), END)
    sampler = _sampler(server)
    for wrong in (0, 1):
        count = seen.num_image_tokens + wrong
        told = (START, data.picture(1).model_copy(update={"expected_tokens": count}), END)
        refusal = refusal_of(partial(_prompt_logprobs, sampler, *told))
        expect(
            (refusal is not None) == bool(wrong),
            f"a refusal only if it is not {seen.num_image_tokens}",
            (count, refusal),
        )


def a_picture_changes_what_comes_after_it_alone(server: Server) -> None:
    one, other = (_Seen(server, START, data.picture(seed), END) for seed in (1, 2))
    expect_close(other.text(0), one.text(0), SAME, "log-probabilities before the picture")
    expect(float(np.abs(other.text(2) - one.text(2)).max()) > 10 * SAME, "others after another picture", other.text(2))


def pictures_are_read_in_their_order(server: Server) -> None:
    """The text between two pictures knows the first and not the second; what follows tells their order."""
    one, two, three = (data.picture(seed) for seed in (1, 2, 3))
    plain = _Seen(server, START, one, MIDDLE, two, END)
    later, earlier, turned = (
        _Seen(server, START, *pictures, END)
        for pictures in ((one, MIDDLE, three), (three, MIDDLE, two), (two, MIDDLE, one))
    )
    expect_close(
        later.text(2), plain.text(2), SAME, "log-probabilities between the pictures, where the second is another"
    )
    for what, changed, part in (("first", earlier, 2), ("second", later, 4), ("order of the pictures", turned, 4)):
        change = float(np.abs(changed.text(part) - plain.text(part)).max())
        expect(change > 10 * SAME, f"log-probabilities that depend on the {what}", f"a change of {change:.3g}")


def sampler_and_trainer_see_the_same_pictures(server: Server) -> None:
    _expect_agreement(server, server.new_model(), _sampler(server))


def an_adapter_is_applied_to_pictures_too(server: Server) -> None:
    model = server.new_model()
    seen = _Seen(server, START, data.picture(1), END)
    wait(model.forward_backward([seen.datum()], "cross_entropy"))
    wait(model.optim_step(types.AdamParams(learning_rate=2e-2)))
    sampler = client_of(model.save_weights_and_get_sampling_client())
    trained = logprobs(model, seen.datum())[0][seen.of_text]
    change = float(np.abs(trained - seen.all[seen.of_text]).max())
    expect(
        change > 4 * server.tolerance,
        f"an update to change log-probabilities by more than {4 * server.tolerance}",
        change,
    )
    _expect_agreement(server, model, sampler)


def neighbouring_pictures_keep_their_order(server: Server) -> None:
    model = server.new_model()
    one, two = data.picture(1), data.picture(2)
    plain, turned = _Seen(server, START, one, two, END), _Seen(server, START, two, one, END)
    expect(
        float(np.abs(turned.text(3) - plain.text(3)).max()) > 10 * SAME, "others for the other order", turned.text(3)
    )
    for seen in (plain, turned):
        got = logprobs(model, seen.datum())[0]
        expect_close(got[seen.of_text], seen.all[seen.of_text], server.tolerance, "the trainer's log-probabilities")


def a_jpeg_is_read_as_a_png(server: Server) -> None:
    """A plain grey, which JPEG keeps exactly."""
    png, jpeg = (_Seen(server, START, data.picture(-128, file_format=kind), END) for kind in ("png", "jpeg"))
    expect_close(jpeg.text(2), png.text(2), SAME, "log-probabilities after a JPEG of the same pixels")


def pictures_of_any_shape_are_read(server: Server) -> None:
    model = server.new_model()
    for side_px in (33, 100, 160):
        seen = _Seen(server, START, data.picture(4, side_px=side_px), END)
        got = logprobs(model, seen.datum())[0]
        expect_close(got[seen.of_text], seen.all[seen.of_text], server.tolerance, f"the trainer's, for {side_px} px")


def the_gradient_through_a_picture_is_that_of_the_loss(server: Server) -> None:
    expect_gradient_of_its_loss(server, _Seen(server, START, data.picture(1), END).datum())


def pictures_of_a_batch_do_not_mix(server: Server) -> None:
    model = server.new_model()
    batch = [
        _Seen(server, START, data.picture(1), END).datum(),
        data.text(5),
        _Seen(server, START, data.picture(2), MIDDLE, data.picture(3), END).datum(),
    ]
    for each, together in zip(batch, logprobs(model, *batch), strict=True):
        expect_close(together, logprobs(model, each)[0], 10 * SAME, "log-probabilities as in a batch of its own")


def malformed_pictures_are_refused(server: Server) -> None:
    model, sampler = server.new_model(), _sampler(server)
    png = data.picture(1).data
    ids = [*START, *END]
    for what, content in (("no picture", b"no picture"), ("an empty file", b""), ("half a file", png[: len(png) // 2])):
        chunk = types.ImageChunk(data=content, format="png")
        datum = data.datum(START, chunk, targets=ids, weights=np.ones(len(ids)))
        for refusal in (
            refusal_of(partial(_prompt_logprobs, sampler, START, chunk, END)),
            refusal_of(partial(logprobs, model, datum)),
        ):
            expect(refusal is not None, f"{what} to be refused", "a result")


class _Seen:
    """A prompt with pictures and the base model's log-probabilities of its tokens, by the sampler."""

    def __init__(self, server: Server, *chunks: Chunk) -> None:
        self.chunks = chunks
        self.all = _prompt_logprobs(_sampler(server), *chunks)
        self.length = len(self.all) + 1
        pictures = [chunk for chunk in chunks if isinstance(chunk, types.ImageChunk)]
        num_text = sum(len(chunk) for chunk in chunks if not isinstance(chunk, types.ImageChunk))
        self.num_image_tokens, rest = divmod(self.length - num_text, len(pictures))
        expect(rest == 0, f"as many positions for each of {len(pictures)} pictures of one size", self.length - num_text)

    def _spans(self) -> list[tuple[int, int]]:
        ends = np.cumsum(
            [self.num_image_tokens if isinstance(c, types.ImageChunk) else len(c) for c in self.chunks]
        ).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def text(self, chunk: int) -> Numbers:
        """Log-probabilities of the tokens of a chunk of text, by its place among the chunks."""
        start, end = self._spans()[chunk]
        return self.all[max(start - 1, 0) : end - 1]

    @property
    def of_text(self) -> npt.NDArray[np.bool_]:
        """Which targets are text [length - 1]."""
        return self._targets()[1:] != 0

    def _targets(self) -> npt.NDArray[np.int64]:
        parts = [[0] * self.num_image_tokens if isinstance(c, types.ImageChunk) else list(c) for c in self.chunks]
        return np.concatenate([np.asarray(part, np.int64) for part in parts])

    def datum(self) -> types.Datum:
        """The same as data for training, with target 0 of weight 0 where a picture is, as the cookbook sends it."""
        *before, last = self.chunks
        assert not isinstance(last, types.ImageChunk), "a prompt ends with text"
        targets = self._targets()[1:]
        return data.datum(*before, list(last)[:-1], targets=targets, weights=(targets != 0).astype(float))


def _prompt_logprobs(sampler: tinker.SamplingClient, *chunks: Chunk) -> Numbers:
    return np.asarray(wait(sampler.compute_logprobs(data.prompt(*chunks)))[1:], np.float64)


def _sampler(server: Server) -> tinker.SamplingClient:
    return client_of(server.client().create_sampling_client(base_model=server.model))


def _expect_agreement(server: Server, model: tinker.TrainingClient, sampler: tinker.SamplingClient) -> None:
    seen = _Seen(server, START, data.picture(1), MIDDLE, data.picture(2), END)
    got = _prompt_logprobs(sampler, *seen.chunks)
    expected = logprobs(model, seen.datum())[0]
    expect_close(
        got[seen.of_text], expected[seen.of_text], server.tolerance, "the sampler's log-probabilities of the text"
    )
    params = types.SamplingParams(max_tokens=4, seed=3, stop=[])
    for sequence in wait(sampler.sample(data.prompt(*seen.chunks), 2, params)).sequences:
        ids = list(sequence.tokens)
        prompt = seen.datum().loss_fn_inputs
        longer = data.datum(
            *seen.chunks,
            ids[:-1],
            targets=[*prompt["target_tokens"].data, *ids],
            weights=[*prompt["weights"].data, *np.ones(len(ids))],
        )
        ours = logprobs(model, longer)[0][-4:]
        expect_close(
            sequence.logprobs or [], ours, server.tolerance, "log-probabilities of what was sampled after pictures"
        )
