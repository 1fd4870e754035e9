"""Reading of DCP's checkpoints without running code that they name.

torch's own reader unpickles a checkpoint's metadata, and its planner every entry that is not a tensor. So
anyone who can write into the folder can run code in the job that loads it. Here metadata is unpickled into
inert records, which are validated and copied. Entries are loaded by `torch.load(weights_only=True)`. Types
are allowed by name, so a later torch that stores another type raises until it is added here.
"""

import argparse
import datetime
import decimal
import io
import pathlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from thinwire.errors import StateError

_DCP = "torch.distributed.checkpoint"
_KINDS = {
    f"{_DCP}.metadata.Metadata",
    f"{_DCP}.metadata.TensorStorageMetadata",
    f"{_DCP}.metadata.BytesStorageMetadata",
    f"{_DCP}.metadata.TensorProperties",
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
    f"{_DCP}.metadata.ChunkStorageMetadata",
    f"{_DCP}.metadata.MetadataIndex",
    f"{_DCP}.metadata.StorageMeta",
    f"{_DCP}.filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    *(f"pathlib{module}.{kind}" for module in ("", "._local") for kind in ("PosixPath", "WindowsPath")),
}
"""The names in a file of metadata. They are never looked up: each stands for a record."""

_PLAIN: tuple[Any, ...] = (
    argparse.Namespace,
    *(frozenset, range, slice),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    decimal.Decimal,
    *(pathlib.PosixPath, pathlib.WindowsPath),
    SimpleNamespace,
)
"""Types of data that run no code, besides those that `torch.load(weights_only=True)` knows.

numpy's are not among them: the state of a dtype can declare any bytes to be addresses of objects.
"""


class Reader(dcp.FileSystemReader):
    """A reader of a folder that runs nothing while it reads the metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata.

        Raises:
            StateError: It names code, or is not the metadata of a checkpoint.
        """
        with Path(self.path, ".metadata").open("rb") as file:
            return _metadata(_Unpickler(file).load())


class Planner(dcp.DefaultLoadPlanner):
    """A planner that loads entries by `load_plain`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an entry that is not a tensor in its place in the state."""
        name = read_item.dest_index.fqn
        place: Any = self.original_state_dict
        *path, last = self.mappings[name]
        for key in path:
            place = place[key]
        try:
            place[last] = load_plain(value)
        except StateError as error:
            raise StateError(f"{name!r} {error}") from error


def load_plain(file: io.BytesIO) -> Any:
    """Load tensors and plain values that `torch.save` has written.

    Raises:
        StateError: The file contains something else. `torch.serialization.add_safe_globals` allows a class.
    """
    # On exit torch's context removes what it was given, which would include names that the user has added.
    known = torch.serialization.get_safe_globals()
    allowed = [kind for kind in _PLAIN if kind not in known]
    with torch.serialization.safe_globals(allowed):
        try:
            return torch.load(file, weights_only=True)
        except pickle.UnpicklingError as error:
            raise StateError(_refused(file, str(error))) from error


def _refused(file: io.BytesIO, reason: str) -> str:
    """Return why torch does not load a file, within the context of allowed names."""
    file.seek(0)
    try:
        names = ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)))
    except Exception:  # torch's search fails on damaged files, and in formats other than its zip files
        names = ""
    if not names:
        reason = reason.partition("error:")[2].strip().partition("\n")[0]
        return f"is damaged, or is not plain data ({reason}): load an earlier one, or save plain values"
    instead = "tensors, as by torch.from_numpy," if "numpy." in names else "plain values"
    return (
        f"contains {names}, which is not plain data, and checkpoints are loaded without running code: save"
        f" {instead} instead, or, if you trust it, pass it to torch.serialization.add_safe_globals before"
        " saving and loading"
    )


def check_loadable(name: str, value: Any) -> None:
    """Raise StateError if `load_plain` would not load a value, so that a save does not end in a loss."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        load_plain(file)
    except StateError as error:
        raise StateError(f"{name!r} {error}") from error


class _Record:
    """An unpickled object: its kind, and the arguments and the state that it was pickled with."""

    kind: str
    given: tuple[Any, ...]
    state: Any

    def __new__(cls, *given: Any) -> "_Record":
        made = super().__new__(cls)
        made.given, made.state = given, {}
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """An unpickler that makes records and dtypes, and calls nothing else."""

    def find_class(self, module: str, name: str, /) -> Any:
        kind = f"{module}.{name}"
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if kind not in _KINDS:
            raise StateError(f"names {kind}, which no checkpoint contains: it is damaged or hostile")
        # A class for each name and read: a pickle can set attributes of classes, which nothing else must see.
        return type(name, (_Record,), {"kind": kind})


def _metadata(found: object) -> Metadata:
    """Copy the metadata from records, with all values checked."""
    state = _state(found, "metadata.Metadata")
    entries = _expect(state.get("state_dict_metadata"), dict)
    stored = _expect(state.get("storage_data"), dict)
    return Metadata(
        {_expect(name, str): _entry(record) for name, record in entries.items()},
        storage_data={_index(key): _place(record) for key, record in stored.items()},
        storage_meta=StorageMeta(),
    )


def _entry(found: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(found, _Record) and found.kind == f"{_DCP}.metadata.BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(found, "metadata.TensorStorageMetadata")
    records = _expect(state.get("chunks"), list)
    chunks = [_state(record, "metadata.ChunkStorageMetadata") for record in records]
    properties = state.get("properties")
    if not isinstance(properties, _Record) or not isinstance(properties.state, tuple):
        raise _damaged(properties)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_expect(properties.state[0], torch.dtype)),
        size=_size(state.get("size")),
        chunks=[
            ChunkStorageMetadata(_size(chunk.get("offsets")), _size(chunk.get("sizes"))) for chunk in chunks
        ],
    )


def _index(found: object) -> MetadataIndex:
    state = _state(found, "metadata.MetadataIndex")
    offset, index = state.get("offset"), state.get("index")
    return MetadataIndex(
        _expect(state.get("fqn"), str),
        None if offset is None else _size(offset),
        None if index is None else _expect(index, int),
    )


def _place(found: object) -> SimpleNamespace:
    """Return where an entry is stored, as `FileSystemReader` reads it."""
    state = _state(found, "filesystem._StorageInfo")
    file = _expect(state.get("relative_path"), str)
    # Else a checkpoint could show another folder's file to the job, or have it read a device without end.
    if file == ".." or Path(file).name != file:
        raise StateError(f"reads {file!r}, which is not a file in its folder: it is damaged or hostile")
    transforms = state.get("transform_descriptors")
    return SimpleNamespace(
        relative_path=file,
        offset=_expect(state.get("offset"), int),
        length=_expect(state.get("length"), int),
        transform_descriptors=None if transforms is None else [_expect(text, str) for text in transforms],
    )


def _size(found: object) -> torch.Size:
    if not isinstance(found, _Record) or found.kind != "torch.Size" or len(found.given) != 1:
        raise _damaged(found)
    return torch.Size(_expect(length, int) for length in _expect(found.given[0], tuple))


def _state(found: object, kind: str) -> Mapping[str, Any]:
    if not isinstance(found, _Record) or found.kind != f"{_DCP}.{kind}":
        raise _damaged(found)
    state: Mapping[str, Any] = _expect(found.state, dict)
    return state


def _expect(value: object, kind: type) -> Any:
    # Not isinstance, by which True would pass for a number.
    if type(value) is not kind and not (kind is torch.dtype and isinstance(value, kind)):
        raise _damaged(value)
    return value


def _damaged(value: object) -> StateError:
    shown = getattr(value, "kind", type(value).__name__)
    return StateError(f"has a {shown} where no checkpoint has one: it is damaged or hostile")
