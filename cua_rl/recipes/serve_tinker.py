"""Serve a model to programs that use the Tinker SDK: `python -m cua_rl.recipes.serve_tinker model_name=...`.

They set TINKER_BASE_URL to the address that is printed, and TINKER_API_KEY to the key (docs/tinker.md). The service
runs trainer, model server and database; started again with the same folder, it goes on where it was.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import chz
from starlette.types import ASGIApp, Receive, Scope, Send

from cua_rl.command_line.fields import check_numbers, setting, with_values
from cua_rl.command_line.plain_config import find_stored, plain_config
from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.session import find_database, make_engine
from cua_rl.host.http_server import serve_app
from cua_rl.host.processes import freeze_loaded_objects
from cua_rl.machine.gpus import require_platform
from cua_rl.machine.machine import find_machine
from cua_rl.machine.memory_parts import Request
from cua_rl.machine.memory_plan import MemoryBudget
from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.renderers.images import largest_image_tokens
from cua_rl.renderers.renderer import Renderer
from cua_rl.run.prepared_training import check_trainer
from cua_rl.run.recording import start_database
from cua_rl.run.reporting import open_run_log
from cua_rl.run.resolve import plan_trainer, rounding_limit
from cua_rl.run.rollouts import make_servers, start_engines
from cua_rl.run.trainer_nodes import open_trainer
from cua_rl.run.training import prove_adapters
from cua_rl.run_folder.log_directory import LogDirectory, prepare_log_directory, run_folder
from cua_rl.run_folder.model_folder import (
    fetch_weights,
    find_max_model_len,
    find_model,
    make_image_renderer,
    pinned_name,
    repository_of,
    require_trainable,
)
from cua_rl.sampling.canary import require_canary_room
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.config import ServerConfig, max_lora_rank
from cua_rl.sampling.vllm_command import installed_platform
from cua_rl.tinker_service.app import ServedModel, Service
from cua_rl.tinker_service.data import Reader
from cua_rl.tinker_service.listings import Listings
from cua_rl.tinker_service.models import Models
from cua_rl.tinker_service.places import Trained
from cua_rl.tinker_service.sampling import Samplers
from cua_rl.tinker_service.store import Store, make_key
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LoraSpec, TrainerConfig
from cua_rl.types.errors import ConfigError

KEY_VARIABLE = "TINKER_API_KEY"
_SHORTEST_KEY = 16


@chz.chz
class ServeTinkerConfig:
    """Serve a model to programs that use the Tinker SDK."""

    model_name: str | None = setting(None, "folder or hub id of the model; None uses the included tiny model")
    host: str = setting("127.0.0.1", "address to listen on; nothing is encrypted: beyond loopback, use a proxy")
    port: int = setting(8300, "port to listen on, 0 for a free one", at_least=0)
    new_key: str | None = setting(
        None, "make and print a key with this name; the first one is made without it, unless TINKER_API_KEY is set"
    )
    lora_rank: int = setting(32, "largest rank of an adapter", at_least=1)
    max_models: int = setting(
        4, "maximum models in the trainer at a time; another one displaces the least recently used", at_least=1
    )
    log_path: str | None = setting(
        None, "folder of the service, with its checkpoints; None is a folder in ./runs named after the model"
    )
    base_url: str | None = setting(None, "addresses of running model servers (docs/more_machines.md)")
    server: ServerConfig = chz.field(default_factory=ServerConfig)
    trainer: TrainerConfig = chz.field(default_factory=TrainerConfig)

    @chz.validate
    def _numbers_make_sense(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A configuration without open choices."""

    config: ServeTinkerConfig
    folder: Path
    renderer: Renderer
    memory: MemoryBudget
    database_url: str | None
    """None for the embedded database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The trainer as the service sees it."""

    trainer: TrainingClient
    config: TrainerConfig

    async def create_model(self, name: str, *, rank: int, seed: int) -> Trained:
        spec = LoraSpec(rank=rank, alpha=self.config.lora_alpha, modules=self.config.lora_modules, seed=seed)
        await self.trainer.create_model(name, spec)
        return self.trainer.model(name)

    async def drop_model(self, name: str) -> None:
        await self.trainer.drop_model(name)

    async def revive(self) -> None:
        await self.trainer.trainer_metrics()  # it is started again for any request


async def cli_main(config: ServeTinkerConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Serve until interrupted."""
    key = environ.get(KEY_VARIABLE) or None
    if key is not None and len(key) < _SHORTEST_KEY:
        raise ConfigError(f"{KEY_VARIABLE}: expected at least {_SHORTEST_KEY} characters, got {len(key)}; unset it")
    prepared = await prepare(config, environ)
    print(prepared.memory.table(), file=sys.stderr)
    await asyncio.to_thread(fetch_weights, prepared.config.model_name, prepared.config.server.model_path)
    with prepare_log_directory(prepared.folder, "resume") as folder:
        settings = plain_config(prepared.config)
        if folder.config_path.exists():
            require_same_models(json.loads(folder.config_path.read_text(encoding="utf-8")), settings)
        folder.write_config(settings)
        async with AsyncExitStack() as stack:
            open_run_log(stack, folder)
            await _serve(stack, prepared, folder, key)


def require_same_models(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise `ConfigError` for settings with which the models in the folder would be others."""
    for name in ("model_name", "trainer.lora_alpha", "trainer.lora_modules"):
        (_, was), (_, wanted) = find_stored(before, name), find_stored(now, name)
        if was != wanted:
            raise ConfigError(
                f"{name}: expected {was!r}, as when the models in log_path were made, got {wanted!r}; keep it, or "
                "choose another log_path"
            )


async def prepare(config: ServeTinkerConfig, environ: Mapping[str, str]) -> Prepared:
    """Resolve the configuration; raises `ConfigError` before a model is loaded."""
    model_path = find_model(config.model_name)
    config = with_values(config, model_name=pinned_name(config.model_name, model_path))
    require_trainable(model_path, config.lora_rank, config.trainer.lora_modules)
    check_trainer(config.trainer, environ)
    max_model_len = find_max_model_len(model_path, config.server.max_model_len, max_tokens=1)
    renderer = make_image_renderer(model_path, None, config.server.max_pixels)
    require_canary_room(renderer, max_model_len)
    server = with_values(
        config.server,
        model_path=model_path,
        max_model_len=max_model_len,
        max_lora_rank=max_lora_rank(config.lora_rank),
        adapts_vision=config.trainer.adapts_vision,
    )
    trainer = with_values(
        config.trainer, model_path=model_path, lora_rank=config.lora_rank, max_pixels=config.server.max_pixels
    )
    memory = plan_trainer(
        Request(
            model=load_model_sizes(model_path),
            machine=find_machine(None, environ, is_dry_run=False),
            server=server,
            trainer=trainer,
            has_server=config.base_url is None,
            context_tokens=max_model_len,
            largest_image_tokens=largest_image_tokens(model_path, config.server.max_pixels),
        )
    )
    if config.base_url is None:
        require_platform(memory.gpus, installed_platform())
    name = "tiny" if config.model_name is None else repository_of(Path(config.model_name).name)
    return Prepared(
        config=with_values(config, server=memory.fill_server(server), trainer=memory.fill_trainer(trainer)),
        folder=run_folder(config.log_path, None, f"tinker-{name}"),
        renderer=renderer,
        memory=memory,
        database_url=await find_database(environ),
    )


async def _serve(stack: AsyncExitStack, prepared: Prepared, folder: LogDirectory, key: str | None) -> None:
    config = prepared.config
    app: asyncio.Future[ASGIApp] = asyncio.get_running_loop().create_future()
    serving = await stack.enter_async_context(AsyncExitStack())
    address = await serving.enter_async_context(serve_app(once_there(app), config.host, config.port, grace_s=1))
    engine = make_engine(await start_database(stack, prepared.database_url, folder.path), pool_size=10)
    stack.push_async_callback(engine.dispose)
    store = Store(engine)
    told = await admit_keys(store, key, config.new_key)
    opened = await open_service(stack, prepared, folder.path, store)
    stack.push_async_callback(serving.aclose)  # before what it serves with
    app.set_result(opened.service.app())
    name = opened.service.served.name
    print(f"TINKER_BASE_URL={address}", *told, f"base model: {name}", sep="\n", flush=True)
    await opened.end()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A service that carries out requests, and the engines behind it."""

    service: Service
    trainer: TrainingClient
    sampler: SamplingClient
    working: asyncio.Task[None]
    """Ends only with an error."""

    async def end(self) -> None:
        """Wait until requests or samples cannot be carried out any more, and raise why."""
        given_up = asyncio.create_task(self.sampler.until_given_up(), name="model-servers")
        try:
            done, _ = await asyncio.wait((self.working, given_up), return_when=asyncio.FIRST_COMPLETED)
            await done.pop()
        finally:
            given_up.cancel()


async def open_service(stack: AsyncExitStack, prepared: Prepared, folder: Path, store: Store) -> Opened:
    """Start trainer and model servers, and take up what an earlier process has left in folder and store."""
    config, model_path = prepared.config, prepared.config.server.model_path
    trainer, sampler = await _start_engines(stack, prepared, folder)
    image_settings = prepared.renderer.image_settings
    assert image_settings is not None, "other renderers have been refused"
    reader = Reader(
        image_settings=image_settings,
        image_token_id=prepared.renderer.image_token_id,
        vocab_size=load_model_sizes(model_path).vocabulary,
        max_tokens=sampler.max_model_len,
        decode=prepared.renderer.decode,
    )
    name = base_model_name(config.model_name, model_path)
    host = Host(trainer=trainer, config=config.trainer)
    models = Models(host, store, reader, folder, base_model=name, max_models=config.max_models)
    await models.load()
    samplers = Samplers(sampler, store, reader, name)
    stack.push_async_callback(samplers.close)
    served = ServedModel(name=name, max_tokens=sampler.max_model_len, max_lora_rank=config.lora_rank)
    service = Service(
        served=served,
        store=store,
        models=models,
        samplers=samplers,
        keys=await store.keys(),
        listings=Listings(store=store, base_model=name),
    )
    working = asyncio.create_task(models.run(), name="models")
    stack.push_async_callback(_end, working)
    freeze_loaded_objects()
    return Opened(service=service, trainer=trainer, sampler=sampler, working=working)


def once_there(app: asyncio.Future[ASGIApp]) -> ASGIApp:
    """An app whose requests wait for another one: where nobody listens, the SDK gives many requests up after a minute,
    less than a service may take to be started again.
    """

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await (await asyncio.shield(app))(scope, receive, send)

    return wait


def base_model_name(model_name: str | None, model_path: Path) -> str:
    """What clients call the model, and load its tokenizer from: its id on the hub without a revision, or its folder."""
    if model_name is None or Path(model_name).expanduser().exists():
        return str(model_path)
    return repository_of(model_name)


async def _start_engines(
    stack: AsyncExitStack, prepared: Prepared, folder: Path
) -> tuple[TrainingClient, SamplingClient]:
    """Start trainer and model servers, and verify that these apply adapters."""
    config, logs = prepared.config, folder / "logs"
    servers = make_servers(config.base_url, config.server, logs)
    trainer = await open_trainer(stack, config.trainer, config.model_name, logs / "trainer.log")
    await start_engines(stack, servers, trainer, is_shared=prepared.memory.gpus.is_shared)
    sampler = await stack.enter_async_context(SamplingClient(*servers, max_adapters=config.server.max_adapters))
    limit = rounding_limit(config)
    await prove_adapters(trainer, sampler, config.trainer, prepared.renderer, limit, folder / "probe")
    return trainer, sampler


async def _end(working: asyncio.Task[None]) -> None:
    working.cancel()
    await asyncio.wait([working])


async def admit_keys(store: Store, given: str | None, new_key: str | None) -> list[str]:
    """Let in the key of the environment, and a new one if it is asked for or the first; what to print of it."""
    if given is not None:
        await store.add_key("environment", given)
    if new_key is None and await store.keys():
        return [f"the key is {KEY_VARIABLE}, or an earlier one; new_key=NAME makes another"]
    key = make_key()
    await store.add_key(new_key or "first", key)
    return [f"{KEY_VARIABLE}={key}", "The key is shown only once; its hash is stored."]


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit status."""
    return run_recipe(ServeTinkerConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())
