"""What may be stored and shown: secrets in names, texts, addresses, headers, flags and nested data are replaced by
***, and terminal control sequences are removed from what is printed or logged.

A secret is known by the name beside it (`api_key`, `--token`, `Authorization`), by its place (the user and password of
a URL), by its form (`hf_...`, a JSON Web Token), or because the environment or the configuration of this process holds
it. Where prose and secrets look alike, the text is kept only if what follows a name is clearly prose or a number.
"""

import base64
import html
import json
import logging
import os
import re
import secrets as random_secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import quote, quote_plus, unquote

from cua_rl.types.json_values import is_array, is_object, sequence

MASK = "***"

_KEYS = (
    "access account admin api auth client deploy encryption functions license master private project secret service "
    "session shared_access signing ssh subscription write "
    "anthropic azure gbox gemini groq hf huggingface mistral openai openrouter wandb"
)
_KEY = rf"(?:{'|'.join(_KEYS.replace('_', '[_-]?').split())})[_ -]?key(?:[_-]?(?:id|data))?s?"
# tokens of a text or vocabulary; names such as max_tokens and tokenizer do not end with "token"
_TEXT_TOKENS = (
    "bos cls each end eos first image last mask max min next num pad per rare sep special start stop thinking unk "
    "video vision"
)
_TOKEN = "token" + "".join(rf"(?<!{word}[_ -]token)" for word in _TEXT_TOKENS.split())
_TOKENS = r"(?:access|api|auth|bearer|id|refresh|secret|session)[_ -]?tokens"
_HEADER = r"(?:authorization|cookies?|x[_-]amz[_-](?:security[_-]token|signature|credential)|x[_-]auth(?:[_-]\w+)?)"
_PASSWORD = r"(?:pass(?:word|wd|phrase|code)s?|(?<![a-z])pwd|secrets?(?:[_-](?:value|text|string))?|credentials?|dsn)"
# short for password and personal access token; on their own, they are words
_OWNERS = "admin|database|db|email|ftp|http|mail|mysql|pg|postgres|proxy|redis|root|smtp|user"
_SHORT = rf"(?:(?:{_OWNERS})_pass|(?:gh|github|gitlab)_pat)(?![a-z])"
_NAME = rf"(?:{_KEY}|{_TOKENS}|{_TOKEN}|{_HEADER}|{_PASSWORD}|{_SHORT})(?:[_-]?\d{{1,2}})?"  # OPENAI_API_KEY_2

_SECRET_NAME = re.compile(rf"(?:{_NAME}|(?:^|[_.-])(?:auth|jwt|sig|signature|userinfo|webhook))$", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SHORTEST_SECRET = 8  # shorter values of secret variables ("1", "none") would mask innocent text

_PEM = re.compile(
    r"-----BEGIN ([A-Z ]*PRIVATE KEY(?: BLOCK)?)-----.*?(?:-----END \1-----|\Z)"
    r"|Private-Lines: \d+\s.*?(?:Private-MAC|\Z)",
    re.DOTALL,
)
_WEB_USER = re.compile(
    r"((?:https?|wss?|ftp)://)(?!user:password@)[^\s/?#\"'<>@\\]{1,512}@(?=[^\s@\"'<>/]|\Z)", re.IGNORECASE
)
# a password in a database's URL may hold a slash or another @; the @ of a path does not end a password
_URL_PASSWORD = re.compile(
    r"(://(?!user:password@)[^\s/:@\"'<>\\]{0,256}:)(?!\d{1,5}[/?])[^\s\"'<>\\]{1,512}(@)(?=[^\s@\"'<>]*(?:[\s\"'<>\\]|\Z))"
)
_QUERY = re.compile(
    rf"((?:[?&;]|%3f|%26)(?:[\w.-]{{0,64}}?{_NAME}|key|auth|jwt|code|sig|signature)(?:=|%3d))"
    r"(?:(?!%26)[^&\s\"'<>#\\;])+",
    re.IGNORECASE,
)
# an address inside an address
_QUOTED_USER = re.compile(r"(%3a%2f%2f)(?:(?!%2f|%40|%3f)[^\s&\"'<>\\]){1,512}(%40)", re.IGNORECASE)
_BEARER = re.compile(r"\b((?:bearer|basic|negotiate)\s+)(?![a-z]+\b(?![\w+/=.-]))[\w+/=.~-]{4,}", re.IGNORECASE)
_CURL_USER = re.compile(r"((?<![\w-])(?:-u|--user|--proxy-user)[ =]['\"]?[^\s:'\"]{1,256}:)[^\s'\"]+")
_FLAG = re.compile(
    rf"((?<![\w-])--?[\w.-]{{0,64}}?{_NAME}[\"']?(?:=|,?\s+))(b?\"[^\"]*\"|b?'[^']*'|[^\s\"',\]]+)",
    re.IGNORECASE,
)
_YAML = r"(?:[|>][+-]?[ \t]*\n[ \t]{0,40}|-[ ]+(?=\S)|(?:!!?|&)\w+[ ]+)?"  # a block of lines, a list's item, a tag
_LISTED = re.compile(
    rf"({_NAME}\\*[\"']?\s{{0,20}}[:=]\s{{0,20}}[\[(])(?=[^\])\n]{{0,200}}[A-Za-z])[^\])\n]{{1,1000}}([\])])",
    re.IGNORECASE,
)
# name, then a separator; quotes may be escaped any number of times: JSON inside a string inside JSON
_ASSIGNED = re.compile(
    rf"""({_NAME}\\*["']?\]?(?:\s{{0,20}}(?:=>|:=|[:=])|(?<=["']),)[ \t]{{0,20}}\s{{0,3}}{_YAML}(?:some\()?)"""
    r"""(?:(b?(\\*["']))(?:(?!\3).)*?(?:\3|(?=\n)|\Z)|((?:(?:bearer|basic|token|negotiate|apikey)\s+)?[^\s,;&"'<>(){}\[\]\\]+))""",
    re.IGNORECASE,
)
# headers of many parts fill their line, or the string that they begin
_LINE = re.compile(
    r"""(cookie\s{0,2}:[ \t]*+|authorization\s{0,2}:[ \t]*+(?=(?:digest|aws4-hmac-sha256)\s))(?!["'\\])([^\r\n\\]+)""",
    re.IGNORECASE,
)
# places in files, commands and documents: what stays, then the secret; what looks like prose does not count
_PLACES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"({_NAME}\s{{0,20}}=\s{{0,20}}(?:\"{{3}}|'{{3}}))((?:(?!\"{{3}}|'{{3}})[\s\S]){{1,4096}})",  # TOML, Python
        rf"(<[\w.:-]{{0,64}}?{_NAME}(?:\s[^<>]{{0,256}})?>)([^<]{{1,4096}})(?=</[\w.:-]{{0,64}}?{_NAME}>)",
        rf"((?:key|name|id)=[\"'][\w.:-]{{0,64}}?{_NAME}[\"']\s[^<>\n]{{0,200}}?value=[\"'])([^\"'\n]+)",
        rf"(name=\"[\w.-]{{0,64}}?{_NAME}\"\r?\n\r?\n)([^\r\n]+)",  # multipart/form-data
        rf"((?<![\w.-])(?:env|setenv|set(?:\s-\w{{1,8}}){{0,3}})[ \t]+\w{{0,64}}?{_NAME}[ \t]+)"
        r"((?=\S{0,64}\d)[^\s=]\S*)",
        # netrc(5)
        r"((?<!\w)(?:machine\s+\S{1,256}|default)\s+(?:(?:login|account)\s+\S{1,256}\s+){0,2}password\s+)(\S+)",
        r"((?<![a-z])auth\\*[\"']?\s{0,20}[:=]\s{0,20}\\*[\"']?)((?=[\w+/=-]*[\dA-Z])[\w+/=-]{12,})",  # Docker, npm
        r"(\b(?:sshpass\s+-p\s*|redis-cli\b[^\n|;]{0,200}?\s-a\s+|(?:mysql|mariadb)\w{0,16}\b[^\n|;]{0,200}?\s-p))(\S+)",
        r"(\t(?:true|false)\t\d{1,20}\t[^\t\n]{1,256}\t)(\S+)",  # a cookie jar
        r"([\"']value[\"']:\s{0,4}[\"'])([^\"']+)(?=[\"'][^{}]{0,300}[\"']httponly[\"'])",
        r"([\"']httponly[\"'][^{}]{0,300}?[\"']value[\"']:\s{0,4}[\"'])([^\"']+)",
        r"([\"']d[\"']:\s{0,4}[\"'])([\w-]{22,})(?=[\"'])",  # the private part of a JSON Web Key
    )
)
_PREFIXES = (
    "sk- sk_live_ sk_test_ rk_live_ rk_test_ whsec_ gsk_ xai- pplx- nvapi- hf_ api_org_ ghp_ ghs_ gho_ ghu_ ghr_ "
    "github_pat_ glpat- glrt- gldt- glcbt- npm_ pypi- xapp- sq0atp- sq0csp- shpat_ shpss_ dop_v1_ lin_api_ ntn_ "
    "secret_ sntrys_ sntryu_ glsa_ glc_ hvs. hvb. dp.pt. dp.st. dckr_pat_ ATATT3x ya29. 1//0 GOCSPX- AIza wandb_v1_ "
    "tml- AGE-SECRET-KEY-1 cua-key- AKIA ASIA"
)
_SHORT_PREFIXES = r"(?:r8_|fw_|dapi|pul-|v1\.0-|ak-|as-|key-)"
"""With which words of prose begin, too."""
# prose behind a prefix has no digit; `risk-` is not `sk-`
_FORMS = re.compile(
    rf"(?<![\w.-])(?:{'|'.join(map(re.escape, _PREFIXES.split()))})(?=[\w-]{{0,64}}\d)[\w-]{{16,}}"
    rf"|(?<![\w.-]){_SHORT_PREFIXES}(?=[A-Za-z0-9]{{0,64}}\d)[A-Za-z0-9]{{16,}}"
    r"|(?<![\w-])xox[abeprs]-[\w-]{10,}|(?<!\w)eyJ[\w-]{8,1024}+(?:\.eyJ[\w-]{8,}\.[\w-]*|(?:\.[\w-]*){4})"
    r"|(?<!\w)SG\.[\w-]{16,64}\.[\w-]{16,}|(?<!\w)SK[0-9a-f]{32}(?::\w{20,})?|(?<!\w)\w{14}\.atlasv1\.[\w-]{32,}"
    r"|(?<!\w)\d{8,10}:AA[\w-]{33}|/bot\d{6,12}:[\w-]{30,}|(?<!\w)[A-Za-z0-9]{32,90}JQQJ99[A-Za-z0-9]{10,}"
    r"|hooks\.slack\.com/services/[\w/]{20,}|discord(?:app)?\.com/api/webhooks/\d+/[\w-]{20,}"
    r"|webhook\.office\.com/webhookb2/[^\s\"'<>]{20,}|\$(?:apr1|[1567y]|2[aby]|argon2\w{1,2})\$[./\w$=,+]{16,}"
)
# ECMA-48: strings (window titles, links, the clipboard) with their terminator, then sequences, then lone controls;
# a string without its end loses only its beginning, so that no program can swallow what follows
_TERMINAL = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x90-\x9f]{0,4096}(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|\x1b[ -/]*[0-~]?"
    # and of Unicode the marks that reorder text or end a line: what is read must be what is written
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
_NO_SECRET = re.compile(
    r"none|null|true|false|required|\.{3},?|…,?|\*+|<\|.*\|>|\d{1,7}(?:\.\d*)?|not-needed", re.IGNORECASE
)
_PROSE = re.compile(r"[A-Za-z]?[a-z]+,?")
_WORD_FOLLOWS = re.compile(r"[ ,]+[A-Za-z(]")

_given: set[str] = set()  # secrets of this process's configuration, which may turn up in texts of others


def mask_secrets(config: Mapping[str, object], secrets: Sequence[str] = ()) -> dict[str, object]:
    """The configuration with *** for every secret, wherever it is; also for each of `secrets`."""
    return _Masker(secrets).mapping(config)


def mask_text(text: str, secrets: Sequence[str] = ()) -> str:
    """The text with *** for every secret in it, and for each of `secrets`."""
    return _Masker(secrets).text(text)


def mask_known(text: str) -> str:
    """What may be printed or logged of a text that others wrote: no secret, known ones included, and no escapes."""
    return mask_text(printable(text), known_secrets())


def printable(text: str) -> str:
    """The text without what a terminal would obey: escape sequences, control characters, marks that reorder text."""
    return _TERMINAL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def is_line(text: str) -> bool:
    """Whether a name can stand in a line of a log and be read as it is."""
    return printable(text) == text and "\n" not in text


def make_key() -> str:
    """A new random key in a form that is masked everywhere, also when it has been spent."""
    return f"cua-key-{random_secrets.token_urlsafe(32)}"


def remember_secrets(config: Mapping[str, object]) -> None:
    """Let `known_secrets` include what is secret in the configuration of this process."""
    masker = _Masker()
    masker.mapping(config)
    _given.update(found for found in masker.found if len(found) >= _SHORTEST_SECRET)


@lru_cache(maxsize=1024)
def written_forms(secret: str) -> frozenset[str]:
    """How a known secret may appear in a text: escaped or encoded (also amid other bytes), or one line of it."""
    data = secret.encode()
    in_json = {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    forms = {secret, quote(secret), quote(secret, safe=""), quote_plus(secret), repr(secret)[1:-1], html.escape(secret)}
    forms |= in_json | {json.dumps(form)[1:-1] for form in in_json} | {data.hex(), data.hex().upper()}
    for offset in range(3):  # base64 writes three bytes as four characters; those shared with other bytes are unknown
        encoded = base64.b64encode(bytes(offset) + data).rstrip(b"=").decode()
        inner = encoded[-(-offset * 8 // 6) : len(encoded) - ((offset + len(data)) % 3 > 0)]
        forms |= {inner, inner.replace("+", "-").replace("/", "_")}
    forms |= {line for line in map(str.strip, secret.splitlines()) if not line.startswith("-----")}
    return frozenset(form for form in forms if form == secret or len(form) >= _SHORTEST_SECRET)


def known_secrets(environ: Mapping[str, str] = os.environ) -> list[str]:
    return sorted({*environment_secrets(environ), *_given})


def environment_secrets(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The values of environment variables with names such as OPENAI_API_KEY, and passwords in URLs of others."""
    masker = _Masker()
    # shells keep the current folder in PWD, which elsewhere is short for a password
    named = {name: value for name, value in environ.items() if name not in ("PWD", "OLDPWD")}
    masker.mapping({name: value for name, value in named.items() if "://" in value or is_secret_name(name)})
    return [value for value in masker.found if len(value) >= _SHORTEST_SECRET]


def is_secret_name(name: str) -> bool:
    """Whether a setting, variable, header or flag of this name holds a secret."""
    return _SECRET_NAME.search(_CAMEL.sub("_", name)) is not None


def secret_names(value: object) -> list[str]:
    """Names in nested JSON data that look like names of secrets."""
    if is_object(value):
        return [
            found
            for name, entry in value.items()
            for found in ([name] if is_secret_name(name) else secret_names(entry))
        ]
    return [name for entry in sequence(value) for name in secret_names(entry)]


def secrets_in(arguments: Sequence[str]) -> list[str]:
    """The secrets among the arguments of a command line."""
    masker = _Masker()
    masker.sequence("", list(arguments))
    return masker.found


class MaskingFormatter(logging.Formatter):
    """Formats records of a log without secrets and escapes; lines of what is quoted in one are indented."""

    def format(self, record: logging.LogRecord) -> str:
        """The lines, masked as a whole."""
        return mask_known(super().format(record)).replace("\n", "\n  ")


@dataclass
class _Masker:
    """Masks texts and nested data, and collects what it masked."""

    secrets: Sequence[str] = ()
    found: list[str] = field(default_factory=list[str])

    def mapping(self, entries: Mapping[str, object]) -> dict[str, object]:
        names = {name.lower(): entry for name, entry in entries.items()}
        # headers as objects: {"name": "X-Api-Key", "value": "..."}
        called = str(names.get("name") or names.get("key") or names.get("header") or "")
        masked: dict[str, object] = {}
        for name, entry in entries.items():
            is_value = name.lower() in ("value", "val") and ("httponly" in names or is_secret_name(called))
            called = "cookie" if is_value and "httponly" in names else called
            masked[self.text(name)] = self.value(called if is_value else name, entry)
        return masked

    def value(self, name: str, value: object) -> object:
        if isinstance(value, str):
            return self.named(value) if is_secret_name(name) else self.text(value)
        if is_object(value):
            entries = {str(key): entry for key, entry in value.items()}
            return self.under(name, entries) if is_secret_name(name) else self.mapping(entries)
        if is_array(value):
            return self.sequence(name, value)
        if value is None or isinstance(value, bool):
            return value
        # the id of a token is not a secret
        is_id = name.lower().endswith("token") and isinstance(value, int) and value < 10**7
        return self.named(str(value)) if is_secret_name(name) and not is_id else value

    def sequence(self, name: str, items: Sequence[object]) -> list[object]:
        """A list; in command lines and pairs of name and value, the item after a secret name is a secret."""
        masked: list[object] = []
        is_secret = False
        for item in items:
            masked.append(self.named(item) if is_secret and isinstance(item, str) else self.value(name, item))
            is_name = isinstance(item, str) and not is_secret and is_secret_name(item)
            is_pair = len(items) == 2 and "=" not in str(item)
            is_secret = is_name and (is_pair or str(item).startswith("-"))
        return masked

    def under(self, name: str, entries: Mapping[str, object]) -> dict[str, object]:
        """A mapping whose own name is secret, such as `cookies`: so is everything in it."""
        return {key: self.value(key if is_secret_name(key) else name, entry) for key, entry in entries.items()}

    def named(self, value: str) -> str:
        if not value or value == MASK:
            return value
        self.found.append(value)
        scheme, _, rest = value.partition(" ")
        if rest and scheme.lower() in ("bearer", "basic", "token"):
            self.found.append(rest)
        return MASK

    def text(self, text: str) -> str:
        for form in sorted({form for secret in self.secrets for form in written_forms(secret)}, key=len, reverse=True):
            text = text.replace(form, MASK)
        if len(text) < 4:  # the shortest is "pwd="
            return text
        for pattern, replace in _RULES:
            text = pattern.sub(lambda match, replace=replace: self.replaced(match, *replace(match)), text)
        return text

    def replaced(self, match: re.Match[str], before: str, secret: str, after: str) -> str:
        whole = match.group()
        if not secret or secret == MASK:
            return whole
        self.found += {secret, unquote(secret)}
        return f"{before}{MASK}{after}"


def _simple(match: re.Match[str]) -> tuple[str, str, str]:
    """Everything between the groups is the secret."""
    groups = match.groups()
    before = groups[0] if groups else ""
    after = groups[1] if len(groups) > 1 else ""
    return before, match.group()[len(before) : len(match.group()) - len(after)], after


def _web_user(match: re.Match[str]) -> tuple[str, str, str]:
    """Both parts of `user:password`: services take a token as either."""
    user, colon, password = match.group()[len(match.group(1)) : -1].partition(":")
    if set(user + password) <= {"*"}:
        return "", "", ""
    return f"{match.group(1)}{MASK}:" if colon else match.group(1), password or user, "@"


def _whole(match: re.Match[str]) -> tuple[str, str, str]:
    return "", match.group(), ""


def _line(match: re.Match[str]) -> tuple[str, str, str]:
    """A header in quotes ends with them; `cookies: none` is prose."""
    before = match.string[match.start() - 12 : match.start()] if match.start() > 12 else match.string[: match.start()]
    opening = re.search(r"[\"'](?=[\w-]*$)", before)
    value = match.group(2)
    end = value.find(opening.group()) if opening is not None and opening.group() in value else len(value)
    is_prose = _NO_SECRET.fullmatch(value) or (_PROSE.match(value) and "=" not in value)
    return ("", "", "") if is_prose else (match.group(1), value[:end], value[end:])


def _placed(match: re.Match[str]) -> tuple[str, str, str]:
    before, value = match.groups()
    return ("", "", "") if value.startswith(MASK) or _NO_SECRET.fullmatch(value) else (before, value, "")


def _flag(match: re.Match[str]) -> tuple[str, str, str]:
    value = match.group(2)
    if _NO_SECRET.fullmatch(value) or value.startswith("-"):
        return "", "", ""
    bare = value.removeprefix("b") if value[1:2] in ("'", '"') else value
    quotes = bare[0] if bare[0] in "\"'" else ""
    return match.group(1) + value[: len(value) - len(bare)] + quotes, bare.strip("\"'"), quotes


def _assigned(match: re.Match[str]) -> tuple[str, str, str]:
    name, opening, closing, bare = match.groups()
    if (bare or "").startswith(MASK):
        return "", "", ""
    if bare is None:
        ends = match.group().endswith(closing) and len(match.group()) >= len(name) + len(opening) + len(closing)
        after = closing if ends else ""
        value = match.group()[len(name) + len(opening) : len(match.group()) - len(after)]
        return ("", "", "") if _NO_SECRET.fullmatch(value) else (name + opening, value, after)
    rest = match.string[match.end() : match.end() + 3]
    says = bool(_PROSE.fullmatch(bare) and name.endswith(" ") and _WORD_FOLLOWS.match(rest))
    return ("", "", "") if says or _NO_SECRET.fullmatch(bare) else (name, bare, "")


_RULES = (
    (_PEM, _whole),
    (_WEB_USER, _web_user),
    (_URL_PASSWORD, _simple),
    (_QUERY, _simple),
    (_QUOTED_USER, _simple),
    (_LISTED, _simple),
    (_LINE, _line),
    (_CURL_USER, _simple),
    (_FLAG, _flag),
    (_ASSIGNED, _assigned),
    (_BEARER, _simple),
    *((pattern, _placed) for pattern in _PLACES),
    (_FORMS, _whole),
)
"""Patterns, and how to split what each finds into what stays, the secret, and what stays."""
