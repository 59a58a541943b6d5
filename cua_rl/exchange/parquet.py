"""A Hugging Face data set of rollouts: Parquet files with images, tokens, log-probabilities, versions and rewards.

    README.md              the data set's card, which names the files to `datasets`
    run.json               the run, its steps and evaluations
    data/train-00000.parquet

One row is one rollout. `images` are of the feature type `Image`; turns name them by their place. What has no column of
its own is JSON in the column `record`, so that importing gives back what was recorded.
Formats: https://huggingface.co/docs/datasets/about_dataset_features, https://parquet.apache.org/docs/file-format/.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from resource import RLIMIT_AS, getpagesize, setrlimit
from typing import Any, Self

from pybase64 import b64encode

from cua_rl.database.columns import escape_text
from cua_rl.exchange.rows import EncodedRecord, Row, decode_images, read_json, write_json
from cua_rl.types.codec import decode, encode
from cua_rl.types.errors import ConfigError

_ROWS_PER_FILE = 1000
_MAX_MEMORY_BYTES = 4 * 2**30  # several copies of a thousand screenshots of 1 MB
_TURN_NUMBERS = ("prompt_token_ids", "sampled_tokens", "sampling_logprobs", "training_logprobs", "policy_version")
"""What of a turn has columns; the rest is in `record`."""
_TOP = (
    *("rollout_id", "task_id", "seed", "phase", "step", "group_id", "member_index", "reward", "success", "advantage"),
    *("parent_id", "fork_turn"),  # turns before it are the parent's
)
_TOLD = tuple[str | None, str, tuple[bytes, ...], tuple[dict[str, object], ...]]
"""What the reader says: why it cannot read on, or the columns of a row: record, images, turns."""
Columns = tuple[str, Sequence[bytes], Sequence[Row]]
_MIND2WEB = ("annotation_id", "confirmed_task", "operation", "pos_candidates", "target_action_index")
_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
---
Rollouts of {run_name!r}, one per row: images, tokens, log-probabilities, policy versions and rewards.
`python -m cua_rl.recipes.import_trajectories` reads this folder back without loss.
"""


def require_pyarrow() -> None:
    """Raise `ConfigError` unless pyarrow is installed."""
    if find_spec("pyarrow") is None:
        raise ConfigError("expected pyarrow for Parquet files, it is not installed; pip install 'cua_rl[trajectories]'")


def _arrow(name: str = "pyarrow") -> Any:
    """pyarrow, which has no types and takes a while to import."""
    return import_module(name)


def _schema() -> Any:
    pa = _arrow()
    floats, ints = pa.list_(pa.float64()), pa.list_(pa.int32())
    turn = {
        "text": pa.string(),
        "prompt_token_ids": ints,
        "sampled_tokens": ints,
        "sampling_logprobs": floats,
        "training_logprobs": floats,
        "policy_version": pa.int64(),
        "before": pa.int64(),
        "after": pa.int64(),
    }
    names: dict[str, Any] = {
        "rollout_id": pa.string(),
        "task_id": pa.string(),
        "seed": pa.int64(),
        "instruction": pa.string(),
        "phase": pa.string(),
        "step": pa.int64(),
        "group_id": pa.string(),
        "member_index": pa.int64(),
        "parent_id": pa.string(),
        "fork_turn": pa.int64(),
        "reward": pa.float64(),
        "success": pa.bool_(),
        "advantage": pa.float64(),
        "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})),
        "turns": pa.list_(pa.struct(turn)),
        "record": pa.string(),
    }
    features = {"images": {"feature": {"_type": "Image"}, "_type": "List"}}
    schema = pa.schema(names)
    # the types of the other columns follow from Arrow's
    known = {name: features.get(name) or _feature(schema.field(name).type) for name in names}
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": known}})})


def _feature(kind: Any) -> Row:
    """A column's type in the words of `datasets`."""
    types = _arrow().types
    if types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    if types.is_struct(kind):
        return {one.name: _feature(one.type) for one in kind}
    return {"dtype": {"double": "float64"}.get(str(kind), str(kind)), "_type": "Value"}


class ParquetWriter:
    """Writes rollouts as they come, 1000 to a file; a context manager."""

    def __init__(self, folder: Path, run: Row) -> None:
        self._folder = folder
        self._run = run
        self._writer: Any = None
        self._num_rows = 0

    def write(self, encoded: EncodedRecord) -> None:
        """Add a rollout."""
        schema = _schema()
        if self._num_rows % _ROWS_PER_FILE == 0:
            self._close()
            path = self._folder / "data" / f"train-{self._num_rows // _ROWS_PER_FILE:05d}.parquet"
            self._writer = _arrow("pyarrow.parquet").ParquetWriter(path, schema, compression="zstd")
        self._writer.write_table(_arrow().Table.from_pylist([_to_columns(encoded)], schema=schema))
        self._num_rows += 1

    def __enter__(self) -> Self:
        (self._folder / "data").mkdir(parents=True)
        (self._folder / "run.json").write_text(write_json(self._run), encoding="utf-8")
        card = _CARD.format(run_name=self._run["run_name"])
        (self._folder / "README.md").write_text(card, encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _to_columns(encoded: EncodedRecord) -> Row:
    turns: list[Row] = encoded.row["turns"]
    rest = {**encoded.row, "turns": [{k: v for k, v in turn.items() if k not in _TURN_NUMBERS} for turn in turns]}
    return {
        **{name: _storable(encoded.row[name]) for name in _TOP},
        "instruction": _storable(encoded.row["task"]["instruction"]),
        "images": [{"bytes": image.data, "path": f"{image.sha256}.{image.format}"} for image in encoded.images],
        "turns": [
            {name: _storable(turn[name]) for name in (*_TURN_NUMBERS, "text", "before", "after")} for turn in turns
        ],
        "record": write_json(rest),
    }


def _storable(value: object) -> object:
    """Text that Arrow takes: a model can sample half of a surrogate pair."""
    return escape_text(value) if isinstance(value, str) else value


def read_parquet(folder: Path, *, max_memory_bytes: int = _MAX_MEMORY_BYTES) -> Iterator[EncodedRecord]:
    """The rollouts of a data set that `ParquetWriter` wrote; raises `ConfigError` for another one.

    A process of its own reads each file within `max_memory_bytes`: kilobytes of Parquet can hold terabytes.
    """
    for path in sorted((folder / "data").glob("*.parquet")):
        for columns in _read_apart(path, _read_rows, max_memory_bytes):
            yield _from_columns(*columns)


def read_mind2web(path: Path) -> Iterator[Row]:
    """The rows of a file of Multimodal-Mind2Web, with screenshots in base64; raises `ConfigError` for another file."""
    require_pyarrow()
    for told, (screenshot,), _ in _read_apart(path, _read_mind2web_rows, _MAX_MEMORY_BYTES):
        yield {**json.loads(told), "screenshot": b64encode(screenshot).decode()}


def _read_apart(path: Path, read: Callable[[Path], Iterator[Columns]], max_memory_bytes: int) -> Iterator[Columns]:
    """What `read` yields in a process of its own."""
    spawn = get_context("spawn")
    rows, sent = spawn.Pipe(duplex=False)
    reader = spawn.Process(target=_send_rows, args=(path, read, sent, max_memory_bytes), daemon=True)
    reader.start()
    sent.close()  # so that the pipe ends with the reader
    try:
        while payload := rows.recv_bytes(max_memory_bytes):
            complaint, *columns = decode(payload, _TOLD)
            if complaint is not None:
                raise ConfigError(complaint)
            yield (columns[0], columns[1], columns[2])
    except EOFError:
        raise ConfigError(_unreadable(path, max_memory_bytes, "a reader that did not survive it")) from None
    finally:
        reader.kill()
        reader.join()
        rows.close()


def _send_rows(path: Path, read: Callable[[Path], Iterator[Columns]], rows: Connection, max_memory_bytes: int) -> None:
    """Send the rows of a file and nothing, or a complaint."""
    arrow, _ = _arrow(), _arrow("pyarrow.parquet")
    arrow.set_cpu_count(1)  # every thread takes memory of its own
    arrow.set_memory_pool(arrow.system_memory_pool())  # others reserve gigabytes at once
    if sys.platform == "linux":  # macOS refuses such limits
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])  # by now, mostly of libraries
        limit = num_pages * getpagesize() + max_memory_bytes
        setrlimit(RLIMIT_AS, (limit, limit))
    try:
        for columns in read(path):
            rows.send_bytes(encode((None, *columns), _TOLD))
        rows.send_bytes(b"")
    except ConfigError as error:
        rows.send_bytes(encode((str(error), "", (), ()), _TOLD))
    except (MemoryError, OSError, TypeError, arrow.ArrowException) as error:
        complaint = _unreadable(path, max_memory_bytes, f"{type(error).__name__}: {error}")
        rows.send_bytes(encode((complaint, "", (), ()), _TOLD))


def _unreadable(path: Path, max_memory_bytes: int, what: str) -> str:
    return (
        f"expected rollouts of which each can be read within {max_memory_bytes >> 20} MiB in {str(path)!r}, got "
        f"{what[:500].strip()}; export the run again, in format=atif if its rollouts are larger"
    )


def _read_rows(path: Path) -> Iterator[Columns]:
    file = _arrow("pyarrow.parquet").ParquetFile(path)
    if missing := {"record", "images", "turns"} - set(file.schema_arrow.names):
        raise ConfigError(
            f"expected the columns of recipes.export_trajectories in {str(path)!r}, got none called "
            f"{sorted(missing)}; export rollouts with it, or convert the data set to ATIF"
        )
    for batch in file.iter_batches(batch_size=1, columns=["record", "images", "turns"], use_threads=False):
        for row in batch.to_pylist():
            yield row["record"], [image["bytes"] for image in row["images"]], row["turns"]


def _read_mind2web_rows(path: Path) -> Iterator[Columns]:
    file = _arrow("pyarrow.parquet").ParquetFile(path)
    if missing := {*_MIND2WEB, "screenshot"} - set(file.schema_arrow.names):
        raise ConfigError(
            f"expected the columns of Multimodal-Mind2Web in {str(path)!r}, got none called {sorted(missing)}; import "
            "the folder of a data set of ours, which has run.json, or convert other Parquet files to ATIF"
        )
    for batch in file.iter_batches(batch_size=1, columns=[*_MIND2WEB, "screenshot"], use_threads=False):
        for row in batch.to_pylist():
            yield json.dumps({name: row[name] for name in _MIND2WEB}), [row["screenshot"]["bytes"]], ()


def _from_columns(record: str, images: Sequence[bytes], turns: Sequence[Row]) -> EncodedRecord:
    row = read_json(record)
    for turn, numbers in zip(row["turns"], turns, strict=True):
        turn |= {name: numbers[name] for name in _TURN_NUMBERS}
    return EncodedRecord(row=row, images=decode_images(row, images))
