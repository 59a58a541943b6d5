"""Lets checkpoints answer a recorded turn: what they answer, and the log-probability of the recorded answer.

The prompt goes out as the tokens and screenshots that were recorded, so nothing is rendered again.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from math import fsum
from pathlib import Path
from typing import Any, cast, get_args

import chz
from sqlalchemy import select

from cua_rl.agent.action_format import ScreenAnswer
from cua_rl.agent.device_step import cursor_after
from cua_rl.command_line.fields import check_numbers, setting, with_values
from cua_rl.command_line.plain_config import stored_setting
from cua_rl.database.analysis_models import Analysis
from cua_rl.database.models import Eval, Group, RolloutRow, Step
from cua_rl.database.rebuild import load_rollouts
from cua_rl.environments.device import DeviceKind
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.openai_items import Conversation, conversation_from_responses
from cua_rl.renderers.renderer import Renderer
from cua_rl.reporting.asked import Answer, AskedTurn, CheckpointAnswers
from cua_rl.reporting.progress import starting
from cua_rl.run.evaluation_config import EvaluateConfig
from cua_rl.run.prepared_evaluation import LocalModel, prepare_engine
from cua_rl.run.rollouts import make_format, make_servers, start_together
from cua_rl.run_folder.checkpoints import find_saved, load_adapter_folder
from cua_rl.run_folder.earlier_attempt import is_same_model
from cua_rl.run_folder.log_directory import load_settings, read_checkpoints
from cua_rl.run_folder.recorded_run import TAKEN_OVER, RecordedTraining, find_rollout_id
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.gateway import read_answer
from cua_rl.sampling.generation import GENERATE_PATH, GenerateParams, score_answer
from cua_rl.sampling.openai_answers import Answer as ModelAnswer
from cua_rl.sampling.openai_answers import response_object
from cua_rl.types.actions import Finish
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import AdapterRef, Rollout, SamplingParams

BASE = "base"
"""Names the model without an adapter."""


@chz.chz
class AskedRun:
    """A recorded run and a server of its base model: the settings that recipes which query its checkpoints share."""

    log_path: Path = chz.field(doc="folder of a run of recipes.train")
    model_name: str | None = setting(None, "base model, a folder or hub id, if it is not where the run found it")
    base_url: str | None = setting(
        None, "URL of a running vLLM server (with runtime LoRA updating) of the base model; None starts one"
    )
    server: ServerConfig = chz.field(default_factory=ServerConfig)

    @chz.validate
    def _numbers_make_sense(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recorded rollout, and how it was sampled."""

    rollout: Rollout
    params: SamplingParams
    settings: Mapping[str, Any]
    """With which the run sampled it."""

    def places(self, number: int | None) -> Sequence[int]:
        """The index of the turn of this number, or of all; raises `ConfigError` if it cannot be asked about."""
        turns = self.rollout.turns
        places = range(len(turns)) if number is None else [number - 1]
        if not (places and all(0 <= place < len(turns) and not turns[place].model.grammar for place in places)):
            free = [turn.index + 1 for turn in turns if not turn.model.grammar]
            raise ConfigError(
                f"turn: expected one of the {len(turns)} turns of rollout {self.rollout.rollout_id!r} whose answers "
                f"were sampled without a grammar, {free}, got {number}; choose one of these, or another rollout"
            )
        return places


async def load_recorded(run: RecordedTraining, given: str) -> Recorded:
    """The rollout whose id begins with `given`; raises `ConfigError` if there is none, or its screenshots are gone."""
    rollout_id = await find_rollout_id(run.session, run.key, given)
    query = select(Step.step, Eval.step).select_from(RolloutRow).join(Group, RolloutRow.group_pk == Group.id)
    query = query.outerjoin(Step, Group.step_id == Step.id).outerjoin(Eval, Group.eval_id == Eval.id)
    mine = RolloutRow.training_id == run.key, RolloutRow.rollout_id == rollout_id
    place = (await run.session.execute(query.where(*mine))).one()
    step, eval_step = cast("tuple[int | None, int]", tuple(place))  # of an outer join: the one that it belongs to
    found = await load_rollouts(run.session, run.key, [rollout_id])
    if not found:
        raise ConfigError(f"rollout_id: expected a rollout with its screenshots, got {given!r}, which was pruned")
    settings = run.settings_at(eval_step + 1 if step is None else step)
    if "max_tokens" not in settings:
        raise ConfigError(
            f"log_path: expected a run that sampled its rollouts, got {str(run.folder)!r}, which was imported; choose "
            "another"
        )
    temperature = stored_setting(settings, "evaluation.eval_temperature") if step is None else None
    temperature = settings["temperature"] if temperature is None else temperature
    params = SamplingParams(max_tokens=settings["max_tokens"], temperature=float(temperature))
    return Recorded(rollout=found[0], params=params, settings=settings)


def find_models(run: RecordedTraining, names: Sequence[str], base: Path) -> list[LocalModel]:
    """The base model and checkpoints of these names; of none, the base model and every checkpoint of the run.

    A name is `base`, a step of the run, or what an evaluation takes as an adapter. Raises `ConfigError` for a
    checkpoint that is not there, or is one of another base model.
    """
    models: list[LocalModel] = []
    for name in dict.fromkeys(names or (BASE, *(str(each.step) for each in read_checkpoints(run.folder)))):
        adapter, label = None, f"step {int(name)}" if name.isdecimal() else name
        if name != BASE:
            path = find_saved(f"{run.folder}@{name}" if name.isdecimal() else name, "sampler_weights")
            _require_fitting(run, name, path)
            adapter = load_adapter_folder(path, base)
        models.append(LocalModel(name=label, model_name=str(base), model_path=base, adapter=adapter))
    return models


def _require_fitting(run: RecordedTraining, name: str, path: Path) -> None:
    owner = path.parent.parent
    if not path.is_dir():
        raise ConfigError(
            f"checkpoints: expected {BASE} or checkpoints that are kept, in {owner} those of the steps "
            f"{[each.step for each in read_checkpoints(owner)]}, got {name!r}, which was pruned or never saved; choose "
            "among these"
        )
    if (owner / "config.json").is_file():
        both = run.settings, load_settings(owner, name)
        was, other = (Path(str(each.get("model_name") or TINY_QWEN3_VL)).name for each in both)
        if not is_same_model(was, other):
            raise ConfigError(
                f"checkpoints: expected those of the run's base model {was!r}, got {name!r} of {other!r}; choose others"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """A model server with a run's base model, which loads checkpoints beside each other as they are asked."""

    run: RecordedTraining
    client: SamplingClient
    renderer: Renderer

    async def ask(self, recorded: Recorded, place: int, models: Sequence[LocalModel], num_samples: int) -> AskedTurn:
        """Ask models about a turn; raises `SamplingError` if no server answers."""
        turn, temperature = recorded.rollout.turns[place], recorded.params.temperature
        given = turn.model
        return AskedTurn(
            rollout_id=recorded.rollout.rollout_id,
            turn=place + 1,
            policy_version=given.policy_version,
            temperature=temperature,
            recorded=self._read(recorded, place, given.sampled_tokens, given.sampling_logprobs, given.stop),
            checkpoints=[await self._ask_one(recorded, place, model, num_samples) for model in models],
            seen=turn.agent.before,
        )

    async def _ask_one(self, recorded: Recorded, place: int, model: LocalModel, num_samples: int) -> CheckpointAnswers:
        given, adapter = recorded.rollout.turns[place].model, adapter_of(model)
        limits, image_token_id = conversation_of(given.request).limit(recorded.params), self.run.image_token_id
        params = GenerateParams(
            n=num_samples, temperature=limits.temperature, max_tokens=limits.max_tokens, stop_strings=limits.stops
        )
        generated = await self.client.generate(given.prompt, params, image_token_id=image_token_id, adapter=adapter)

        async def post(request: Mapping[str, object]) -> Mapping[str, object]:
            return (await self.client.respond(GENERATE_PATH, request, adapter=adapter))[0]

        answer = given.sampled_tokens
        logprobs = await score_answer(post, given.prompt, answer, limits.temperature, image_token_id)
        gaps = [abs(one - other) for one, other in zip(logprobs, given.sampling_logprobs, strict=True)]
        return CheckpointAnswers(
            name=model.name,
            is_own=_sampled(self.run, model, given.policy_version),
            logprobs=logprobs,
            mean_abs_gap=fsum(gaps) / len(gaps),
            samples=tuple(
                self._read(recorded, place, one.tokens, one.logprobs, one.stop_reason) for one in generated.sequences
            ),
        )

    def _read(
        self, recorded: Recorded, place: int, tokens: Sequence[int], logprobs: Sequence[float], stop: str
    ) -> Answer:
        """An answer to a turn as the run's agent reads it, on whatever kind of device it can be read."""
        turn, asked = recorded.rollout.turns[place], conversation_of(recorded.rollout.turns[place].model.request)
        text, parsed = read_answer(self.renderer, tokens, asked.tools, asked.stops)
        made = replace(turn.model, text=text, stop=stop)
        answer = ModelAnswer(turn=made, parsed=parsed, model=BASE, num_prompt_tokens=0, num_sampled_tokens=0)
        earlier = [action for turn in recorded.rollout.turns[:place] for action in turn.agent.actions]
        cursor = next(filter(None, map(cursor_after, reversed(earlier))), None)
        name, actions, done = stored_setting(self.run.settings, "agent.action_format"), (), text
        seen = turn.agent.before
        for kind in get_args(DeviceKind):
            if seen is None:
                break
            shown = ScreenAnswer(
                response=response_object(answer, {}), turn=place + 1, kind=kind, seen=seen, cursor=cursor
            )
            match make_format(name, self.renderer.image_settings).parse(shown):
                case tuple() as actions:
                    done = ", ".join(map(repr, actions))
                case Finish() as end:
                    done = repr(end)
                case _:
                    continue
            break
        return Answer(text=text, done=done, actions=actions, logprobs=tuple(logprobs))


def adapter_of(model: LocalModel) -> AdapterRef | None:
    """A checkpoint's adapter, by a name that no other folder has; None for the base model."""
    if model.adapter is None:
        return None
    path, name = model.adapter.path, f"ask.{sha256(bytes(model.adapter.path)).hexdigest()[:12]}"
    return AdapterRef(path=path, policy_version=model.adapter.policy_version, model=name)


async def save_answers(run: RecordedTraining, asked: Sequence[AskedTurn]) -> None:
    """Record the answers in the run's database, where the monitor finds them."""
    mine = select(RolloutRow.id).where(RolloutRow.training_id == run.key)
    for one in asked:
        rollout_pk = await run.session.scalar(mine.where(RolloutRow.rollout_id == one.rollout_id))
        result = one.as_json()
        run.session.add(
            Analysis(training_id=run.key, kind="answers", rollout_pk=rollout_pk, turn_index=one.turn - 1, result=result)
        )
    await run.session.commit()


def conversation_of(request: Mapping[str, object]) -> Conversation:
    """What a request says of its answer; agents that speak another API read their answers in their own way."""
    names = ("tools", "stop", "max_output_tokens") if "input" in request else ()
    return conversation_from_responses({name: request[name] for name in names if name in request})


def _sampled(run: RecordedTraining, model: LocalModel, version: int) -> bool:
    """Whether this model is the policy of this version, of which rollouts that were taken over know nothing."""
    if TAKEN_OVER in run.settings:
        return False
    if model.adapter is None:
        return version == 0 and run.settings.get("load_checkpoint_path") is None
    steps = {row.step for row in run.steps if row.trained_policy_version == version}
    steps |= {0} if version == 0 else set[int]()
    return model.adapter.path in [run.folder.absolute() / "sampler_weights" / f"{step:06d}" for step in steps]


@asynccontextmanager
async def open_questions(
    run: RecordedTraining, recorded: Recorded, models: Sequence[LocalModel], server: ServerConfig, base_url: str | None
) -> AsyncGenerator[Questions]:
    """Serve the models' base model as the run served it, or use the server at `base_url`."""
    base, names = models[0].model_path, ("max_pixels", "max_model_len", "dtype")
    max_pixels, max_model_len, dtype = (stored_setting(run.settings, f"server.{name}") for name in names)
    wanted = with_values(
        server,
        max_pixels=max_pixels,
        max_model_len=server.max_model_len or max_model_len,
        dtype=dtype if dtype and server.dtype == "auto" else server.dtype,
    )
    config = EvaluateConfig(
        model_name=str(base),
        base_url=base_url,
        max_tokens=recorded.params.max_tokens,
        renderer_name=run.settings.get("renderer_name"),
        server=wanted,
    )
    engine = prepare_engine(base, config, models)
    planned = stored_setting(run.settings, "server.max_images") or 1  # a rollout may go on further than this one
    max_images = max(planned, *(len(turn.model.prompt.images) for turn in recorded.rollout.turns))
    servers = make_servers(base_url, with_values(engine.server, max_images=max_images), run.folder / "answers")
    async with AsyncExitStack() as stack:
        async with starting(f"model server for {base.name}", partial(print, flush=True)):
            await start_together(stack, *servers)
        client = await stack.enter_async_context(SamplingClient(*servers, max_adapters=server.max_adapters))
        try:
            yield Questions(run=run, client=client, renderer=engine.renderer)
        finally:
            for replica in client.replicas:  # others may use the server
                await replica.unload_all_but(())
