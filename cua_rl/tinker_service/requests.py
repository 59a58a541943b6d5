"""Parses the bodies of requests to a model, when they arrive and when they are repeated after a restart."""

from collections.abc import Mapping
from dataclasses import dataclass

from cua_rl.host.request_limits import RequestRefused, parse_json
from cua_rl.tinker_service.data import Pass, Reader, read_optim
from cua_rl.tinker_service.messages import Fields
from cua_rl.training.config import OptimConfig

MAX_SEQ = 2**31 - 1
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
MODEL_ID = r"[0-9a-f]{32}:train:[0-9]{1,9}"
CHECKPOINT_PATH = rf"tinker://{MODEL_ID}/(weights|sampler_weights)/{NAME}"
_TEN_YEARS_S = 10 * 366 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Begin with fresh weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Continue from a checkpoint."""

    path: str
    with_optimizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Save a checkpoint: the state to train on from, or what the sampler loads."""

    for_sampler: bool
    name: str | None
    """None: after the number of the request."""
    sampler_number: int | None
    """Of the sampling session for which alone the weights are saved; None for a checkpoint with a name."""
    is_inflight: bool
    overwrites: bool
    ttl_s: int | None
    user_metadata: Mapping[str, object] | None


Work = Create | Load | Save | Pass | OptimConfig


def read_work(kind: str, body: bytes, reader: Reader) -> Work:
    """The work of a request of this kind; raises `RequestRefused`."""
    if kind == "forward_backward":
        return reader.read_pass(body)
    fields = Fields.of(parse_json(body))
    match kind:
        case "create_model":
            return Create()
        case "load_weights":
            fields.refuse_other("weights_access_token")
            path = fields.text("path", pattern=CHECKPOINT_PATH)
            if "/sampler_weights/" in path:
                raise RequestRefused(400, f"expected a path of save_state to train on from, got {path!r}")
            return Load(path=path, with_optimizer=fields.yes("optimizer", False))
        case "save_weights" | "save_weights_for_sampler":
            return _read_save(fields, for_sampler=kind == "save_weights_for_sampler")
        case _:
            return read_optim(fields)


def _read_save(fields: Fields, *, for_sampler: bool) -> Save:
    name = fields.optional_text("path", pattern=NAME)
    number = fields.optional_whole("sampling_session_seq_id", 0, MAX_SEQ)
    if for_sampler and (name is None) == (number is None):
        raise RequestRefused(400, "expected a path or a sampling_session_seq_id, got both or none")
    kind = fields.optional_text("kind", pattern="snapshot|inflight")
    return Save(
        for_sampler=for_sampler,
        name=name,
        sampler_number=number if for_sampler else None,
        is_inflight=kind == "inflight",
        overwrites=not for_sampler and fields.yes("overwrite", False),
        ttl_s=read_ttl(fields),
        user_metadata=fields.labels(),
    )


def read_ttl(fields: Fields) -> int | None:
    """Seconds that a checkpoint is kept; None for ever."""
    return fields.optional_whole("ttl_seconds", 1, _TEN_YEARS_S)
