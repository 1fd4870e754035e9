"""What `attach` returns: the handle to what a model's ranks exchange."""

# DDP inspects a hook's annotations and refuses strings: no `from __future__ import annotations` here.

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.averaging.averager import Averager
from thinwire.averaging.policy import Averaging
from thinwire.bridge import Bridge, agree_on, decline, in_backward, parameters_of
from thinwire.checks import check_program
from thinwire.errors import AttachError, OptionError, StateError, UnavailableError
from thinwire.programs.allreduce import Exact
from thinwire.programs.program import MODELS, Memory, Program, describe
from thinwire.programs.replicas import compare_replicas, fingerprints
from thinwire.sharding.sharder import Sharder
from thinwire.sharding.zero import ZeRO
from thinwire.state import FORMAT, memory_for, own_state, ranked, readable, where_it_is
from thinwire.wire.communicator import Communicator
from thinwire.wire.meter import Stats


def thinwire_hook(wire: "Wire", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The one hook that `attach` registers: it runs whatever program the wire holds now."""
    return wire._average(bucket)


class Wire:
    """What `attach` returns: the handle to what a model's ranks exchange.

    It does not keep the model alive, and the model's thread ends with the model.
    """

    def __init__(
        self,
        bridge: Bridge,
        program: Program | Averaging | ZeRO,
        ddp: DistributedDataParallel,
        optimizers: Sequence[Optimizer],
        check_every: int,
    ) -> None:
        self._bridge = bridge
        self._program = program
        self._memory = Memory()
        self._ddp = weakref.ref(ddp)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._check_every = check_every
        self._averager = self._new_averager(program, ddp)
        if self._averager is not None:
            self._averager.start(bridge.engine)
        self._sharder = self._new_sharder(program, ddp)

    @property
    def program(self) -> Program | Averaging | ZeRO:
        """The program, or the way of averaging models, that runs now."""
        return self._program

    @property
    def step(self) -> int:
        """How many backward passes have communicated."""
        return self._bridge.engine.step

    def stats(self) -> Stats:
        """Bytes and times so far: totals, and the latest steps in full."""
        return self._bridge.engine.stats()

    def swap(self, program: Program | Averaging | ZeRO) -> None:
        """Run another program from the next step on; call it on every rank, between steps.

        What the old program remembered by parameter stays, so that swapping back loses nothing. Models that
        were averaged are first made one, as by `finalize`, and so is the optimizer's state: means, and of
        counts rank 0's. A new way of averaging counts from here on, and its outer optimizer starts anew.
        """
        ddp, communicator = self._ddp(), self._bridge.communicator
        if ddp is None:
            raise AttachError("swap was called on a wire whose DDP model is gone: attach to a new one")
        optimizers = [one for reference in self._optimizers if (one := reference()) is not None]
        check_program(program, ddp, optimizers)
        self._between_steps("swap")
        if self._sharder is not None or isinstance(program, ZeRO):
            raise UnavailableError(
                f"swap to {describe(program)}: under ZeRO owners keep the optimizer's state, so it begins and"
                " ends with the DDP model: load what wire.consolidate_optimizer_state() gives on every rank,"
                " and wrap the module in a new DistributedDataParallel"
            )
        old = self._averager
        if old is not None:
            old.end_open_step()
        agree_on({"program": describe(program)}, communicator.meeting, communicator.limit, topic="swap")
        new = self._new_averager(program, ddp)  # what it refuses leaves everything as it is
        if old is not None:
            old.retire()
        if new is not None:
            new.start(self._bridge.engine)
        self._program, self._averager = program, new

    def finalize(self) -> None:
        """Bring all ranks to one model: call it on every rank when training ends, and before evaluating.

        Only `LocalSGD` and its like need it: exchanges under way are used, then parameters become their exact
        mean, and buffers what `buffers` says. Where ranks hold one model already, nothing is sent. Training
        may go on afterwards.
        """
        self._between_steps("finalize")
        if self._averager is None:
            return
        if self._ddp() is None:
            raise AttachError(
                "finalize was called on a wire whose DDP model is gone: call it while that lives"
            )
        self._averager.finalize()

    def disable(self) -> None:
        """Back to the exact mean; the same as `swap(Exact())`."""
        self.swap(Exact())

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` of all of the model's gradients; call it on every rank.

        With `ZeRO` every rank holds only the gradients of its own parameters, so that torch's function would
        clip by a part of the norm. Returns the norm before.
        """
        ddp = self._ddp()
        if ddp is None:
            raise AttachError("clip_grad_norm_ was called on a wire whose DDP model is gone")
        if self._sharder is not None:
            return self._sharder.clip(max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm, norm_type)

    def consolidate_optimizer_state(self, to: int = 0) -> dict[str, Any] | None:
        """Under `ZeRO`, the whole optimizer state on rank `to`, on CPU; None elsewhere.

        Call it on every rank; it travels one owner's share at a time. `optimizer.load_state_dict` takes it,
        with any number of ranks, and without thinwire too. To save without communication, save each rank's
        `optimizer.state_dict()`, and see `merge_optimizer_states`.
        """
        self._between_steps("consolidate_optimizer_state")
        if self._sharder is None:
            raise AttachError("consolidate_optimizer_state is for ZeRO: every rank has the whole state here")
        size = self._bridge.communicator.size
        if not isinstance(to, int) or not 0 <= to < size:
            raise OptionError(f"to={to!r} is not a rank of the model's group: it has 0 to {size - 1}")
        return self._sharder.collect(to)

    def state_dict(self) -> dict[str, Any]:
        """This rank's own state, under a key that names the rank: tensors, on the CPU, and plain values only.

        Ranks differ, so every rank must save its own; where models are averaged, its own optimizer too. What
        is under way is waited for and saved. This rank's parameters are in it while models are apart. The
        key, `"rank 0 of 2"`, is what has `torch.distributed.checkpoint` keep ranks apart.
        """
        self._between_steps("state_dict")
        averaging = (
            None if self._averager is None else self._averager.state_dict()
        )  # may wait, and change memory
        return ranked(
            {
                "format": FORMAT,
                "program": describe(self._program),
                "step": self.step,
                "rank": self._bridge.communicator.rank,
                "world_size": self._bridge.communicator.size,
                "memory": self._memory.state_dict(),
                "averaging": averaging,
                "sharding": None if self._sharder is None else self._sharder.state_dict(),
            }
        )

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a saved state of the same program; every rank must call it, each with its own state.

        Valid before the first backward, after the model and the optimizer were loaded. With another number of
        ranks than at the save, give every rank all ranks' states, as a list or as `read_states` reads them:
        what they shared is taken over, residuals and models that were apart become their mean, so nothing is
        lost.

        Raises StateError and changes nothing where the state does not fit, MismatchError where ranks come
        from different steps.
        """
        self._between_steps("load_state_dict")
        communicator = self._bridge.communicator
        ddp = self._ddp()
        try:
            with readable():
                own = own_state(state, describe(self._program), communicator.rank, communicator.size)
                memory = memory_for({} if ddp is None else parameters_of(ddp), own["memory"])
                take_overs = [
                    runner.prepare(own.get(key))
                    for key, runner in (("averaging", self._averager), ("sharding", self._sharder))
                    if runner is not None
                ]
                place = where_it_is(own.get("averaging"))
        except StateError as error:
            decline(str(error), communicator.meeting, topic="load_state_dict")
            raise
        saved = {"step": str(own["step"]), "averaging": place}
        agree_on(saved, communicator.meeting, communicator.limit, topic="load_state_dict")
        self._memory.take_over(memory)
        self._bridge.engine.step = own["step"]
        for take_over in take_overs:
            take_over()

    def _new_sharder(
        self, program: Program | Averaging | ZeRO, ddp: DistributedDataParallel
    ) -> Sharder | None:
        if not isinstance(program, ZeRO):
            return None
        (optimizer,) = [one for reference in self._optimizers if (one := reference()) is not None]
        communicator = Communicator(ddp.process_group, self._bridge.communicator.limit)
        communicator.open()
        return Sharder(program, ddp, parameters_of(ddp), optimizer, communicator, self._bridge.engine)

    def _new_averager(
        self, program: Program | Averaging | ZeRO, ddp: DistributedDataParallel
    ) -> Averager | None:
        if not isinstance(program, Averaging):
            return None
        optimizers = [one for reference in self._optimizers if (one := reference()) is not None]
        communicator = Communicator(ddp.process_group, self._bridge.communicator.limit)
        communicator.open()
        try:
            return Averager(
                program,
                ddp,
                parameters_of(ddp),
                optimizers,
                communicator,
                self._bridge.engine.meter,
                self._memory.scoped(MODELS),
                self._check_every,
            )
        except BaseException:
            communicator.close()
            raise

    def _average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        engine, averager = self._bridge.engine, self._averager
        same = averager is None or averager.warm
        if same and self._check_every and not engine.mid_step and engine.step % self._check_every == 0:
            self._compare_replicas()
        if self._sharder is not None:
            return self._reduce_to_owners(bucket, self._sharder)
        if averager is None:
            assert not isinstance(self._program, Averaging | ZeRO), "those have runners of their own"
            return self._bridge.run(self._program, bucket, self._memory)
        if not in_backward():
            raise UnavailableError(
                "a rank has run out of inputs (Join), and models that are averaged cannot go on without it:"
                " give every rank the same number of batches"
            )
        future = self._bridge.run(averager.gradient_program(), bucket, self._memory)
        if bucket.is_last():
            averager.backward_ended()
        return future

    def _reduce_to_owners(
        self, bucket: dist.GradBucket, sharder: Sharder
    ) -> torch.futures.Future[torch.Tensor]:
        if not in_backward():
            raise UnavailableError(
                "a rank has run out of inputs (Join), and ZeRO cannot go on without it: give every rank the"
                " same number of batches"
            )
        if bucket.index() == 0:
            sharder.before_backward()
        future = self._bridge.run(sharder, bucket, self._memory)
        if bucket.is_last():
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(sharder.after_backward))  # after DDP's own, which writes the gradients
        return future

    def _close(self) -> None:
        for runner in (self._averager, self._sharder):
            if runner is not None:
                runner.close()

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
