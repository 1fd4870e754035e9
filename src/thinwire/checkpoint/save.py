"""Checkpoints of a whole job: model, optimizer, wire and further objects.

They are built on `torch.distributed.checkpoint` (DCP). State that ranks share is stored once, and each rank's
own state separately. A folder gets its name only when it is complete.
"""

import contextlib
import copy
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from thinwire.checkpoint.attachment import Attachment, SavableWire
from thinwire.checkpoint.dcp import PerRank, find_states, read_model, read_states
from thinwire.checkpoint.optimizer_state import per_rank
from thinwire.checkpoint.rank_keys import choose, rank_key
from thinwire.checkpoint.trees import copied, means, same
from thinwire.checkpoint.wire_state import all_or_none
from thinwire.engine.comm.agreement import agree_on, agreeing
from thinwire.engine.futures import at_work
from thinwire.errors import OptionError, StateError, UnavailableError
from thinwire.programs.parameter_names import original_name

_UNFINISHED, _REPLACED = ".unfinished", ".replaced"
_COMPLETE = ".metadata"
"""The file that torch.distributed.checkpoint writes last."""
_WRITTEN = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp")
"""The names of files that torch.distributed.checkpoint writes. Other files in the folder are the user's."""
_REPLICAS = "replicas"
"""The key of model state that ranks do not share, such as buffers under broadcast_buffers=False."""


def save_checkpoint(
    folder: "str | os.PathLike[str]",
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    wire: SavableWire,
    **extra: Any,
) -> Path:
    """Save the whole state of training; every rank must call it, between steps.

    It works with every program, `ZeRO`, averaged models and schedules. `load_checkpoint` loads it on any
    number of ranks. An existing checkpoint is replaced when the new one is complete. A crash before that
    leaves the old one, which `load_checkpoint` finds. Your own files in the folder, such as a tokenizer, are
    kept.

    Args:
        folder: The folder to write, on a file system that all ranks share.
        model: The model that was attached.
        optimizer: Its optimizer, or all of them, in the same order as at load.
        wire: The wire that `attach` returned.
        **extra: Further state by name. Objects with state_dict and load_state_dict, such as a scheduler or a
            GradScaler, are allowed, and so are plain values, such as a step. Each rank saves its own. Pass
            arrays of numpy as tensors. Your own classes need `torch.serialization.add_safe_globals`.

    Returns:
        The folder's absolute path.

    Raises:
        StateError: The folder holds something other than a checkpoint, or a state contains objects that
            `load_checkpoint` would not unpickle. Other ranks raise MismatchError, as they do if an object of
            `extra` raises on one rank.
        AttachError: Called during backward, or in a signal handler that interrupted a step or an exchange.
            Nothing is sent then.
        UnavailableError: numpy is missing, which torch.distributed.checkpoint needs on several ranks.

    Example::

        thinwire.save_checkpoint("checkpoint", ddp, optimizer, wire, scheduler=scheduler, step=step)
    """
    import torch.distributed.checkpoint as dcp  # takes a second to import, and only checkpoints need it

    path = Path(folder).resolve()
    unfinished = path.with_name(path.name + _UNFINISHED)
    _attachment(model, wire, "save_checkpoint")  # may raise, so it comes before anything is sent
    # Ends an open step, which may average models. So it comes before the model and the optimizer are read,
    # and before the question whether replicas are equal.
    state = wire.state_dict()
    attached = wire.attachment("save_checkpoint")
    communicator = attached.communicator
    with agreeing(communicator.rendezvous, communicator.limit, "save_checkpoint"):
        _check_numpy(communicator.size)
        parts = _parts(attached, optimizer, extra)
        if communicator.rank == 0:
            _prepare(path, unfinished)
    with at_work():
        dcp.save({**parts, "wire": state}, checkpoint_id=unfinished, process_group=attached.model.group)
        with agreeing(communicator.rendezvous, communicator.limit, "save_checkpoint in place"):
            if communicator.rank == 0:
                _replace(path, unfinished)
    return path


@torch.inference_mode(False)  # loaded tensors are updated in place later
def load_checkpoint(
    folder: "str | os.PathLike[str]",
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    wire: SavableWire,
    *,
    missing_ok: bool = False,
    **extra: Any,
) -> dict[str, Any]:
    """Load a checkpoint of `save_checkpoint`, on any number of ranks; every rank must call it.

    Nothing that the folder names is run: it holds tensors and plain values, and anything else raises.
    Valid before the first backward, with the program that was saved. To run another, swap afterwards.

    Args:
        folder: The folder of the checkpoint.
        model: The model that was attached. Load after wrapping it, because wrapping copies rank 0's
            parameters to all ranks.
        optimizer: Its optimizer, or all of them.
        wire: The wire that `attach` returned.
        missing_ok: Whether to load nothing and return an empty dict if no rank finds a checkpoint, so that
            one call serves the first start and every resume.
        **extra: The objects to load, by the names that they were saved under. With another number of ranks,
            the saved states of an object must be equal. Of GradScalers, the state with the smallest scale is
            loaded. Wrap other objects in `PerRank(..., merge=...)` for both calls.

    Returns:
        The saved `extra` that is not passed here: plain values, and states of objects.

    Raises:
        OptionError: An object has no load_state_dict.
        StateError: There is no complete checkpoint, or it names code, or does not fit. Ranks that could read
            it raise MismatchError. The order of loading is optimizer, model, wire. If the optimizer's or the
            wire's state does not fit, those before it have been loaded.
        MismatchError: With `missing_ok`, only some ranks find a checkpoint: `folder` is not shared by all.
        AttachError: Called during backward, or in a signal handler that interrupted a step or an exchange.

    Example::

        rest = thinwire.load_checkpoint(
            "checkpoint", ddp, optimizer, wire, missing_ok=True, scheduler=scheduler
        )
        for step in range(rest.get("step", 0), steps):
            ...
    """
    for name, held in extra.items():
        if not hasattr(held, "load_state_dict"):
            raise OptionError(
                f"{name}={held!r} has no load_state_dict: leave it out, load_checkpoint returns plain values"
            )
    attached = _attachment(model, wire, "load_checkpoint")  # may raise, so it comes before anything is sent
    communicator, module = attached.communicator, attached.model.module("load_checkpoint")
    optimizers = per_rank(optimizer, attached.model.group)
    path = _found(Path(folder).resolve())
    if missing_ok:
        missing = _is_missing(path)
        found = {"checkpoint": f"{'none' if missing else 'one'} in {str(folder)!r}"}
        agree_on(found, communicator.rendezvous, communicator.limit, "load_checkpoint found")
        if missing:
            return {}
    with all_or_none(communicator, "load_checkpoint"):
        if not (path / _COMPLETE).exists():
            raise StateError(
                f"there is no checkpoint at {str(path)!r}: pass the folder that thinwire.save_checkpoint has"
                " written, or missing_ok=True to start without one where the folder is empty"
            )
        local = _local_state(path, *attached.place)
        tensors = read_model(path, module, local)
        moments, state, others = (read_states(path, key) for key in ("optimizer", "wire", "extra"))
        saved = own_extra(others, extra, *attached.place)
    optimizers.load_state_dict(moments)
    module.load_state_dict(tensors)
    wire.load_state_dict(state)  # last: with averaged models it holds this rank's own parameters
    for name, held in extra.items():
        held.load_state_dict(saved.pop(name))
    return saved


def _attachment(model: nn.Module, wire: SavableWire, what: str) -> Attachment:
    """Return the wire's attachment; raise if `model` is another one, or sharded."""
    attached = wire.attachment(what)
    shard = attached.model.shard_key
    if shard is not None:
        raise UnavailableError(
            f"{what} has one rank write whole parameters, and this rank holds {shard}: save model and"
            " optimizer with torch.distributed.checkpoint, and the wire with them, as"
            " dcp.save({'model': ..., 'optimizer': ..., 'wire': wire}, checkpoint_id=folder)"
        )
    attached.module_in(model, what)
    return attached


def _parts(
    attached: Attachment, optimizer: Optimizer | Sequence[Optimizer], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return this rank's state for DCP, except the wire's."""
    # DCP stores a key that several ranks pass only once, and spreads its tensors over the ranks that passed
    # it. If replicas differ in the last bits, the stored model would be a mixture of them. So rank 0 alone
    # passes state that ranks share, and state that differs has a key that names its rank.
    rank, size = attached.place
    own = {name: _state_of(held) for name, held in extra.items()}
    parts: dict[str, Any] = {"extra": {rank_key(rank, size): (own,)}}
    moments = per_rank(optimizer, attached.model.group).state_dict()
    if attached.optimizer_state_differs or not attached.replicas_equal:
        parts["optimizer"] = moments
    elif rank == 0:
        # Saved as if by a job of one rank: every rank of any job then loads it as the only state to merge.
        parts["optimizer"] = {rank_key(0, 1): moments[rank_key(0, size)]}
    model = {original_name(name): value for name, value in attached.model.module().state_dict().items()}
    _check_loadable(own, moments, model)
    if rank == 0:
        parts["model"] = model
    differ = not attached.replicas_equal and not attached.saves_model
    local = set(model) if differ else attached.model.local_state(attached.saves_model)
    if local:
        tensors = copied({name: model[name] for name in model if name in local}, _to_cpu)
        parts[_REPLICAS] = {rank_key(rank, size): (tensors,)}
    return parts


def _check_loadable(extra: Mapping[str, Any], moments: Any, model: Mapping[str, Any]) -> None:
    """Raise StateError if a state contains objects that `load_checkpoint` would not unpickle."""
    from thinwire.checkpoint.untrusted import check_loadable  # imports torch.distributed.checkpoint

    others = {name: value for name, value in model.items() if not isinstance(value, torch.Tensor)}
    small = copied(moments, lambda tensor: tensor.new_empty(0))  # tensors always load, and may be large
    for name, state in [*extra.items(), ("optimizer", small), *others.items()]:
        check_loadable(name, state)


def _check_numpy(size: int) -> None:
    """Raise UnavailableError if several ranks save without numpy, which torch needs to exchange objects."""
    if size > 1 and importlib.util.find_spec("numpy") is None:
        raise UnavailableError(
            f"save_checkpoint on {size} ranks needs numpy, which torch.distributed.checkpoint uses to plan"
            " what each rank writes: pip install numpy"
        )


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


def _local_state(path: Path, rank: int, size: int) -> dict[str, Any]:
    """Return the model state that a rank saved, or the mean of all ranks' if the number of ranks changed."""
    states = find_states(path, _REPLICAS)
    return means(list(choose(states, rank, size)[1].values())) if states else {}


def _state_of(held: Any) -> Any:
    return copy.deepcopy(held.state_dict() if hasattr(held, "state_dict") else held)


def own_extra(saved: object, given: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return a rank's own `extra` from those that all ranks saved."""
    saved_size, found = choose(saved, rank, size)
    states = list(found.values())
    missing = sorted(set(given) - set(states[0]))
    if missing:
        raise StateError(f"the checkpoint has no {missing[0]!r}: it has {', '.join(states[0]) or 'no extra'}")
    chosen = {}
    for name in states[0]:
        each: Any = [state[name] for state in states]
        if isinstance(given.get(name), PerRank):
            chosen[name] = each
        elif isinstance(given.get(name), GradScaler):
            chosen[name] = min(each, key=_scale_of)
        elif name in given and not all(same(each[0], state) for state in each):
            raise StateError(
                f"{saved_size} ranks saved and {size} load, and the states of {name!r} differ: save and load"
                f" it as {name}=PerRank(..., merge=...)"
            )
        else:
            chosen[name] = each[0]
    return chosen


def _scale_of(state: Mapping[str, Any]) -> float:
    return float(state.get("scale", 0.0))


# A save may be killed at any moment. A folder that contains `.metadata` is a complete checkpoint at all
# times: DCP writes that file last, and `_discard` deletes it first.
#
#   killed while                                   path      .unfinished   .replaced   load reads
#   DCP writes, or the user's files are linked     old       partial       -           path
#   between the two renames                        -         new           old         .replaced
#   .replaced is deleted                           new       -             partial     path
#
# The next save starts with `_prepare`, which renames .replaced back if path is missing, and deletes
# .unfinished. Other ranks wait in `agreeing` meanwhile, so none of them writes to a folder that is renamed.


def _found(path: Path) -> Path:
    """Return the folder, or the one it replaces if a save was killed between the two renames."""
    replaced = path.with_name(path.name + _REPLACED)
    return replaced if not path.exists() and (replaced / _COMPLETE).exists() else path


def _is_missing(path: Path) -> bool:
    """Return whether a path holds nothing of a checkpoint. A damaged checkpoint is not missing."""
    if not path.is_dir():
        return not path.exists()
    return not any(_WRITTEN.fullmatch(file.name) for file in path.iterdir())


def _prepare(path: Path, unfinished: Path) -> None:
    """Remove leftovers of a killed save; raise StateError if the folder is not a checkpoint."""
    if _found(path) != path:
        _found(path).rename(path)
    shutil.rmtree(unfinished, ignore_errors=True)
    others = [path] if path.is_file() else list(path.iterdir()) if path.exists() else []
    if others and not (path / _COMPLETE).exists():
        raise StateError(
            f"{str(path)!r} is not a checkpoint, and saving would replace it: pass a folder that holds"
            f" nothing else, such as {str(path / 'checkpoint')!r}"
        )


def _replace(path: Path, complete: Path) -> None:
    """Rename a complete checkpoint to its final name."""
    replaced = path.with_name(path.name + _REPLACED)
    if path.exists():
        # The user's files are in both folders before the first rename, so that a crash loses none of them.
        for own in path.iterdir():
            if not _WRITTEN.fullmatch(own.name):
                _carry(own, complete / own.name)
        _discard(replaced)  # of a killed save: a folder cannot be renamed to one that is not empty
        path.rename(replaced)
    complete.rename(path)
    _discard(replaced)


def _discard(folder: Path) -> None:
    with contextlib.suppress(OSError):  # usually there is none
        (folder / _COMPLETE).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _carry(source: Path, target: Path) -> None:
    """Put a file or a folder in a second place, without a copy where the file system has hard links."""
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=_link)
    else:
        _link(source, target)


def _link(source: "str | Path", target: "str | Path") -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # such as a network file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)
