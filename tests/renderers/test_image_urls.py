"""A rollout's screenshots: the same object from the device to every prompt."""

import json
import tracemalloc
from base64 import b64encode
from typing import Any

import pytest

from cua_rl.renderers.image_urls import ImageUrls
from cua_rl.renderers.openai_fields import FieldPath
from cua_rl.renderers.openai_items import conversation_from_chat, conversation_from_responses, responses_input
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.renderers.request_error import RequestError
from cua_rl.types.conversation import Item, Message
from tests.builders import stored_image
from tests.renderers.generated import encode_image, make_image

AT = FieldPath("url")


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{b64encode(data).decode()}"


def test_what_was_written_as_a_url_is_read_back_as_the_same_object() -> None:
    images, shown = ImageUrls(), stored_image(encode_image(make_image(64, 96)))
    url = images.url(shown)
    assert url == url_of(shown.data)
    assert images.image(bytes(url, "ascii").decode(), AT) is shown


def test_a_url_that_comes_again_is_decoded_once_and_sent_on_as_it_came() -> None:
    images, data = ImageUrls(), encode_image(make_image(65, 97))
    first, again = images.image(url_of(data), AT), images.image(url_of(data), AT)
    assert first is again
    assert (first.format, first.width_px, first.height_px) == ("png", 65, 97)
    assert images.url(stored_image(data)) == images.url(first) == url_of(data)


def test_urls_are_not_kept_beside_the_images_that_they_show() -> None:
    images, screens = ImageUrls(), [stored_image(encode_image(make_image(320, 480, seed))) for seed in range(20)]
    tracemalloc.start()
    for screen in screens:
        assert images.image(images.url(screen), AT) is screen
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < sum(len(screen.data) for screen in screens) / 10


def test_a_named_image_is_read_back_as_the_same_object_and_by_nobody_else() -> None:
    images, shown = ImageUrls(), stored_image(encode_image(make_image(64, 96)))
    name = images.name(shown)
    assert len(name) < 80
    assert images.image(bytes(name, "ascii").decode(), AT) is shown
    assert images.without_images({"image_url": name}) == {"image_url": f"sha256:{shown.sha256}"}
    with pytest.raises(RequestError, match="a data: URL"):
        ImageUrls().image(name, AT)


def test_forgotten_urls_are_read_again_and_names_stay() -> None:
    images, named, sent = ImageUrls(), *(stored_image(encode_image(make_image(64, size))) for size in (96, 128))
    name, read = images.name(named), images.image(url_of(sent.data), AT)
    images.url(named)
    images.forget_urls()
    assert images.num_characters == 0
    assert images.image(name, AT) is named
    assert images.image(url_of(sent.data), AT) is not read


def test_what_a_request_repeats_is_replaced_by_its_name_before_it_is_parsed() -> None:
    images, datas = ImageUrls(), [encode_image(make_image(64, side)) for side in (96, 128)]
    known, new = map(url_of, datas)
    read = images.image(known, AT)
    request = {
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": known}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"detail": "low", "url": known}}]},
            {"role": "user", "content": [{"type": "input_image", "image_url": new}]},
        ]
    }
    body = json.dumps(request).encode()

    shortened = images.with_names(body)

    assert len(shortened) < len(body) - 2 * len(known) + 200
    assert json.loads(shortened) == json.loads(body.replace(known.encode(), f"sha256:{read.sha256}".encode()))
    assert images.image(f"sha256:{read.sha256}", AT) is read
    assert ImageUrls().with_names(body) == body
    conversation_from_responses(json.loads(shortened), images)
    assert len(images.with_names(body)) < 600  # now the third is known, too


def test_names_in_a_request_under_way_outlive_the_urls_once() -> None:
    images, url = ImageUrls(), url_of(encode_image(make_image(64, 96)))
    read = images.image(url, AT)
    images.with_names(json.dumps({"image_url": url}).encode())
    images.forget_urls()
    assert images.image(f"sha256:{read.sha256}", AT) is read
    images.forget_urls()
    with pytest.raises(RequestError, match="a data: URL"):
        images.image(f"sha256:{read.sha256}", AT)


def test_nobody_gets_an_image_by_a_text_that_only_begins_or_ends_like_its_url() -> None:
    images, theirs = ImageUrls(), ImageUrls()
    url = url_of(encode_image(make_image(64, 96)))
    read = images.image(url, AT)
    others = [
        json.dumps({"image_url": text})
        for text in (url[:-1], url[:-4], f"{url}A", f"{url}\\", f"{url[:-2]}\\n", url[1:], f"x{url}", url.upper())
    ]
    others += [
        json.dumps({"text": url}),  # a text, not an image
        json.dumps({"arguments": json.dumps({"image_url": url})}),  # of a call, as text
        f'{{"image_url": "{url}',  # cut off
        f'{{"image_url": "{url}}}',
        '{"image_url": "data:image/',
    ]
    for body in map(str.encode, others):
        assert images.with_names(body) == body
    body = json.dumps({"image_url": url}).encode()
    assert images.with_names(body) != body
    assert theirs.with_names(body) == body  # of another rollout
    with pytest.raises(RequestError, match="a data: URL"):
        theirs.image(f"sha256:{read.sha256}", AT)


def test_a_url_that_misnames_its_format_is_corrected_before_it_is_sent_on() -> None:
    images, data = ImageUrls(), encode_image(make_image(8, 8), "jpeg")
    read = images.image(url_of(data, "png"), AT)
    assert read.format == "jpeg"
    assert images.url(read) == url_of(data, "jpeg")


def test_prompts_with_the_same_screenshot_share_its_bytes(small_renderer: Qwen3VLRenderer) -> None:
    images, url = ImageUrls(), url_of(encode_image(make_image(65, 97)))
    chat: Any = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    responses: Any = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}
    first = small_renderer.render(conversation_from_chat(chat, images).items)
    again = small_renderer.render(conversation_from_responses(responses, images).items)
    assert first.images[0] is again.images[0]


def test_requests_are_recorded_with_hashes_in_place_of_images() -> None:
    images, shown = ImageUrls(), stored_image(encode_image(make_image(8, 8)))
    items: list[Item] = [Message(role="user", content=(shown,))]
    request = {"input": responses_input(items, images.url), "temperature": 1.0}
    assert images.without_images(request) == {
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_image", "image_url": f"sha256:{shown.sha256}", "detail": "auto"}],
            }
        ],
        "temperature": 1.0,
    }


def test_what_has_no_image_is_recorded_without_a_copy() -> None:
    images, shown = ImageUrls(), stored_image(encode_image(make_image(8, 8)))
    named: Any = {"content": [{"type": "input_image", "image_url": images.name(shown)}]}
    sent: Any = {"content": [{"type": "input_image", "image_url": images.url(shown)}]}
    recorded: Any = images.without_images({"input": [named, sent]})["input"]
    assert recorded == [named, named]
    assert recorded[0] is named


def test_bytes_that_cannot_be_shown_are_refused() -> None:
    with pytest.raises(RequestError, match="readable PNG or JPEG"):
        ImageUrls().image(url_of(b"\x89PNG\r\n\x1a\nscreen"), AT)
