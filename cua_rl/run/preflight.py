"""Checks before a run starts: packages, programs, servers, and whether all turns fit into the model's context.

They load and download nothing, and every request to a server has a short timeout; a resumed run waits for its servers.
"""

import asyncio
import base64
import logging
import os
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from io import BytesIO
from typing import Any, TypeVar

import httpx
from PIL import Image

from cua_rl.agent.history import dropped_at_once
from cua_rl.agent.mini_agent import DEFAULT_BASE_URL
from cua_rl.agent.tools import load_system_prompt, tool_for
from cua_rl.command_line.fields import with_values
from cua_rl.database.session import check_connection, database_url, shown_url
from cua_rl.environments.device import Screen
from cua_rl.host.users import computing_environment
from cua_rl.machine.prefix_cache import RolloutShape
from cua_rl.monitor.sender import MonitorAddress
from cua_rl.renderers.images import num_image_tokens
from cua_rl.renderers.renderer import Renderer
from cua_rl.reporting.step_line import format_duration
from cua_rl.run.devices import PreparedDevices
from cua_rl.run.rollout_config import AgentSettings, RolloutConfig
from cua_rl.sampling.address import API_KEY_VARIABLE, server_addresses
from cua_rl.sampling.server import ask_model_server
from cua_rl.sampling.vllm_command import require_vllm
from cua_rl.types.conversation import EncodedImage, Message, TextPart
from cua_rl.types.errors import ConfigError, DatabaseError, SamplingError

logger = logging.getLogger(__name__)

AnyRollouts = TypeVar("AnyRollouts", bound=RolloutConfig)

QUESTION_TIMEOUT_S = 2.0
_ANSWER_S, _MAX_ANSWER_BYTES = 10.0, 2**20
_USUAL_ANSWER_TOKENS = 200  # a thought and a call
_FEWEST_IN_BLOCKS = 2
_EMPTY_BATCH_REFUSED = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
_PROBE_SIDE_PX = 64
_PHONE_TOKENS = 2550  # a screenshot of 1080x2400
_LARGE_SCREEN = (1080, 2400)  # larger than the limits of common settings
_PLENTY_OF_IMAGES = 32


def most_screenshots(config: RolloutConfig, num_turns: int) -> int:
    """Maximum number of screenshots in a prompt of the built-in agent: one per turn, less those dropped."""
    return num_turns if config.agent.history in (None, "full") else min(num_turns, config.agent.history_images)


def rollout_shape(config: RolloutConfig, max_model_len: int, largest_image_tokens: int) -> RolloutShape:
    """The prompts of a rollout that takes all its turns, on the screens of a phone."""
    drops = {"full": config.max_turns, "last_n": 1, "block_drop": dropped_at_once(config.agent.history_images)}
    return RolloutShape(
        num_turns=config.max_turns,
        screen_tokens=min(_PHONE_TOKENS, largest_image_tokens),
        max_images=most_screenshots(config, config.max_turns),
        drop=drops[config.agent.history or "full"],
        context_tokens=max_model_len,
    )


def plan_max_images(config: RolloutConfig, num_turns: int) -> int:
    """Images per prompt that the model server must accept; raises `ConfigError` if fewer are configured.

    Other agents than the built-in one may send several per turn: the default for them is higher.
    """
    needed, configured = most_screenshots(config, num_turns), config.server.max_images
    if config.agent.name != "gbox":
        return configured or max(needed, _PLENTY_OF_IMAGES)
    if configured is not None and configured < needed:
        raise ConfigError(
            f"max_images: expected at least {needed}, the screenshots of {num_turns} turns, got {configured}; raise "
            "it, lower max_turns, or drop old screenshots with history=block_drop"
        )
    return configured or needed


def require_room(
    config: RolloutConfig, renderer: Renderer, screen: Screen, *, num_turns: int, max_model_len: int
) -> None:
    """Raise `ConfigError` if the last turn of a rollout cannot fit into the model's context.

    This is a lower bound: instructions and tools, screenshots, and the last answer, without earlier answers.
    """
    num_turns = min(num_turns, config.max_turns)
    num_images = most_screenshots(config, num_turns)
    none, one = (_prompt_tokens(renderer, screen, num_images=number) for number in (0, 1))
    needed = none + num_images * (one - none) + config.max_tokens
    if needed > max_model_len:
        raise ConfigError(
            f"max_model_len: expected at least {needed} tokens for {num_turns} turns (instructions {none}, "
            f"{num_images} screenshots of at least {one - none}, an answer of max_tokens={config.max_tokens}, and "
            f"earlier answers on top), got {max_model_len}; raise max_model_len, lower max_turns, or drop old "
            "screenshots with history=block_drop"
        )


def choose_history(
    config: AnyRollouts, screen: Screen | None, models: Sequence[tuple[Renderer, int]], num_turns: int
) -> AnyRollouts:
    """The configuration with a history: as configured, else full if all turns fit, else as many screenshots as fit.

    `screen` is the device's usual one, None for agents that take their own screenshots; `models` are renderers and
    context lengths.
    """
    agent = config.agent
    if agent.history is not None:
        return config
    chosen = with_values(agent, history="full")
    for renderer, max_model_len in models:
        if screen is None:
            break
        none, one = (_prompt_tokens(renderer, screen, num_images=number) for number in (0, 1))
        answers = num_turns * min(config.max_tokens, _USUAL_ANSWER_TOKENS)
        num_fitting = (max_model_len - none - config.max_tokens - answers) // (one - none)
        if num_turns > num_fitting >= _FEWEST_IN_BLOCKS:
            num_images = min(agent.history_images, chosen.history_images, num_fitting)
            chosen = with_values(agent, history="block_drop", history_images=num_images)
            _say_dropped(num_turns, one - none, max_model_len, num_images)
    return with_values(config, agent=chosen)


def _say_dropped(num_turns: int, screen_tokens: int, max_model_len: int, num_images: int) -> None:
    logger.warning(
        "history=block_drop history_images=%d: %d turns, each with a screenshot of %d tokens, do not fit into "
        "max_model_len=%d, so the oldest screenshots are dropped in blocks; set history, max_model_len or max_turns to "
        "decide otherwise",
        num_images,
        num_turns,
        screen_tokens,
        max_model_len,
    )


async def prepare_prompts(
    config: AnyRollouts, devices: PreparedDevices, models: Sequence[tuple[Renderer, int]], num_turns: int
) -> tuple[AnyRollouts, int]:
    """The configuration with a history, and the number of images in the longest prompt, after checks of the models and
    servers that have to process it.

    `models` are renderers and context lengths.

    Raises:
        ConfigError: the prompt does not fit into a model's context, a server does not accept it, or the server of the
            agent does not answer.
    """
    config = choose_history(config, devices.usual_screen, models, num_turns)
    await require_agent_server(config.agent)
    if config.server.vllm_args and config.base_url is not None:
        raise ConfigError(
            f"server.vllm_args: expected none with base_url, whose server has been started already, got "
            f"{config.server.vllm_args!r}; leave them out"
        )
    await require_vllm_args(config.server.vllm_args, "server.vllm_args")
    max_images = plan_max_images(config, num_turns)
    for renderer, max_model_len in models:
        if devices.smallest_screen is not None:
            require_room(config, renderer, devices.smallest_screen, num_turns=num_turns, max_model_len=max_model_len)
        for address in server_addresses(config.vllm_url):
            await require_model_server(address, renderer, max_model_len=max_model_len, num_images=max_images)
    return config, max_images


async def wait_for_servers(config: RolloutConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Wait until the database and the model servers answer: they may be starting as the run is, on other machines.

    Raises:
        DatabaseError, SamplingError: one has not answered for ten minutes.
        ConfigError: an address cannot work, or something else answers there.
    """
    url, api_key = database_url(environ), environ.get(API_KEY_VARIABLE) or None
    if url is not None:
        await wait_until_it_answers(f"the database {shown_url(url)}", partial(check_connection, url))
    for address in server_addresses(config.vllm_url):

        async def ask(address: str = address) -> None:
            try:
                async with ask_model_server(address, api_key, QUESTION_TIMEOUT_S):
                    return
            except ConfigError as error:
                if isinstance(error.__cause__, httpx.TransportError):
                    raise SamplingError(str(error)) from error
                raise

        await wait_until_it_answers(f"the model server {address}", ask)


async def wait_until_it_answers(
    what: str,
    ask: Callable[[], Awaitable[None]],
    *,
    patience_s: float = 600.0,
    retry_s: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Ask again while a server is not there; says what is waited for at once, and every 30 s."""
    began, said = clock(), 0
    while True:
        try:
            return await ask()
        except (DatabaseError, SamplingError) as error:
            waited_s = clock() - began
            if waited_s > patience_s:
                raise
            if waited_s >= said * 30:
                print(f"waiting for {what}, {format_duration(waited_s)} so far: {error}", file=sys.stderr, flush=True)
                said = int(waited_s // 30) + 1
        await asyncio.sleep(retry_s)


async def require_model_server(base_url: str, renderer: Renderer, *, max_model_len: int, num_images: int) -> None:
    """Raise `ConfigError` unless the vLLM server there has this context length, accepts this many screenshots, and
    scales large ones as the renderer expects.
    """
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    async with ask_model_server(base_url, api_key, QUESTION_TIMEOUT_S) as (client, model):
        complaint = await _complaint_about(client, model.name, num_images)
        num_tokens = await _count_image_tokens(client, model.name, renderer.image_token_id)
    if model.max_model_len < max_model_len:
        raise ConfigError(
            f"max_model_len: expected at most {model.max_model_len}, the context of the server at {base_url!r}, got "
            f"{max_model_len}; lower it, or start that server with --max-model-len {max_model_len}"
        )
    if complaint is not None:
        raise ConfigError(
            f"base_url: expected a server that accepts the {num_images} screenshots of the longest prompt, got one at "
            f"{base_url!r} that says {complaint!r}; start it with --limit-mm-per-prompt '{{\"image\": {num_images}}}', "
            "lower max_turns, or drop old screenshots with history=block_drop"
        )
    settings = renderer.image_settings
    if num_tokens is None or settings is None:
        return
    expected = num_image_tokens(*_LARGE_SCREEN, settings)
    if num_tokens != expected:
        width_px, height_px = _LARGE_SCREEN
        raise ConfigError(
            f"server.max_pixels: expected a server that shows the model a screenshot of {width_px}x{height_px} pixels "
            f"in {expected} tokens, as this run does, got {num_tokens} from {base_url!r}; start it with "
            f"--mm-processor-kwargs '{{\"max_pixels\": {settings.max_pixels}}}', or set server.max_pixels to its limit"
        )


async def require_vllm_args(vllm_args: str, setting: str) -> None:
    """Raise `ConfigError` unless the installed vLLM takes these options; its own parser decides, in 10 to 40 s."""
    if not vllm_args:
        return
    problem = f"{setting}: expected options of vLLM's server, got {vllm_args!r}"
    try:
        words = shlex.split(vllm_args)
    except ValueError as error:
        raise ConfigError(f"{problem} ({error}); close the quotes") from None
    require_vllm()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cua_rl.vllm_arguments", *words),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=computing_environment(),
    )
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        reason = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f"{problem}; vLLM says: {reason}")


async def require_agent_server(agent: AgentSettings) -> None:
    """Raise `ConfigError` if the agent is a server and none answers at its address, whatever the answer."""
    setting, address = "agent.url", agent.url
    if agent.name == "mini_agent":
        setting, address = "agent.gbox_mini_agent_base_url", agent.gbox_mini_agent_base_url or DEFAULT_BASE_URL
    if address is None:
        return
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=QUESTION_TIMEOUT_S) as client:
            async with client.stream("GET", address):
                pass  # whatever it says, and however long
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"{setting}: expected a server that answers at {address!r}, got {type(error).__name__}: {error}; start it, "
            "or correct the address"
        ) from None


async def require_monitor(address: MonitorAddress) -> None:
    """Raise `ConfigError` unless a monitor answers there that knows the project's token."""
    headers = {"Authorization": f"Bearer {address.token}"}
    try:
        client = httpx.AsyncClient(
            headers=headers, trust_env=False, timeout=QUESTION_TIMEOUT_S, verify=httpx.create_ssl_context()
        )
        async with client:
            status, _ = await ask(client, "POST", address.ingest_url, json={})
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"monitor.base_url: expected a monitor that answers, got {type(error).__name__} {error} from "
            f"{address.base_url!r}; start it (python -m cua_rl.recipes.serve_monitor), or leave monitor.base_url out"
        ) from None
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise ConfigError(
            f"project_token: expected the token of a project of the monitor at {address.base_url!r}, got one that it "
            "does not know; make one there with create_project=NAME"
        )
    if not 200 <= status < 300 and status not in _EMPTY_BATCH_REFUSED:
        raise ConfigError(
            f"monitor.base_url: expected a monitor that accepts runs at {address.ingest_url!r}, got status {status}; "
            "check the address"
        )


async def ask(client: httpx.AsyncClient, method: str, address: str, **given: Any) -> tuple[int, bytes]:
    """Status and body of an answer, of which no more is waited for or kept than a question before a run needs.

    Redirects are not followed: the request has a key. Raises `httpx.HTTPError`.
    """
    body, plain = bytearray(), {"Accept-Encoding": "identity"}
    try:
        async with asyncio.timeout(_ANSWER_S), client.stream(method, address, headers=plain, **given) as answer:
            async for piece in answer.aiter_raw():
                body += piece
                if len(body) > _MAX_ANSWER_BYTES:
                    raise httpx.ReadError(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
    except TimeoutError:
        raise httpx.ReadTimeout(f"no whole answer in {_ANSWER_S:g} s") from None
    return answer.status_code, bytes(body)


def _prompt_tokens(renderer: Renderer, screen: Screen, *, num_images: int) -> int:
    image = EncodedImage(
        data=_blank_image(screen.width_px, screen.height_px),
        format="png",
        width_px=screen.width_px,
        height_px=screen.height_px,
    )
    content = (TextPart(text="."), *[image] * num_images)
    system = Message(role="system", content=(TextPart(text=load_system_prompt(screen.kind)),))
    items = (system, Message(role="user", content=content))
    return renderer.render(items, (tool_for(screen.kind),)).length


def _blank_image(width_px: int, height_px: int) -> bytes:
    buffer = BytesIO()
    Image.new("1", (width_px, height_px)).save(buffer, "PNG")
    return buffer.getvalue()


async def _complaint_about(client: httpx.AsyncClient, model: str, num_images: int) -> str | None:
    """The server's objection to this many images in one prompt; None if it has none, or is too busy to answer."""
    answer = await _tokenize(client, model, _blank_image(_PROBE_SIDE_PX, _PROBE_SIDE_PX), num_images)
    start = -1 if answer is None else answer.text.find("At most")
    if answer is None or answer.status_code != HTTPStatus.BAD_REQUEST or start < 0:
        return None
    return answer.text[start:].split('"')[0][:120]


async def _count_image_tokens(client: httpx.AsyncClient, model: str, image_token_id: int) -> int | None:
    """Tokens of a large screenshot in the server's prompts; None if it does not say, or is too busy to answer."""
    answer = await _tokenize(client, model, _blank_image(*_LARGE_SCREEN), 1)
    if answer is None or not answer.is_success:
        return None
    tokens: list[int] = answer.json()["tokens"]
    number = tokens.count(image_token_id)
    return number if number > 1 else None  # earlier versions of vLLM answer with one token per image


async def _tokenize(client: httpx.AsyncClient, model: str, image: bytes, number: int) -> httpx.Response | None:
    """The server's answer to a prompt with this image several times, for which it prepares images and computes nothing;
    None if it is too busy.
    """
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"}}
    parts: Sequence[dict[str, Any]] = [part] * number
    content = [*parts, {"type": "text", "text": "."}]
    try:
        return await client.post("/tokenize", json={"model": model, "messages": [{"role": "user", "content": content}]})
    except httpx.ReadTimeout:
        return None
