"""One line turns a DDP model's gradient exchange into a program: `wire = attach(ddp, BF16())`."""

# DDP inspects a hook's annotations and refuses strings: no `from __future__ import annotations` here.

import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.bridge import Bridge, agree_on, decline, in_backward, parameters_of, set_up_of
from thinwire.errors import AttachError, OptionError, StateError, ThinwireError
from thinwire.programs.allreduce import Exact
from thinwire.programs.program import Memory, Program, check_fit, describe, require_program
from thinwire.programs.replicas import compare_replicas, fingerprints
from thinwire.wire.agree import Meeting
from thinwire.wire.meter import Stats

_STATE = {"format", "program", "step", "rank", "world_size", "memory"}
_FORMAT = 1


def attach(
    ddp: DistributedDataParallel,
    program: Program,
    *,
    timeout: timedelta | float | None = None,
    check_every: int = 0,
    history: int = 1000,
) -> "Wire":
    """Average `ddp`'s gradients by `program` from now on.

    Every rank of the model's process group must call it, at the same point: ranks compare versions,
    program, options and parameters, and a difference raises on all of them.

    Args:
        ddp: A DistributedDataParallel model that has no communication hook yet.
        program: What to do with each bucket, such as `Exact()` or `BF16()`.
        timeout: Seconds (or a timedelta) that a collective may take before it is an error on this rank.
            Default: the time limit of the model's process group. Choose it well above the longest pause
            of any rank within a step.
        check_every: Every so many steps, compare a fingerprint of all parameters across ranks, and raise
            `DriftError` naming the first that differs. Costs one pass over the parameters and 8 bytes
            per parameter tensor and rank. 0: never.
        history: How many steps `wire.stats()` keeps in full.

    Returns:
        The wire. Keep it for `stats`, `swap` and `state_dict`; dropping it changes nothing.

    Example::

        wire = thinwire.attach(ddp, thinwire.BF16())
        ...  # train as before
        print(wire.stats())
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise AttachError(
            f"attach needs a DistributedDataParallel model, not a {type(ddp).__name__}: wrap it with"
            " torch.nn.parallel.DistributedDataParallel(model) first"
        )
    try:
        _check_hooks(ddp)
        _check_program(program, ddp)
        _check_at_least("check_every", check_every, 0, "0 never compares the replicas")
        _check_at_least("history", history, 1, "stats() shows the latest steps")
        limit = _limit(timeout)
    except ThinwireError as error:
        decline(str(error), Meeting(ddp.process_group))
        raise
    set_up = set_up_of(ddp, program, check_every=check_every)
    bridge = Bridge(ddp, ddp.process_group, set_up, limit=limit, history=history)
    wire = Wire(bridge, program, ddp, check_every)
    try:
        ddp.register_comm_hook(wire, thinwire_hook)
    except RuntimeError as error:
        bridge.engine.close()
        raise AttachError(f"DDP did not accept the hook: {error}") from error
    return wire


def thinwire_hook(wire: "Wire", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The one hook that `attach` registers: it runs whatever program the wire holds now."""
    return wire._average(bucket)


class Wire:
    """What `attach` returns: the handle to a model's gradient exchange.

    It does not keep the model alive, and the model's thread ends with the model.
    """

    def __init__(
        self,
        bridge: Bridge,
        program: Program,
        ddp: DistributedDataParallel,
        check_every: int,
    ) -> None:
        self._bridge = bridge
        self._program = program
        self._memory = Memory()
        self._ddp = weakref.ref(ddp)
        self._check_every = check_every

    @property
    def program(self) -> Program:
        """The program that runs now."""
        return self._program

    @property
    def step(self) -> int:
        """How many backward passes have communicated."""
        return self._bridge.engine.step

    def stats(self) -> Stats:
        """Bytes and times so far: totals, and the latest steps in full."""
        return self._bridge.engine.stats()

    def swap(self, program: Program) -> None:
        """Run another program from the next step on; call it on every rank, between steps.

        What the old program remembered by parameter stays, so that swapping back loses nothing.
        """
        ddp, communicator = self._ddp(), self._bridge.communicator
        if ddp is None:
            raise AttachError("swap was called on a wire whose DDP model is gone: attach to a new one")
        _check_program(program, ddp)
        self._between_steps("swap")
        agree_on({"program": describe(program)}, communicator.meeting, communicator.limit, topic="swap")
        self._program = program

    def disable(self) -> None:
        """Back to the exact mean; the same as `swap(Exact())`."""
        self.swap(Exact())

    def state_dict(self) -> dict[str, Any]:
        """This rank's own state, by parameter name: tensors and plain values only.

        Ranks differ, so every rank must save its own.
        """
        self._between_steps("state_dict")
        return {
            "format": _FORMAT,
            "program": describe(self._program),
            "step": self.step,
            "rank": self._bridge.communicator.rank,
            "world_size": self._bridge.communicator.size,
            "memory": self._memory.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state of the same program; every rank must call it, each with its own state.

        Valid before the first backward. Raises StateError and changes nothing where the state does not fit,
        MismatchError where ranks come from different steps.
        """
        self._between_steps("load_state_dict")
        communicator = self._bridge.communicator
        try:
            memory = self._checked_state(state)
        except StateError as error:
            decline(str(error), communicator.meeting, topic="load_state_dict")
            raise
        saved = {"step": str(state["step"])}
        agree_on(saved, communicator.meeting, communicator.limit, topic="load_state_dict")
        self._memory = memory
        self._bridge.engine.step = state["step"]

    def _checked_state(self, state: Mapping[str, Any]) -> Memory:
        """The memory that a state holds, if all of the state fits."""
        if not isinstance(state, Mapping) or not set(state) >= _STATE:
            raise StateError("this is no state of a thinwire wire: it needs what wire.state_dict() returns")
        if state["format"] != _FORMAT:
            raise StateError(
                f"format {state['format']!r} is not {_FORMAT}: the state was written by another version"
            )
        if state["program"] != describe(self._program):
            raise StateError(
                f"the state belongs to {state['program']}, but {describe(self._program)} is running: attach"
                " the saved program, load, and swap afterwards"
            )
        step = state["step"]
        if not isinstance(step, int) or step < 0:
            raise StateError(f"step={step!r} must be a whole number from 0 on")
        communicator = self._bridge.communicator
        whose = (state["rank"], state["world_size"])
        if whose != (communicator.rank, communicator.size):
            raise StateError(
                f"the state is that of rank {whose[0]} of {whose[1]}, and this is rank {communicator.rank} of"
                f" {communicator.size}: residuals are each rank's own, so each loads what it saved itself"
            )
        ddp = self._ddp()
        shapes = {} if ddp is None else {name: one.shape for name, one in parameters_of(ddp).items()}
        memory = Memory()
        memory.load_state_dict(state["memory"], shapes)
        return memory

    def _average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        engine = self._bridge.engine
        if self._check_every and not engine.mid_step and engine.step % self._check_every == 0:
            self._compare_replicas()
        return self._bridge.run(self._program, bucket, self._memory)

    def _compare_replicas(self) -> None:
        ddp, engine = self._ddp(), self._bridge.engine
        assert ddp is not None, "its own hook is running"
        replica = parameters_of(ddp)
        own = fingerprints(replica.values())
        check = compare_replicas(list(replica), own, engine.step, active=in_backward())
        engine.submit(check, label="the comparison of replicas", last=False, instead=own)

    def __reduce__(self) -> str:
        raise AttachError(
            "a wire belongs to a running model and cannot be copied or pickled: copy ddp.module, or save"
            " wire.state_dict()"
        )

    def _between_steps(self, what: str) -> None:
        if self._bridge.engine.mid_step:
            raise AttachError(
                f"{what} was called during backward, or after one that was interrupted: call it between steps"
            )
        self._bridge.engine.settle()


def _check_hooks(ddp: DistributedDataParallel) -> None:
    for hook, _ in ddp._comm_hooks:
        if hook is thinwire_hook:
            raise AttachError("this model has a wire already: use wire.swap(program) to change it")
        raise AttachError(
            f"this model has the communication hook {hook.__qualname__!r} already, and DDP keeps one for"
            " life: wrap the module in a new DistributedDataParallel"
        )


def _check_at_least(name: str, value: object, least: int, why: str) -> None:
    if not isinstance(value, int) or value < least:
        raise OptionError(f"{name}={value!r} must be a whole number, at least {least}: {why}")


def _check_program(program: Program, ddp: DistributedDataParallel) -> None:
    require_program(program)
    describe(program)
    shapes = {name: parameter.shape for name, parameter in parameters_of(ddp).items()}
    check_fit(program, shapes, ddp.process_group.size())


def _limit(timeout: timedelta | float | None) -> timedelta | None:
    if timeout is None:
        return None
    try:
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except (TypeError, ValueError, OverflowError):
        limit = timedelta(0)
    if limit <= timedelta(0):
        raise OptionError(f"timeout={timeout!r} must be a positive number of seconds: it limits every wait")
    return limit
