"""Checkpoints of `torch.distributed.checkpoint` (DCP): what ranks do not share, stored rank by rank.

A wire goes into one as it is. `PerRank` does the same for whatever else each rank has of its own, and
`read_states` reads all ranks' parts, for another number of ranks than at the save.
"""

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch.distributed as dist

from thinwire.errors import StateError
from thinwire.ranked import choose, place_of, rank_key
from thinwire.sharding.state import copied


class _Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class PerRank:
    """Has DCP store each rank's own state of an object, instead of one rank's for all.

    For the optimizer under `ZeRO` and where models are averaged, whose state is another on each rank. It is
    stored whole, so a new optimizer, which has no state yet, loads it too.

    Args:
        held: The object: anything with state_dict and load_state_dict.
        merge: What becomes of the list of all ranks' states, read by `read_states`, where another number of
            ranks loads them: `merge_optimizer_states` for optimizers. None: refused.
        group: The process group whose ranks count. None: all.

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
        """This rank's state under the rank's key: a copy on the CPU, which training does not change."""
        own = copied(self._held.state_dict(), lambda tensor: tensor.to("cpu", copy=True))
        return {rank_key(*self._place()): (own,)}

    def load_state_dict(self, state: object) -> None:
        """Load this rank's state, or what `merge` makes of all ranks' where their number has changed."""
        rank, size = self._place()
        saved_size, found = choose(state, rank, size)
        if saved_size == size:
            self._held.load_state_dict(copied(found[rank]))
        elif self._merge is not None:
            self._held.load_state_dict(copied(self._merge(list(found.values()))))
        else:
            raise StateError(
                f"{saved_size} ranks saved and {size} load, and merge=None does not say what becomes of the"
                f" {type(self._held).__name__}'s states: for an optimizer give"
                " PerRank(optimizer, merge=thinwire.merge_optimizer_states)"
            )

    def _place(self) -> tuple[int, int]:
        if not dist.is_initialized():
            return 0, 1
        return dist.get_rank(self._group), dist.get_world_size(self._group)


def read_states(
    checkpoint_id: "str | os.PathLike[str]", key: str = "wire", storage_reader: Any = None
) -> dict[str, tuple[Any]]:
    """What all ranks saved under `key` by DCP, for `load_state_dict` on any number of ranks.

    Reads these parts of the checkpoint only, on each rank that calls it; ranks need not wait for each other,
    and no process group is needed.

    Args:
        checkpoint_id: The folder.
        key: The name under which the wire, or a `PerRank`, stood in what was saved; `"app.wire"` where it was
            inside the state of another object.
        storage_reader: A reader of DCP's, for checkpoints that are not folders.

    Example::

        wire.load_state_dict(thinwire.read_states(folder))
    """
    import torch.distributed.checkpoint as dcp  # a second to import, for a checkpoint's sake alone
    from torch.distributed.checkpoint.api import CheckpointException

    reader = dcp.FileSystemReader(checkpoint_id) if storage_reader is None else storage_reader
    where = f"the checkpoint at {os.fspath(checkpoint_id)!r}"
    try:
        held = list(reader.read_metadata().state_dict_metadata)
    except Exception as error:
        raise StateError(
            f"{where} is not there, or not complete ({type(error).__name__}: {error}): give the folder that"
            " torch.distributed.checkpoint.save has written"
        ) from error
    ranks = _ranks_under(key, held)
    if not ranks:
        names = ", ".join(sorted({name.partition(".")[0] for name in held})) or "nothing"
        raise StateError(
            f"{where} has no states by rank under {key!r}, it has {names}: give the name under which the wire"
            " was saved"
        )
    state: dict[str, Any] = {key: dict.fromkeys(ranks)}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # the latter is no Exception to torch
        raise StateError(
            f"{key!r} of {where} cannot be read: it is damaged, go back to an earlier one"
        ) from error
    read: dict[str, tuple[Any]] = state[key]
    return read


def _ranks_under(key: str, names: Iterable[str]) -> list[str]:
    """The keys of ranks that stand under a key.

    >>> _ranks_under("wire", ["model.weight", "wire.rank 0 of 2", "wire.rank 1 of 2", "wire.notes"])
    ['rank 0 of 2', 'rank 1 of 2']
    """
    below = [name[len(key) + 1 :] for name in names if name.startswith(f"{key}.")]
    return [name for name in below if place_of(name) is not None]
