"""Checkpoints of another origin: nothing that a folder names is run, and what it names raises StateError."""

import argparse
import collections
import datetime
import io
import os
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as torchs

from thinwire import StateError, read_states
from thinwire.checkpoint.dcp import read_model
from thinwire.checkpoint.untrusted import check_loadable, load_plain


class Hostile:
    """An object that runs a command when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.command = f"touch {sentinel}"

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


@pytest.fixture
def sentinel(tmp_path: Path) -> Path:
    return tmp_path / "ran"


def save(folder: Path, **more: Any) -> Path:
    """Write a checkpoint with a wire's state, a model and more."""
    state = {"wire": {"rank 0 of 1": ({"step": 3, "memory": {"w": torch.ones(3)}},)}, **more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a missing process group
        dcp.save({"model": torch.nn.Linear(3, 2).state_dict(), **state}, checkpoint_id=folder)
    return folder


def assert_refused(folder: Path, sentinel: Path, message: str) -> None:
    with pytest.raises(StateError, match=message):
        read_states(folder)
    assert not sentinel.exists()


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoint")
    (state,) = read_states(folder)["rank 0 of 1"]
    assert state["step"] == 3
    assert torch.equal(state["memory"]["w"], torch.ones(3))
    assert read_model(folder, torch.nn.Linear(3, 2), {})["weight"].shape == (2, 3)


def test_metadata_that_names_code_runs_nothing(tmp_path: Path, sentinel: Path) -> None:
    folder = save(tmp_path / "checkpoint")
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(sentinel)))
    assert_refused(
        folder, sentinel, r"names \w+\.system, which no checkpoint contains: it is damaged or host"
    )


@pytest.mark.parametrize("field", ["planner_data", "storage_data", "state_dict_metadata", "storage_meta"])
def test_code_within_right_metadata_runs_nothing(tmp_path: Path, sentinel: Path, field: str) -> None:
    folder = save(tmp_path / "checkpoint")
    found = pickle.loads((folder / ".metadata").read_bytes())
    setattr(found, field, Hostile(sentinel))
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    assert_refused(folder, sentinel, r"names \w+\.system")


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("function", [eval, exec, __import__, getattr, open, os.system, pickle.loads])
def test_no_function_is_found_in_any_protocol(tmp_path: Path, function: Any, protocol: int) -> None:
    folder = save(tmp_path / "checkpoint")

    class Calls:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return function, (str(folder),)

    (folder / ".metadata").write_bytes(pickle.dumps(Calls(), protocol))
    with pytest.raises(StateError, match=f"names .*{function.__name__}"):
        read_states(folder)


def test_metadata_cannot_change_classes_of_torch(tmp_path: Path) -> None:
    """A pickle can set attributes of a class that it names."""
    folder = save(tmp_path / "checkpoint")
    build = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}Vversion\nVhostile\nstb."
    (folder / ".metadata").write_bytes(build)
    with pytest.raises(StateError):
        read_states(folder)
    assert torchs.Metadata.version is None


@pytest.mark.parametrize("path", ["../secret", "/dev/zero", "a/b", ".."])
def test_only_files_of_the_folder_are_read(tmp_path: Path, sentinel: Path, path: str) -> None:
    folder = save(tmp_path / "checkpoint")
    found = pickle.loads((folder / ".metadata").read_bytes())
    for place in found.storage_data.values():
        place.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    assert_refused(folder, sentinel, "which is not a file in its folder")


def test_an_entry_that_names_code_runs_nothing(tmp_path: Path, sentinel: Path) -> None:
    folder = save(tmp_path / "checkpoint", wire={"rank 0 of 1": (Hostile(sentinel),)})
    assert_refused(folder, sentinel, r"'wire\.rank 0 of 1' contains \w+\.system, which is not plain data")


def test_a_models_entry_that_names_code_runs_nothing(tmp_path: Path, sentinel: Path) -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

    state = {**torch.nn.Linear(3, 2).state_dict(), "_extra_state": Hostile(sentinel)}
    folder = save(tmp_path / "checkpoint", model=state)
    with pytest.raises(StateError, match=r"'model\._extra_state' contains \w+\.system"):
        read_model(folder, Extra(3, 2), {})
    assert not sentinel.exists()


def test_bytes_of_a_tensor_that_name_code_run_nothing(tmp_path: Path, sentinel: Path) -> None:
    folder = save(tmp_path / "checkpoint")
    hostile = io.BytesIO()
    torch.save(Hostile(sentinel), hostile)
    found = pickle.loads((folder / ".metadata").read_bytes())
    for place in found.storage_data.values():
        place.relative_path, place.offset, place.length = "__0_0.distcp", 0, len(hostile.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    (folder / "__0_0.distcp").write_bytes(hostile.getvalue())
    assert_refused(folder, sentinel, "contains")
    with pytest.raises(StateError, match="cannot be read: it is damaged"):
        read_model(folder, torch.nn.Linear(3, 2), {})
    assert not sentinel.exists()


def test_damaged_metadata_raises_state_error_whatever_the_damage(tmp_path: Path) -> None:
    folder, chance = save(tmp_path / "checkpoint"), random.Random(0)
    whole = (folder / ".metadata").read_bytes()
    for _ in range(300):
        damaged = bytearray(whole[: chance.randrange(1, len(whole) + 1)])
        for _ in range(chance.randrange(4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        (folder / ".metadata").write_bytes(damaged)
        try:
            read_states(folder)
        except StateError:
            continue


PLAIN: dict[str, Any] = {
    "numbers": [1, 2.5, 1j, 10**40, True, None],
    "texts": ("a", b"\xff", bytearray(b"b")),
    "sets": [{1}, frozenset({2}), range(3)],
    "mappings": [collections.OrderedDict(a=1), collections.Counter("aab")],
    "times": [datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc), datetime.timedelta(1)],
    "options": argparse.Namespace(path=Path("/data"), rate=0.1),
    "random": random.getstate(),
    "torch's": [torch.get_rng_state(), torch.float32, torch.device("cpu"), torch.Size([2])],
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_of_training_scripts_load(name: str) -> None:
    file = io.BytesIO()
    torch.save(PLAIN[name], file)
    file.seek(0)
    assert repr(load_plain(file)) == repr(PLAIN[name])


class Own:
    """A class of the user's."""

    def __init__(self) -> None:
        self.value = 3


def test_a_class_that_would_not_load_is_refused_at_the_save_unless_the_user_allows_it() -> None:
    with pytest.raises(StateError, match=r"'own' contains .*test_untrusted\.Own.*add_safe_globals"):
        check_loadable("own", {"inner": Own()})
    with torch.serialization.safe_globals([Own, argparse.Namespace]):
        check_loadable("own", {"inner": Own()})
        assert argparse.Namespace in torch.serialization.get_safe_globals()  # the user's stay
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


def test_arrays_of_numpy_are_refused_because_their_dtypes_can_hold_addresses() -> None:
    """A dtype of objects that claims to hold none would take the bytes of a file for addresses."""
    for value in (numpy.zeros(2), numpy.float64(1), numpy.random.get_state()):
        with pytest.raises(StateError, match=r"contains numpy.*: save tensors, as by torch\.from"):
            check_loadable("noise", value)


def test_a_type_that_torch_cannot_load_is_refused_at_the_save() -> None:
    kinds: list[list[Any]] = [[], [collections.deque]]
    for kind in kinds:  # allowed or not
        with torch.serialization.safe_globals(kind), pytest.raises(StateError, match=r"'last' (is|contains)"):
            check_loadable("last", collections.deque([1]))
