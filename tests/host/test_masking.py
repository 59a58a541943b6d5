"""No secret passes the masker, wherever it stands; ordinary text does."""

import html
import json
import logging
import string
import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cua_rl.host.masking import (
    MASK,
    MaskingFormatter,
    environment_secrets,
    is_line,
    is_secret_name,
    known_secrets,
    make_key,
    mask_known,
    mask_secrets,
    mask_text,
    printable,
    remember_secrets,
    secrets_in,
)
from tests.secret_shapes import PLACED, PREFIXED

# as services make them: letters, digits and a few signs, never a word of prose
SECRETS = st.text(string.ascii_letters + string.digits + "-_", min_size=12, max_size=48).filter(
    lambda text: (
        any(map(str.isdigit, text)) and any(map(str.isalpha, text)) and text[0].isalnum() and text[-1].isalnum()
    )
)
NAMES = st.sampled_from(
    [
        *("api_key", "API-Key", "apiKey", "GBOX_API_KEY", "OPENAI_API_KEY_2", "access_key", "AccountKey", "secret_key"),
        *("token", "access_token", "accessToken", "project_token", "HF_TOKEN", "MONITOR_READ_TOKEN", "refresh_token"),
        *("password", "PGPASSWORD", "db_passwd", "passphrase", "pwd", "clientSecret", "secret", "credentials"),
        *("Authorization", "Proxy-Authorization", "X-Api-Key", "X-Auth-Token", "Cookie", "Set-Cookie"),
        *("private_key", "X-Amz-Security-Token", "signing_key", "session_token"),
    ]
)
PLACES = st.sampled_from(
    [
        *("{name}={secret}", "{name}: {secret}", "{name} = {secret}", "--{name} {secret}", "--{name}={secret}"),
        *("'{name}': '{secret}'", '{{"{name}": "{secret}"}}', "(b'{name}', b'{secret}')", '{name}: "{secret}"'),
        *("http://host/path?{name}={secret}", "http://host/?a=1&{name}={secret}&b=2", "['--{name}', '{secret}']"),
        *("{name}: Bearer {secret}", "{name}: Basic {secret}", "curl -H '{name}: {secret}' http://host"),
    ]
)
CREDENTIALS = st.sampled_from(
    [
        *(
            "https://{secret}@host/x.git",
            "https://user:{secret}@host:80/x",
            "http://{secret}:x@host",
            "ws://a:{secret}@h",
        ),
        *("postgresql://user:{secret}@host:5432/runs", "redis://:{secret}@host/0", "postgresql://u:a/{secret}@h/d"),
        *("http://h/?token={secret}", "https://h/?key={secret}#x", "https://h/x?a=b&sig={secret}", "Bearer {secret}"),
        *("curl -u bob:{secret} http://host", "--user 'bob:{secret}'", "Cookie: a=b; sid={secret}; c=d"),
        *("Authorization: Digest username=a, response={secret}", "-H 'Cookie: sid={secret}' -v"),
    ]
)
SURROUNDINGS = st.sampled_from(
    ["{}", "expected an answer, got 401 ({}); check it", "a\n{}\nb", '"{}"', "x {} y", "[{}]"]
)


@given(secret=SECRETS, name=NAMES, place=PLACES, around=SURROUNDINGS)
def test_no_secret_beside_its_name_is_left(secret: str, name: str, place: str, around: str) -> None:
    assert secret not in mask_text(around.format(place.format(name=name, secret=secret)))


@given(secret=SECRETS, credential=CREDENTIALS, around=SURROUNDINGS)
def test_no_secret_of_an_address_or_header_is_left(secret: str, credential: str, around: str) -> None:
    assert secret not in mask_text(around.format(credential.format(secret=secret)))


@given(secret=SECRETS, name=NAMES, depth=st.integers(0, 4))
def test_no_secret_in_json_inside_strings_is_left(secret: str, name: str, depth: int) -> None:
    text = json.dumps({name: secret, "other": 1})
    for _ in range(depth):
        text = json.dumps({"body": text})

    assert secret not in mask_text(text)
    assert json.loads(mask_text(text))


@given(secret=SECRETS, name=NAMES)
def test_no_secret_in_nested_data_is_left_and_the_rest_stays(secret: str, name: str) -> None:
    data = {
        "plain": {"max_tokens": 48, "tokenizer": "qwen", "image_token": "<|image_pad|>", "token": 151655},
        name: secret,
        "inner": [{name: secret}, {"a": {name: [secret]}}, [name, secret], {"name": name, "value": secret}],
        "command": ["agent", f"--{name}", secret, "--steps", "3"],
        "cookies": {"session": secret},
        "body": json.dumps({"header": {name: secret}}),
    }

    masked = mask_secrets(data)

    assert secret not in json.dumps(masked)
    assert masked["plain"] == data["plain"]
    assert masked["command"] == ["agent", f"--{name}", MASK, "--steps", "3"]


@given(secret=st.text(min_size=8, max_size=40).filter(lambda text: text.strip("* \\\"'") == text), around=SURROUNDINGS)
def test_a_known_secret_is_masked_without_any_name(secret: str, around: str) -> None:
    assert secret not in mask_text(around.format(secret), [secret])


@given(secret=SECRETS.filter(lambda text: len(text) >= 24), shape=st.sampled_from(sorted(PLACED)))
def test_no_secret_is_left_where_tools_and_languages_write_it(secret: str, shape: str) -> None:
    form = secret.replace("_", "x").replace("-", "y")
    text = PLACED[shape].format(*[form] * PLACED[shape].count("{"))

    assert form[:16] not in mask_text(text)
    assert form[:16] not in mask_text(f"a line before\n{text}\na line after")
    assert mask_text(mask_text(text)) == mask_text(text)


@given(
    digits=st.text(string.ascii_letters + string.digits, min_size=39, max_size=39),
    shape=st.sampled_from(sorted(PREFIXED)),
)
def test_no_token_is_left_whose_form_shows_what_it_is(digits: str, shape: str) -> None:
    secret = digits[:5] + "7" + digits[5:]
    text = PREFIXED[shape].format(*[secret] * PREFIXED[shape].count("{"))

    for around in ("{}", "expected an answer, got 401 ({}); check it", '"{}",', "a {}\nb"):
        assert secret[:16] not in mask_text(around.format(text)), shape


@given(secret=st.binary(min_size=12, max_size=40), before=st.binary(max_size=4), after=st.binary(max_size=4))
def test_a_known_secret_is_masked_amid_encoded_bytes(secret: bytes, before: bytes, after: bytes) -> None:
    known = secret.hex()
    data = before + known.encode() + after
    for encoded in (b64encode(data).decode(), urlsafe_b64encode(data).decode(), data.hex(), data.hex().upper()):
        masked = mask_text(f"payload={encoded} end", [known])
        left = masked.removeprefix("payload=").removesuffix(" end").partition(MASK)
        # what is left beside the stars are the bytes around, and a byte that shares its characters with them
        assert left[1] == MASK, encoded
        assert len(left[0]) + len(left[2]) <= 2 * (len(before) + len(after)) + 8


@pytest.mark.parametrize(
    "write", [quote, quote_plus, json.dumps, repr, html.escape, lambda text: json.dumps(json.dumps(text))]
)
def test_a_known_secret_is_masked_however_it_is_escaped(write: Callable[[str], str]) -> None:
    secret = 'pa ss/"wö<rd&\\n1234'
    assert "1234" not in mask_text(write(secret), [secret])


def test_each_line_of_a_known_secret_is_masked() -> None:
    known = "-----BEGIN KEY-----\nabcdefgh01234567\nijklmnop89abcdef\n-----END KEY-----"
    assert mask_text("got ijklmnop89abcdef", [known]) == "got ***"
    assert mask_text("-----BEGIN KEY-----", [known]) == "-----BEGIN KEY-----"


WORDS = ["a", "step", "of", "the", "policy", "has", "tokens", "and", "keys", "in", "words", "that", "people", "write"]
ORDINARY = [
    "max_tokens=48 num_tokens: 5, normalisation_tokens=1000 tokens/s: 31.5",
    "tokenizer=qwen --tokenizer /models/qwen tokenizer_path: /models",
    "image_token=<|image_pad|> eos_token: </s> pad_token_id=151643 image_token_id=151655",
    "token 5 of 7; first token: hello; the token: 151655",
    "project_token: expected the token of a project beside monitor.base_url, got none; make one there",
    "gbox_api_key: expected the key of a GBox account, got none; set GBOX_API_KEY in the environment or in .env",
    "MONITOR_READ_TOKEN: expected at least 16 characters, got 4; choose a longer one",
    "expected DATABASE_URL to read postgresql://user:password@host:port/database, got something that is no URL",
    "the bearer token is checked; a basic test; api_key_env=OPENAI_API_KEY; gbox_api_key=None",
    "http://127.0.0.1:8000/v1/chat?model=x&n=2 postgresql://postgres@/postgres?host=/tmp/x ssh://git@host/x",
    "step=3 rollout_id=r-17 task=settings stop=device_error expected a box, got status 404: no such box",
    'key=Enter keys=["ctrl", "a"] {"key": "ctrl"} a@b.org secretary passing tokenised',
    "set MONITOR_PROJECT_TOKEN=... or monitor.project_token=...",
    "password: none, Authorization: required, cookies: 0",
    "commit 2b580c0d1f4e5a6b7c8d9e0f1a2b3c4d5e6f7a8b, md5:9f86d081884c7d659a2feaa0c55ad015",
    "rollout 0b6f2f3e-8a0c-4b1e-9a52-6f1f7c0f6f10 of step-000021, policy-000041, key-value-store-2024-benchmark",
    "risk-adjusted-return-2024-11-23-of-the-run, task-1234567890-abcdef-ghijkl, as-of-2026-11-23 v1.0-rc1 dapi",
    '{"name": "email", "value": "bob@example.org"} {"d": "M10 10 L 20 20"} <input name="city" value="Berlin 10115">',
    '{"action": "click", "coordinate": [512, 384]} {"key": "Return", "text": "set password to the word on the page"}',
    "machine learning default settings; set the token limit; login bob; mysql -u root -p runs; oauth: enabled-for-all",
    "$5 and $12.50 <password> field </form> auth: required; author=somebody-with-a-long-name",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5",
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays(text: str) -> None:
    assert mask_text(text) == text


@given(st.lists(st.sampled_from(WORDS)))
def test_prose_stays(words: list[str]) -> None:
    assert mask_text(" ".join(words)) == " ".join(words)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "tokenizer", "image_token", "eos_token", "token_ids", "api_key_env", "key", "keep_every", "author"],
)
def test_names_that_only_resemble_secrets_are_none(name: str) -> None:
    assert not is_secret_name(name)


def test_masking_twice_changes_nothing() -> None:
    once = mask_text("https://bob:abcd1234@h/?token=abcd1234#top --token x1y2 password='a b'")
    assert once == "https://***:***@h/?token=***#top --token *** password='***'"
    assert mask_text(once) == once


def test_a_private_key_is_masked_whole() -> None:
    text = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----\nafter"

    assert mask_text(text) == "***\nafter"


def test_secrets_of_the_environment_are_values_of_secret_names_and_passwords_of_addresses() -> None:
    environ = {
        "PWD": "/home/somebody/project",
        "OLDPWD": "/home/somebody/elsewhere",
        "PGPASSWORD": "password-1",
        "OPENAI_API_KEY": "sk-value-2",
        "DATABASE_URL": "postgresql://user:password-3@db/runs",
        "HTTPS_PROXY": "http://bob:password-4@proxy:3128",
        "SHORT_TOKEN": "none",
        "HOME": "/home/somebody",
    }

    assert sorted(environment_secrets(environ)) == ["password-1", "password-3", "password-4", "sk-value-2"]


def test_a_log_shows_no_secret_of_the_configuration_even_in_a_traceback() -> None:
    remember_secrets({"gbox_api_key": "gbox-key-of-a-test", "judge": {"base_url": "http://u:pass-of-a-test@h/v1"}})
    formatter = MaskingFormatter("%(message)s")
    try:
        raise ValueError("401 for gbox-key-of-a-test")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("n", logging.INFO, __file__, 1, "asked with %s", ("pass-of-a-test",), info)

    text = formatter.format(record)

    assert "asked with ***" in text
    assert "of-a-test" not in text
    assert "gbox-key-of-a-test" in known_secrets({})


@pytest.mark.parametrize(
    "place",
    [
        "api_key:          {}",
        "OPENAI_API_KEY      =      {}",
        "api_key: |\n  {}\nother: x",
        "password:\n- {}\n",
        "api_key: !!str {}",
        "{{'X-Api-Key': ['{}']}}",
        '{{"api_keys": ["first-of-two", "{}"]}}',
        "redirect=https%3A%2F%2Fhost%2F%3Ftoken%3D{}",
        "https://host/p?x=1%26token%3D{}",
        "https%3A%2F%2Fuser%3A{}%40host%2F",
        "DB_PASS={}",
        "GITHUB_PAT={}",
        "OPENAI_KEY={}",
        "https://hooks.slack.com/services/T00000000/B00000000/{}",
    ],
)
def test_layouts_of_yaml_addresses_in_addresses_lists_and_short_names_hide_no_secret(place: str) -> None:
    assert "s3cr3tValue99x" not in mask_text(place.format("s3cr3tValue99x"))


@pytest.mark.parametrize(
    "text", ["token: [1, 2, 3]", "one_pass: 3", "first_pass=true", "compat=1", "keys: [a, b]", "hf: key", "key: value"]
)
def test_short_names_and_lists_that_are_no_secrets_stay(text: str) -> None:
    assert mask_text(text) == text


def test_no_text_takes_long_to_mask() -> None:
    for piece in (
        "api_key=[",
        "token: ",
        "https%3A%2F%2Fa",
        "api_key: |\n",
        "?token%3D",
        "password" + " " * 20,
        "-eyJ",
        "-u=",
        "eyJabcdefgh.",
        "1//0",
        "sk-a",
        "<password ",
        "mysql ",
        "'value': '",
        "machine a ",
        "auth=",
        "set -x ",
        "A" * 50,
        "$6$",
        'password = """',
    ):
        began = time.process_time()
        mask_text(piece * (50_000 // len(piece)))
        assert time.process_time() - began < 2.5


@pytest.mark.parametrize(
    ("hostile", "left"),
    [
        ("a\x1b]0;a title\x07b", "ab"),
        ("a\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\b", "alinkb"),
        ("a\x1b]52;c;cm0gLXJmIC8=\x07b", "ab"),  # writes to the clipboard
        ("a\x1b[2J\x1b[1;1H\x1b[31mred\x1b[0m", "ared"),
        ("a\x1bP1;2|payload\x1b\\b\x1b_hidden\x1b\\c", "abc"),
        ("a\x9b31mred\x9d0;title\x9cb", "aredb"),  # the same as single C1 characters
        ("a\x1bcb\x1b(0c\x1b7", "abc"),  # reset, other letters, save the cursor
        ("done\rok: 0 faults\b\b", "done\nok: 0 faults"),  # overwrites the line that was shown
        ("a\x00\x07\x0b\x0c\x7f\x85b", "ab"),
        ("see \u202egpj.exe\u202c and \u2066x\u2069", "see gpj.exe and x"),
        ("\x1b]0;a title that never ends\nTraceback: the cause", "0;a title that never ends\nTraceback: the cause"),
        ("\x1b[", ""),
        ("tab\tand\nline, Grüße, 你好, 😀, الع", "tab\tand\nline, Grüße, 你好, 😀, الع"),
    ],
)
def test_what_a_terminal_would_obey_is_taken_out_and_text_stays(hostile: str, left: str) -> None:
    assert printable(hostile) == left


@given(st.text(st.sampled_from("\x1b[]P\\;0m\x07\x9b\x9c\x9d\x90?ab \n\t\r\b\x00\u202e\u2067")))
def test_no_control_character_survives_any_mixture(text: str) -> None:
    shown = printable(text)

    assert not [char for char in shown if (ord(char) < 32 and char not in "\n\t") or 127 <= ord(char) < 160]
    assert not set(shown) & set("\u202e\u2067")
    assert printable(shown) == shown


def test_a_secret_cut_by_escapes_and_a_spent_key_do_not_reach_the_log() -> None:
    key = make_key()
    formatter = MaskingFormatter("%(message)s")
    said = f"\x1b[1mOPENAI_API\x1b[0m_KEY=s3cr\x1b[8met-of-a-test; asked with {key[:10]}\x1b[K{key[10:]}\x07"
    record = logging.LogRecord("n", logging.WARNING, __file__, 1, "the agent ended: %s", (said,), None)

    assert formatter.format(record) == "the agent ended: OPENAI_API_KEY=***; asked with ***"
    assert key not in mask_known(f"GET /rollouts/r-1/keys/{key}/v1 {key}")


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\u2028", "\x85", "\x0b"])
def test_no_name_from_outside_begins_a_line_of_the_log(end: str) -> None:
    formatter = MaskingFormatter("%(levelname)s %(message)s")
    name = f"run{end}WARNING alert run=theirs kind=stalled"
    record = logging.LogRecord("n", logging.WARNING, __file__, 1, "alert run=%s", (name,), None)

    first, *others = formatter.format(record).splitlines()

    assert first.startswith("WARNING alert run=run")
    assert all(line.startswith("  ") for line in others)
    assert not is_line(name)


def test_hostile_text_takes_no_long_time() -> None:
    for piece in ("\x1b]0;", "\x1b[", "\x1bP\x1b", "\x9d" * 10, "\u202e"):
        began = time.process_time()
        printable(piece * (200_000 // len(piece)))
        assert time.process_time() - began < 10


def test_a_setting_whose_value_ends_like_a_secret_name_hides_not_the_argument_after_it() -> None:
    assert secrets_in(["log_path=runs/no_password", "max_steps=10"]) == []
    assert secrets_in(["--api-key", "sk-1234567890"]) == ["sk-1234567890"]
