"""Per-rank state in checkpoints of `torch.distributed.checkpoint` (DCP).

A wire can be saved as it is. `PerRank` wraps any other object whose state differs from rank to rank, and
`read_states` reads all ranks' states, for a job with another number of ranks.
"""

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from thinwire.checkpoint.rank_keys import choose, place_of, rank_key
from thinwire.checkpoint.trees import copied
from thinwire.errors import StateError
from thinwire.programs.parameter_names import original_name


class _Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class PerRank:
    """A wrapper of an object whose state DCP stores for each rank, instead of one rank's state for all.

    Use it for the optimizer under `ZeRO` and with averaged models, whose state differs from rank to rank. The
    state is stored whole, so that a new optimizer without state can load it.

    Args:
        held: Any object with state_dict and load_state_dict.
        merge: A function that makes one state from the list of all ranks' states, used if the number of ranks
            has changed since the save. Use `merge_optimizer_states` for optimizers. If None, such a load
            raises StateError.
        group: The process group that ranks are numbered in. None for the default group.

    Example::

        parts = {"model": ddp.module, "optimizer": thinwire.PerRank(optimizer), "wire": wire}
        dcp.save(parts, checkpoint_id=folder)
    """

    def __init__(
        self,
        held: _Stateful,
        *,
        merge: Callable[[list[Any]], Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._held = held
        self._merge = merge
        self._group = group

    def state_dict(self) -> dict[str, tuple[Any]]:
        """Return a copy of this rank's state on the CPU, under the rank's key.

        Returns:
            One key, which names the rank, and a tuple with the state.
        """
        # DCP loads an object that it stored whole to the device it was on, which a job with fewer ranks may
        # not have. So it is stored from the CPU.
        own = copied(self._held.state_dict(), lambda tensor: tensor.to("cpu", copy=True))
        # DCP stores one of several equal keys, and would load one rank's residuals on all ranks: so the key
        # names the rank. It loads only keys that the loading object has already, and a new wire has no
        # residuals: so the state is a tuple, which DCP stores and loads as a whole.
        return {rank_key(*self._place()): (own,)}

    def load_state_dict(self, state: object) -> None:
        """Load this rank's state, or the merged states of all ranks if their number has changed.

        Args:
            state: The result of `state_dict`, of DCP, or of `read_states`.

        Raises:
            StateError: The state is not this rank's, or needs merging and `merge` is None.
        """
        rank, size = self._place()
        saved_size, found = choose(state, rank, size)
        if saved_size == size:
            self._held.load_state_dict(copied(found[rank]))
        elif self._merge is not None:
            self._held.load_state_dict(copied(self._merge(list(found.values()))))
        else:
            raise StateError(
                f"{saved_size} ranks saved and {size} load, and merge=None cannot merge the"
                f" {type(self._held).__name__}'s states: for an optimizer pass"
                " PerRank(optimizer, merge=thinwire.merge_optimizer_states)"
            )

    def _place(self) -> tuple[int, int]:
        if not dist.is_initialized():
            return 0, 1
        return dist.get_rank(self._group), dist.get_world_size(self._group)


def read_states(
    checkpoint_id: "str | os.PathLike[str]", key: str = "wire", storage_reader: Any = None
) -> dict[str, tuple[Any]]:
    """Return the states that all ranks saved under `key` with DCP, for loading on any number of ranks.

    It reads only these entries of the checkpoint, on each rank that calls it. It is not collective, and needs
    no process group.

    Args:
        checkpoint_id: The checkpoint's folder.
        key: The key of the wire, or of a `PerRank`, in the saved dict. `"app.wire"` if it was nested in the
            state of another object.
        storage_reader: A storage reader of DCP, for checkpoints that are not folders. It reads the metadata,
            and torch's own readers unpickle it.

    Returns:
        The states by rank key, for `load_state_dict` of a wire or a `PerRank`.

    Raises:
        StateError: The checkpoint cannot be read, names code, or has no states by rank under `key`.

    Example::

        wire.load_state_dict(thinwire.read_states(folder))
    """
    states = find_states(checkpoint_id, key, storage_reader)
    if not states:
        names = _open(checkpoint_id, storage_reader)[1]
        shown = ", ".join(sorted({name.partition(".")[0] for name in names})) or "nothing"
        raise StateError(
            f"{_at(checkpoint_id)} has no states by rank under {key!r}, it has {shown}: pass the name under"
            " which the wire was saved"
        )
    return states


def find_states(
    checkpoint_id: "str | os.PathLike[str]", key: str, storage_reader: Any = None
) -> dict[str, tuple[Any]]:
    """Return the same as `read_states`, or an empty dict if there are no states by rank under `key`."""
    reader, names = _open(checkpoint_id, storage_reader)
    ranks = _ranks_under(key, names)
    read: dict[str, tuple[Any]] = _read(reader, key, dict.fromkeys(ranks), checkpoint_id) if ranks else {}
    return read


def read_model(
    checkpoint_id: "str | os.PathLike[str]", module: torch.nn.Module, local: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the model state that DCP has saved under "model", for `module.load_state_dict`.

    Like `read_states` it is not collective.

    Args:
        checkpoint_id: The checkpoint's folder.
        module: The module to load into, which gives names and shapes. It is not changed. Either of the two,
            the saved module and this one, may be compiled by torch.compile, which adds prefixes to names.
        local: State to take in place of the saved one, by original name.

    Raises:
        StateError: The checkpoint cannot be read, or is of another model.
    """
    reader, names = _open(checkpoint_id)
    own = {original_name(name): value for name, value in module.state_dict().items()}
    within = (name.removeprefix("model.") for name in names if name.startswith("model."))
    stored = {original_name(name): name for name in within}
    saved = {name: size for name, key in stored.items() if (size := names[f"model.{key}"])}
    saved |= {name: _shape(value) for name, value in local.items() if isinstance(value, torch.Tensor)}
    here = {name: _shape(value) for name, value in own.items() if isinstance(value, torch.Tensor)}
    differing = sorted(name for name in saved | here if saved.get(name) != here.get(name))
    if differing:
        name, more = differing[0], f" ({len(differing) - 1} more differ)" if len(differing) > 1 else ""
        raise StateError(
            f"{_at(checkpoint_id)} is of another model: {name!r} is {saved.get(name, 'missing')} there and"
            f" {here.get(name, 'missing')} here{more}"
        )
    wanted = {
        stored.get(name, name): (
            torch.empty_like(value, device="cpu") if isinstance(value, torch.Tensor) else value
        )
        for name, value in own.items()
        if name not in local
    }
    read: dict[str, Any] = _read(reader, "model", wanted, checkpoint_id) if wanted else {}
    read = {original_name(name): value for name, value in read.items()} | dict(local)
    return {name: read[original_name(name)] for name in module.state_dict()}


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def _at(checkpoint_id: "str | os.PathLike[str]") -> str:
    return f"the checkpoint at {os.fspath(checkpoint_id)!r}"


def _open(checkpoint_id: "str | os.PathLike[str]", storage_reader: Any = None) -> tuple[Any, dict[str, str]]:
    """Return a reader, and the shapes of all entries by name, empty for entries that are not tensors."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # takes a second to import

    from thinwire.checkpoint.untrusted import Reader

    reader = Reader(checkpoint_id) if storage_reader is None else storage_reader
    try:
        entries = reader.read_metadata().state_dict_metadata
    except StateError as error:
        raise StateError(f"{_at(checkpoint_id)} {error}") from error
    except Exception as error:
        raise StateError(
            f"{_at(checkpoint_id)} is missing or incomplete ({type(error).__name__}: {error}): pass the"
            " folder that torch.distributed.checkpoint.save has written"
        ) from error
    shapes = {
        name: str(tuple(entry.size)) if isinstance(entry, TensorStorageMetadata) else ""
        for name, entry in entries.items()
    }
    return reader, shapes


def _read(reader: Any, key: str, state: Any, checkpoint_id: "str | os.PathLike[str]") -> Any:
    """Read the entries under a key into `state`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from thinwire.checkpoint.untrusted import Planner

    # In torch 2.6 `load` has no `no_dist`, and only its deprecated form reads without a collective.
    load = dcp.load if "no_dist" in inspect.signature(dcp.load).parameters else dcp.load_state_dict
    filled = {key: state}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated")
            load(filled, storage_reader=reader, planner=Planner(), no_dist=True)
    except (Exception, CheckpointException) as error:  # CheckpointException does not derive from Exception
        for cause, _ in getattr(error, "failures", {}).values():
            if isinstance(cause, StateError):
                raise StateError(f"{_at(checkpoint_id)}: {cause}") from error
        raise StateError(
            f"{key!r} of {_at(checkpoint_id)} cannot be read: it is damaged, load an earlier one"
        ) from error
    return filled[key]


def _ranks_under(key: str, names: Iterable[str]) -> list[str]:
    """Return the rank keys under a key.

    >>> _ranks_under("wire", ["model.weight", "wire.rank 0 of 2", "wire.rank 1 of 2", "wire.notes"])
    ['rank 0 of 2', 'rank 1 of 2']
    """
    below = [name[len(key) + 1 :] for name in names if name.startswith(f"{key}.")]
    return [name for name in below if place_of(name) is not None]
