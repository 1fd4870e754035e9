"""Checkpoints of a whole job: model, optimizer, wire and further objects.

They are built on `torch.distributed.checkpoint` (DCP). State that ranks share is stored once, and each rank's
own state separately. A folder gets its name only when it is complete.
"""

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

from thinwire.checkpoint.dcp import PerRank, find_states, read_model, read_states
from thinwire.checkpoint.optimizers import per_rank
from thinwire.checkpoint.rank_keys import choose, rank_key
from thinwire.checkpoint.trees import copied, means, same
from thinwire.checkpoint.wire_state import all_or_none
from thinwire.engine.agreement import agree_on, agreeing
from thinwire.engine.futures import at_work
from thinwire.errors import OptionError, StateError, UnavailableError
from thinwire.models.ddp.model import DDPModel
from thinwire.models.ddp.unwrap import ddp_of
from thinwire.programs.parameter_names import original_name
from thinwire.step.model import Model
from thinwire.wire import Wire

_UNFINISHED, _REPLACED = ".unfinished", ".replaced"
_WRITTEN = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp")
"""The names of files that torch.distributed.checkpoint writes. Other files in the folder are the user's."""
_REPLICAS = "replicas"
"""The key of model state that ranks do not share, such as buffers under broadcast_buffers=False."""


def save_checkpoint(
    folder: "str | os.PathLike[str]",
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    wire: Wire,
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

    target = _target(model, wire, "save_checkpoint")
    path, communicator = Path(folder).resolve(), wire._runner.communicator
    unfinished = path.with_name(path.name + _UNFINISHED)
    wire._runner.between_steps("save_checkpoint")  # before anything is sent
    state = wire.state_dict()  # ends an open step, so it comes before the model and the optimizer
    with agreeing(communicator.rendezvous, communicator.limit, "save_checkpoint"):
        _check_numpy(communicator.size)
        parts = _parts(target, optimizer, wire, extra)
        if communicator.rank == 0:
            _prepare(path, unfinished)
    with at_work():
        dcp.save({**parts, "wire": state}, checkpoint_id=unfinished, process_group=target.group)
        with agreeing(communicator.rendezvous, communicator.limit, "save_checkpoint in place"):
            if communicator.rank == 0:
                _replace(path, unfinished)
    return path


@torch.inference_mode(False)  # loaded tensors are updated in place later
def load_checkpoint(
    folder: "str | os.PathLike[str]",
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    wire: Wire,
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
    target = _target(model, wire, "load_checkpoint")
    module = target.module("load_checkpoint")
    wire._runner.between_steps("load_checkpoint")  # before anything is sent
    communicator = wire._runner.communicator
    optimizers = per_rank(optimizer, target.group)
    path = _found(Path(folder).resolve())
    if missing_ok:
        missing = _is_missing(path)
        found = {"checkpoint": f"{'none' if missing else 'one'} in {str(folder)!r}"}
        agree_on(found, communicator.rendezvous, communicator.limit, "load_checkpoint found")
        if missing:
            return {}
    with all_or_none(communicator, "load_checkpoint"):
        if not (path / ".metadata").exists():
            raise StateError(
                f"there is no checkpoint at {str(path)!r}: pass the folder that thinwire.save_checkpoint has"
                " written, or missing_ok=True to start without one where the folder is empty"
            )
        local = _local_state(path, communicator.rank, communicator.size)
        tensors = read_model(path, module, local)
        moments, state, others = (read_states(path, key) for key in ("optimizer", "wire", "extra"))
        saved = own_extra(others, extra, communicator.rank, communicator.size)
    optimizers.load_state_dict(moments)
    module.load_state_dict(tensors)
    wire.load_state_dict(state)  # last: it may bring this rank's own parameters
    for name, held in extra.items():
        held.load_state_dict(saved.pop(name))
    return saved


def _target(model: nn.Module, wire: Wire, what: str) -> Model:
    """Return the handle of the model to save or load: that of the DDP model given, or else the wire's own."""
    own = wire._runner.context.model
    if own.shard_key is not None:
        raise UnavailableError(
            f"{what} has one rank write whole parameters, and this rank holds {own.shard_key}: save model and"
            " optimizer with torch.distributed.checkpoint, and the wire with them, as"
            " dcp.save({'model': ..., 'optimizer': ..., 'wire': wire}, checkpoint_id=folder)"
        )
    if isinstance(own, DDPModel):
        return DDPModel(ddp_of(model))
    if own.module(what) is not model:
        raise OptionError(
            f"{what} was called with another {type(model).__name__} than the one that the wire is attached"
            " to: pass the model that was passed to attach"
        )
    return own


def _parts(
    target: Model,
    optimizer: Optimizer | Sequence[Optimizer],
    wire: Wire,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Return this rank's state for DCP, except the wire's.

    DCP stores a key that several ranks give once, and takes each of its tensors from a different rank. Only
    rank 0 therefore gives the state that ranks share. State that differs is under a key that names the rank.
    """
    rank, size = target.group.rank(), target.group.size()
    strategy = wire._runner.strategy
    own = {name: _state_of(held) for name, held in extra.items()}
    parts: dict[str, Any] = {"extra": {rank_key(rank, size): (own,)}}
    moments = per_rank(optimizer, target.group).state_dict()
    if wire._runner.config.optimizer_state_differs or not strategy.replicas_equal:
        parts["optimizer"] = moments
    elif rank == 0:
        parts["optimizer"] = {rank_key(0, 1): moments[rank_key(0, size)]}
    model = {original_name(name): one for name, one in target.module().state_dict().items()}
    _check_loadable(own, moments, model)
    if rank == 0:
        parts["model"] = model
    differ = not strategy.replicas_equal and not strategy.saves_model
    local = set(model) if differ else target.local_state(strategy.saves_model)
    if local:
        tensors = copied({name: model[name] for name in model if name in local}, _to_cpu)
        parts[_REPLICAS] = {rank_key(rank, size): (tensors,)}
    return parts


def _check_loadable(extra: Mapping[str, Any], moments: Any, model: Mapping[str, Any]) -> None:
    """Raise StateError if a state contains objects that `load_checkpoint` would not unpickle."""
    from thinwire.checkpoint.untrusted import check_loadable  # imports torch.distributed.checkpoint

    others = {name: one for name, one in model.items() if not isinstance(one, torch.Tensor)}
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
        elif name in given and not all(same(each[0], one) for one in each):
            raise StateError(
                f"{saved_size} ranks saved and {size} load, and the states of {name!r} differ: save and load"
                f" it as {name}=PerRank(..., merge=...)"
            )
        else:
            chosen[name] = each[0]
    return chosen


def _scale_of(state: Mapping[str, Any]) -> float:
    return float(state.get("scale", 0.0))


def _found(path: Path) -> Path:
    """Return the folder, or the one it replaces if a save was interrupted in between."""
    replaced = path.with_name(path.name + _REPLACED)
    return replaced if not path.exists() and replaced.exists() else path


def _is_missing(path: Path) -> bool:
    """Return whether nothing of a checkpoint is at a path. An incomplete one must not pass for none."""
    written = (_WRITTEN.fullmatch(one.name) for one in path.iterdir()) if path.is_dir() else [path.exists()]
    return not any(written)


def _prepare(path: Path, unfinished: Path) -> None:
    """Remove leftovers of an interrupted save; raise StateError if the folder is not a checkpoint."""
    if _found(path) != path:
        _found(path).rename(path)
    shutil.rmtree(unfinished, ignore_errors=True)
    others = [path] if path.is_file() else list(path.iterdir()) if path.exists() else []
    if others and not (path / ".metadata").exists():
        raise StateError(
            f"{str(path)!r} is not a checkpoint, and saving would replace it: pass a folder of its own, such"
            f" as {str(path / 'checkpoint')!r}"
        )


def _replace(path: Path, complete: Path) -> None:
    """Rename a complete checkpoint to its final name; `_found` finds a complete one at any moment.

    The user's own files are in both folders before the first rename, so that a crash loses none of them.
    """
    replaced = path.with_name(path.name + _REPLACED)
    if path.exists():
        for own in path.iterdir():
            if not _WRITTEN.fullmatch(own.name):
                _carry(own, complete / own.name)
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    complete.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


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
