"""The handle that `attach` returns."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thinwire.checkpoint.attachment import Attachment
from thinwire.checkpoint.rank_keys import of_shard
from thinwire.checkpoint.wire_state import ranked, saved
from thinwire.engine.futures import at_work
from thinwire.engine.meter import Stats, sent_text
from thinwire.errors import AttachError, OptionError
from thinwire.monitors.audit import AuditRecord
from thinwire.programs.allreduce import Exact
from thinwire.programs.description import described
from thinwire.programs.rules import choose, explain, explain_buckets
from thinwire.step.loading import load_state
from thinwire.step.runner import AttachedRun
from thinwire.step.strategy import Attachable, as_passed, configuration_of


class Wire:
    """The handle that `attach` returns, to inspect and change the exchange between a model's ranks.

    The handle does not keep the model alive. The wire thread ends with the model.
    """

    def __init__(self, runner: AttachedRun) -> None:
        self._runner = runner

    def __repr__(self) -> str:
        size, stats = len(self.replicas), self.stats()
        kind = "replica" if self._runner.context.membership is not None else "rank"
        sent = sent_text(stats.bytes_sent, stats.ddp_bytes)
        return f"Wire({self.program!r}, {size} {kind}{'' if size == 1 else 's'}, step {self.step}, {sent})"

    @property
    def program(self) -> Attachable:
        """The program or configuration that runs now."""
        return as_passed(self._runner.config)

    @property
    def step(self) -> int:
        """The number of committed training steps, without those that overflowed."""
        return self._runner.steps.count

    @property
    def replicas(self) -> tuple[str, ...]:
        """The names of the replicas in the last exchange, as `"rank 0"`. Live replicas join and leave."""
        return self._runner.strategy.replicas

    @property
    def exchanges(self) -> int:
        """The number of exchanges of models that were applied. 0 if only gradients are exchanged."""
        return self._runner.strategy.exchanges

    def join(self) -> None:
        """Wait for the other replicas' next exchange, and continue from their state.

        Only live replicas need it, which join and leave while a job runs (`thinwire.integrations.torchft`).
        The first forward of the model calls it. Call it before to know `step` at once. Elsewhere, and once
        this replica has joined, it does nothing.

        Raises:
            WireError: There were not enough replicas in time.
            MismatchError: This replica is set up differently from the others.
        """
        with at_work():
            self._runner.strategy.join()

    def stats(self) -> Stats:
        """Return bytes and times so far.

        Returns:
            Totals since `attach`, and the records of the latest `history` steps.

        Example::

            print(wire.stats())  # 200 steps: 37.6 MB sent, 3.9 x less than plain DDP, exposed 1.52 s
        """
        return self._runner.engine.stats()

    def audits(self) -> tuple[AuditRecord, ...]:
        """Return the latest audits.

        Returns:
            The errors and residuals by parameter, oldest audit first. Empty without `audit_every`.
        """
        return tuple(self._runner.context.auditor.records)

    def explain(self) -> str:
        """Return a table of which program each parameter uses, and why.

        Returns:
            The table, and a line about the size of DDP's buckets.
        """
        runner = self._runner
        model, program = runner.context.model, runner.config.gradient_program()
        model.module("explain")
        if not model.reduces_gradients:
            program = runner.config.model_program() or program
        shapes = model.shapes()
        chosen = choose(runner.context.rules, program, shapes)
        table = explain(runner.stages.schedule or self.program, chosen, shapes)
        alone = (
            "The wire has one rank. Nothing is sent, so thinwire's programs compress nothing."
            if runner.communicator.size == 1
            else ""
        )
        table = "\n\n".join(filter(None, (runner.strategy.explain(), table, alone)))
        if model.bucket_bytes is None or model.device.type != "cpu":  # which takes buckets whole
            return table
        gradient_bytes = sum(each.nbytes for each in model.parameters().values() if each.requires_grad)
        return f"{table}\n\n{explain_buckets(program, model.bucket_bytes, gradient_bytes)}"

    def swap(self, program: Attachable) -> None:
        """Run another program from the next step on; call it on every rank, between steps.

        Nothing is lost. The next exchange of a parameter applies the residual that the old program has left,
        or the first local step if models are averaged from then on. All other memory is kept. Averaged models
        are synchronised first, as by `finalize`. Their mean includes the residuals of their exchanges. So is
        the optimizer's state: tensors are averaged, and step counts taken from rank 0. A new configuration
        that averages models starts a new period, with a new outer optimizer. A schedule ends with the swap.

        Args:
            program: A program or configuration, as for `attach`, but no `Schedule`.

        Raises:
            AttachError: Called during backward, or after the model is gone.
            MismatchError: Ranks gave different programs. Raised on every rank.
            UnavailableError: `ZeRO` cannot be swapped in or out while its model lives.
        """
        self._runner.context.model.module("swap")
        self._runner.between_steps("swap")
        with at_work():
            self._runner.swap(configuration_of(program))

    def disable(self) -> None:
        """Return to the exact mean; the same as `swap(Exact())`.

        Raises:
            AttachError: Called during backward, or after the model is gone.
            UnavailableError: The model runs `ZeRO`, which cannot be swapped out.
        """
        self.swap(Exact())

    def finalize(self) -> None:
        """Synchronise the models of all ranks; call it on every rank before evaluating and at the end.

        Only `LocalSGD`, `DiLoCo` and `Hierarchical` need it. Exchanges in flight are completed and applied.
        Then parameters become their exact mean, and buffers are treated according to the option `buffers`.
        Ranks compare their steps first, which takes 8 bytes each. Nothing else is sent if all ranks hold the
        same model already. Training may continue afterwards.

        Raises:
            AttachError: Called during backward, or after the model is gone.
            MismatchError: Ranks have taken different numbers of steps. Raised on every rank.
            WireError: A collective failed.
        """
        self._runner.between_steps("finalize")
        self._runner.context.model.module("finalize")
        with at_work():
            self._runner.strategy.finalize()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip all of the model's gradients by their norm, as `torch.nn.utils.clip_grad_norm_`.

        Call it on every rank. With `ZeRO` every rank holds only the gradients of its own parameters, so
        torch's function would clip by a part of the norm. Changes that were made to the gradients before are
        kept. Parameters that DDP ignores are left alone: their gradients differ between ranks, which would
        then clip by different norms and drift apart.

        Args:
            max_norm: The largest norm after clipping.
            norm_type: The kind of norm, usually 2 or `float("inf")`.

        Returns:
            The norm before clipping.
        """
        return self._runner.strategy.clip_grad_norm_(max_norm, norm_type)

    def consolidate_optimizer_state(self, to: int = 0) -> dict[str, Any] | None:
        """Return the whole optimizer state under `ZeRO` on rank `to`, on CPU; None elsewhere.

        Call it on every rank. It sends one owner's shard at a time. `optimizer.load_state_dict` accepts the
        result, with any number of ranks, and without thinwire too. To save without communication, save each
        rank's `optimizer.state_dict()`, and see `merge_optimizer_states`.

        Args:
            to: The rank that receives the state.

        Returns:
            The state on rank `to`, None on other ranks.

        Raises:
            OptionError: `to` is not a rank of the model's group.
        """
        self._runner.between_steps("consolidate_optimizer_state")
        size = self._runner.communicator.size
        if not isinstance(to, int) or not 0 <= to < size:
            raise OptionError(f"to={to!r} is not a rank of the model's group: it has 0 to {size - 1}")
        with at_work():
            return self._runner.strategy.consolidate_optimizer_state(to)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state, as CPU tensors and plain values under a key that names the rank.

        States differ between ranks, so every rank must save its own. With averaged models, it must save its
        own optimizer too. Exchanges in flight are completed and saved, and so are this rank's parameters
        while models differ. The key, such as `"rank 0 of 2"`, keeps ranks separate in
        `torch.distributed.checkpoint`. With FSDP2 ranks number replicas, under a key that names the shard.

        Returns:
            A dict that `torch.load(..., weights_only=True)` accepts.

        Raises:
            AttachError: Called during backward.
        """
        runner = self._runner
        runner.between_steps("state_dict")
        with at_work():
            strategy = runner.strategy.state_dict()  # may wait, and change the memory saved below
        state = ranked(
            saved(
                program=described(runner.config),
                schedule_ended=runner.schedule_ended,
                step=self.step,
                place=(runner.communicator.rank, runner.communicator.size),
                buckets=runner.layout.upcoming,
                memory=runner.context.memory,
                strategy=strategy,
            )
        )
        shard = runner.context.model.shard_key
        return state if shard is None else {shard: state}

    @torch.inference_mode(False)  # loaded tensors are updated in place later
    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, keep_buckets: bool = True
    ) -> None:
        """Load a saved state of the same program; every rank must call it, each with its own state.

        Valid before the first backward, after the model and the optimizer were loaded. With another number of
        ranks than at the save, give every rank all ranks' states, as a list or as `read_states` reads them.
        Shared state is kept. Residuals and models that differ between ranks are replaced by their mean, so
        nothing is lost.

        Args:
            state: The result of `state_dict` on this rank, or all ranks' states.
            keep_buckets: Whether parameters are exchanged in the groups that were saved, so that results are
                equal bit by bit. False takes DDP's new buckets, as after a change of `bucket_cap_mb`.

        Raises:
            StateError: The state does not fit. Nothing was changed.
            MismatchError: Ranks load states of different steps, or another rank raised. Nothing was changed.
        """
        self._runner.between_steps("load_state_dict")
        self._runner.context.model.module("load_state_dict")
        shard = self._runner.context.model.shard_key
        own = state if shard is None else of_shard(state, shard)
        with at_work():
            load_state(self._runner, own, keep_buckets=keep_buckets)

    def attachment(self, what: str) -> Attachment:
        """Settle the latest step, and return the objects that the wire is attached to.

        Code that saves, resumes or wraps a training needs them, such as an integration of a framework.

        Args:
            what: The caller's name, for the error message.

        Returns:
            The model, its optimizers, the connection of its ranks, and what of their state ranks share now.

        Raises:
            AttachError: Called during backward, or in a signal handler that interrupted a step.
        """
        runner = self._runner
        runner.between_steps(what)
        return Attachment(
            model=runner.context.model,
            communicator=runner.communicator,
            optimizers=runner.context.optimizers(),
            scaler=runner.context.scaler,
            optimizer_state_differs=runner.config.optimizer_state_differs,
            replicas_equal=runner.strategy.replicas_equal,
            saves_model=runner.strategy.saves_model,
            trains_locally=any(stage.trains_locally for stage in runner.stages.all),
        )

    def await_optimizer_states(self) -> None:
        """Accept another rank's optimizer state, because this rank's own is loaded after it.

        Frameworks load rank 0's optimizer on every rank. Under `ZeRO` it lacks the moments of parameters that
        this rank steps, which raises at once without this call, and with it at the next step.
        """
        self._runner.awaits_optimizers = True

    def __reduce__(self) -> str:
        raise AttachError(
            "a wire belongs to a running model and cannot be copied or pickled: copy ddp.module, or save"
            " wire.state_dict()"
        )
