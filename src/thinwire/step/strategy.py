"""The protocol behind `attach`, which binds a configuration to a model to get a running strategy.

    configuration   frozen and comparable, written by the user: `DiLoCo(period=32)`, `ZeRO()`
    strategy        that configuration running on one model, with all mutable state

A gradient program needs no configuration class: it runs as `Gradients(program)`. Anything else derives from
`Configuration` and returns the `Strategy` that runs it from `bind`. Configurations that average models derive
from `Averaging`, which brings its strategy. A strategy of your own needs no change of thinwire:

    @dataclass(frozen=True)
    class Every(Configuration):
        steps: int

        def bind(self, context):
            return EveryStrategy(self, context)

    wire = thinwire.attach(ddp, Every(4))

`docs/strategies.md` builds one step by step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch.optim import Optimizer

from thinwire.amp.loss_scale import ScalerOption
from thinwire.checkpoint.optimizer_state import check_owned
from thinwire.checkpoint.trees import same
from thinwire.errors import AttachError, OptionError, StateError, UnavailableError
from thinwire.programs.allreduce import Exact
from thinwire.programs.description import ReprAsWritten, describe, short
from thinwire.programs.program import Program, ProgramFunction
from thinwire.programs.rules import Rules, exceptions_of
from thinwire.programs.wrapper import as_program
from thinwire.step.model import Model

if TYPE_CHECKING:
    from thinwire.engine.comm.group_communicator import GroupCommunicator
    from thinwire.engine.engine import Engine
    from thinwire.monitors.auditor import Auditor, OnExcess
    from thinwire.programs.memory import Memory
    from thinwire.step.transaction import Steps


class Configuration(ReprAsWritten):
    """Base class of configurations, which `attach` accepts. Subclasses are frozen dataclasses."""

    swappable: ClassVar[bool] = True
    """Whether `swap` or a `Schedule` can replace it, or put it in place of another one, on the same model."""
    fixed_because: ClassVar[str] = (
        "it begins and ends with its DDP model: wrap the module in a new DistributedDataParallel, and attach"
        " the other one to that"
    )
    """The reason why `swappable` is False, and the alternative. Errors show it after the configuration."""
    schedulable: ClassVar[bool] = True
    """Whether it can be a stage of a `Schedule`. One that changes itself while it runs cannot."""
    optimizer_state_differs: ClassVar[bool] = False
    """Whether optimizer states differ between ranks, so that a checkpoint needs each rank's own."""
    trains_locally: ClassVar[bool] = False
    """Whether ranks can train without exchanging gradients, so that no DDP model is needed."""
    exchanges_parameters: ClassVar[bool] = False
    """Whether ranks exchange parameters, so that they must agree on which of them are frozen."""

    @property
    def steps_in_backward(self) -> bool:
        """True if the optimizer steps inside backward, so that an overflowed step cannot be skipped."""
        return False

    def validate(self, target: "Target") -> None:
        """Check the configuration against a model before anything is changed or sent.

        Args:
            target: The model, its optimizers and the other options passed to `attach`.

        Raises:
            OptionError: The configuration does not fit the model, its ranks or its optimizers.
        """

    def stepped_here(self, target: "Target") -> dict[str, torch.nn.Parameter]:
        """Return the parameters that this rank's optimizer steps, and whose state it needs, by name.

        Args:
            target: The model and the options passed to `attach`.
        """
        return {name: tensor for name, tensor in target.model.parameters().items() if tensor.requires_grad}

    def bind(self, context: "Context") -> "Strategy":
        """Return the strategy that runs this configuration on a model. Collective.

        Args:
            context: The model, engine, memory, rules and auditor that the wire's strategies share.

        Returns:
            A new strategy, which the caller starts.
        """
        raise OptionError(f"{self!r} has no strategy: give its class a method bind(context) that returns one")

    def variants(self) -> Sequence["Configuration"]:
        """Return the configurations that this one may become while it runs, including itself.

        A saved state of any of them can be loaded.
        """
        return [self]

    def gradient_program(self) -> Program:
        """Return the program for gradients, used in steps that exchange them."""
        return Exact()

    def with_gradient_program(self, program: Program) -> "Configuration":
        """Return the same configuration with another program for gradients.

        Args:
            program: The program to use instead, such as the fallback of an audit.

        Returns:
            A new configuration.

        Raises:
            OptionError: The configuration has no exchangeable program for gradients.
        """
        raise OptionError(f"on_excess={program!r} cannot take over from {self!r}: use 'warn' or 'raise'")

    def model_program(self) -> Program | None:
        """Return the program for exchanged models, or None if models are exchanged exactly or not at all."""
        return None

    def with_model_program(self, program: Program) -> "Configuration":
        """Return the same configuration with another program for exchanged models.

        Args:
            program: The program to use instead, such as the fallback of an audit.
        """
        return self


@dataclass(frozen=True)
class Target:
    """The model and options that a configuration is validated against.

    Attributes:
        model: The attached model.
        optimizers: The optimizers passed to `attach`.
        audits: Whether audits are enabled.
        scaler: The GradScaler passed to `attach`. None if there is none, "auto" to detect it.
    """

    model: Model
    optimizers: Sequence[Optimizer]
    audits: bool = False
    scaler: ScalerOption = "auto"

    def trained_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the trainable parameters, by name."""
        trained = self.model.parameters().items()
        return {name: parameter.shape for name, parameter in trained if parameter.requires_grad}

    def check_states(self, config: Configuration) -> None:
        """Raise StateError if an optimizer was loaded with a part of its state that is not this rank's."""
        for optimizer in self.optimizers:
            state = {"state": optimizer.state, "param_groups": optimizer.param_groups}
            check_owned(state, optimizer.param_groups, config.stepped_here(self))


@dataclass(frozen=True)
class Context:
    """The objects and options that all strategies of one wire share.

    Attributes:
        model: The attached model.
        communicator: The ranks that hold replicas of the model, on thinwire's own process group.
        engine: Runs programs on that group.
        steps: The training steps and their count.
        settle_leftover: A function that settles a step whose backward was interrupted after its last bucket.
        memory: The tensors that programs keep between steps, by parameter name.
        rules: The rules that give some parameters another program.
        auditor: The auditor of exchanges.
        check_every: Steps between two comparisons of replicas, or 0 for none. None for the default.
        optimizers: A function that returns the optimizers passed to `attach` that still exist.
        scaler: The GradScaler passed to `attach`.
        membership: A function that makes the membership of averaged models from a replica, a function that
            returns its contributions, and this context. None: the fixed ranks of `communicator`.
    """

    model: Model
    communicator: "GroupCommunicator"
    engine: "Engine"
    steps: "Steps"
    settle_leftover: Callable[[], None]
    memory: "Memory"
    rules: Rules
    auditor: "Auditor"
    check_every: int | None
    optimizers: Callable[[], list[Optimizer]]
    scaler: ScalerOption
    membership: Callable[[Any, Any, "Context"], Any] | None = None

    def target(self) -> Target:
        """Return the target that a configuration is validated against."""
        return Target(self.model, self.optimizers(), bool(self.auditor.every), self.scaler)

    def exceptions(self, program: Program) -> dict[str, Program]:
        """Return the parameters that do not use `program` under the rules, with the program of each."""
        return exceptions_of(self.rules, program, self.model.shapes())


class Strategy:
    """A configuration running on one model. Override the methods that differ from plain gradient averaging.

    One step makes these calls, in this order: `begin_step` with its first bucket, `exceptions`, `wrap` for
    each program, then `agree_finite` and `end_backward` after backward. If `begins_steps` is False, the first
    three are made only where the programs may have changed.

    Args:
        config: The configuration to run.
        context: The objects that all strategies of the wire share.
    """

    counts_backwards: ClassVar[bool] = True
    """Whether every committed backward is a training step. If False, call `context.steps.advance`."""
    supports_join: ClassVar[bool] = True
    """Whether the other ranks can continue when one has run out of inputs (Join)."""

    begins_steps: ClassVar[bool] = True
    """Whether `begin_step`, `wrap` or `exceptions` may differ from step to step."""

    missing: str | None = None
    """The reason why the optimizer cannot step, if another rank's shard of its state was loaded."""

    def __init__(self, config: Any, context: Context) -> None:
        self.config = config
        self.context = context
        self._exceptions: Mapping[str, Program] | None = None
        self.change: Callable[[Any], None] = self.reconfigure
        """Call it to switch to a changed configuration of the same class. The wire records the change."""

    def start(self) -> None:
        """Register hooks and start. Called when no other strategy runs on the model."""

    def reconfigure(self, config: Any) -> None:
        """Switch to a changed configuration, as an audit decides.

        Args:
            config: A configuration of the same class.
        """
        self.config = config
        self._exceptions = None

    def begin_step(self) -> None:
        """Prepare for a backward pass, when its first bucket arrives."""

    def begin_forward(self) -> None:
        """Prepare for the forward pass in which a schedule has just started this strategy."""

    def wrap(self, program: Program) -> ProgramFunction:
        """Return the program to run in this step in place of `program`.

        Args:
            program: A program that some parameters use by the configuration or a rule.

        Returns:
            The same program, or one around it.
        """
        return program

    def exceptions(self) -> Mapping[str, Program]:
        """Return the parameters that use another program in this step, with that program.

        By default these are the parameters that `rules` select, and 1-D tensors of lossy programs.
        """
        if self._exceptions is None:
            self._exceptions = self.context.exceptions(self.config.gradient_program())
        return self._exceptions

    @property
    def replicas_equal(self) -> bool:
        """True while all ranks hold the same model. If False, checkpoints contain each rank's own model."""
        return True

    @property
    def saves_model(self) -> bool:
        """True while `state_dict` contains this rank's model, so that a checkpoint needs no other copy.

        If False, `save_checkpoint` saves each rank's model while `replicas_equal` is False.
        """
        return False

    def agree_finite(self, finite: torch.Tensor) -> torch.Tensor:
        """Return whether the step's means are finite on all ranks.

        Override it with a collective if each rank sees only some of the means. Do not read the flag on the
        host, because the step reads the result once.

        Args:
            finite: Whether the means that this rank has seen are finite, as a scalar bool tensor.

        Returns:
            A scalar bool tensor, equal on all ranks.
        """
        return finite

    def end_backward(self, committed: bool) -> None:
        """React to a settled backward pass, whose gradients are written.

        Args:
            committed: Whether the step was committed. If not, it was rolled back.
        """

    def end_open_step(self) -> None:
        """End a step whose optimizer step the training loop skipped, as the next forward would."""

    def explain(self) -> str:
        """Return text that `wire.explain()` shows above its table, such as the reason for a choice."""
        return ""

    @property
    def replicas(self) -> tuple[str, ...]:
        """The names of the replicas that take part. By default the ranks of the model's group."""
        ranks = self.context.engine.world_ranks(range(self.context.communicator.size))
        return tuple(f"rank {rank}" for rank in ranks)

    @property
    def exchanges(self) -> int:
        """The number of exchanges of models that were applied. 0 if only gradients are exchanged."""
        return 0

    def join(self) -> None:
        """Wait until this replica takes part. Only replicas that join and leave need it."""

    def finalize(self) -> None:
        """Synchronise the models of all ranks. Collective."""

    def retire(self) -> None:
        """Synchronise the models and optimizer states of all ranks, then stop. Collective."""
        self.close()

    def close(self) -> None:
        """Stop at once without synchronising ranks, and remove all hooks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the strategy's entries of the wire's saved state, by key."""
        return {}

    def merge(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge all ranks' entries into one, which every rank of a job with another number of ranks loads.

        Override it if entries differ between ranks.

        Args:
            entries: The result of `state_dict` on each rank that saved, by rank.

        Returns:
            Entries for `prepare`.

        Raises:
            StateError: The entries cannot be merged. By default, if they are not equal on all ranks.
        """
        first = dict(entries[0])
        for key in {key: None for each in entries for key in each}:
            if not all(key in each and same(first.get(key), each[key]) for each in entries):
                raise StateError(
                    f"{key!r} of {self.config!r} is not equal on the {len(entries)} ranks that saved: load it"
                    f" on {len(entries)} ranks, or give {type(self).__name__} a method merge(entries)"
                )
        return first

    def prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Validate a saved state of the wire.

        Args:
            state: The wire's state of this rank, with the entries of `state_dict`.

        Returns:
            A function that applies the state.

        Raises:
            StateError: The state does not fit. Nothing was changed.
        """
        return lambda: None

    def position(self, state: Mapping[str, Any]) -> str:
        """Describe the point at which a state was saved, which must be equal on all ranks.

        Args:
            state: The wire's state of this rank.
        """
        return ""

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip the gradients of all parameters that ranks share by their total norm.

        Args:
            max_norm: The largest norm that gradients keep.
            norm_type: The order of the norm, as in `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The norm before clipping.
        """
        model = self.context.model
        model.module("clip_grad_norm_")
        # Without those that DDP ignores: their gradients differ between ranks, and so would the norm, and
        # ranks that scale equal gradients by different factors drift apart.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters().values(), max_norm, norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of DTensors

    def consolidate_optimizer_state(self, to: int) -> dict[str, Any] | None:
        """Return the whole optimizer state on rank `to`, and None on the others. Collective.

        Args:
            to: The rank that receives the state.

        Raises:
            AttachError: The optimizer state is not sharded, so every rank has all of it.
        """
        raise AttachError("consolidate_optimizer_state is for ZeRO: every rank has the whole state here")


def require_state(state: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the dict under `key` of a wire's state, or raise StateError if there is none."""
    found = state.get(key)
    if not isinstance(found, dict):
        raise StateError(
            f"the state has nothing under {key!r}: it was saved from a wire with another strategy"
        )
    return found


Attachable: TypeAlias = ProgramFunction | Configuration
"""What the user passes: a gradient program, or a configuration such as `DiLoCo(...)`."""


@dataclass(frozen=True, repr=False)
class Gradients(Configuration):
    """Plain gradient averaging: a program averages every bucket, and every committed backward is a step."""

    program: ProgramFunction

    def __repr__(self) -> str:
        return repr(self.program)

    @property
    def described(self) -> ProgramFunction:
        """The program, in place of this wrapper, for comparing ranks and for saving."""
        return self.program

    def validate(self, target: Target) -> None:
        """Raise OptionError if it is not a program, or does not fit the model."""
        program = as_program(self.program)
        if not target.model.reduces_gradients:
            raise needs_ddp(short(self.program))
        describe(self.program)
        program.check(target.model.shapes(), target.model.group.size())

    def bind(self, context: Context) -> Strategy:
        """Return the strategy that runs the program on every bucket."""
        return GradientStrategy(self, context)

    def gradient_program(self) -> Program:
        """Return the program."""
        return as_program(self.program)

    def with_gradient_program(self, program: Program) -> Configuration:
        """Return a configuration of another program."""
        return Gradients(program)


class GradientStrategy(Strategy):
    """A strategy that averages gradients, with one program for each parameter."""

    begins_steps = False


def needs_ddp(what: object) -> OptionError:
    """Return the error of an option `what` that works on DDP models only."""
    return OptionError(
        f"{what} needs a DistributedDataParallel model: wrap the module in one, and attach to that"
    )


def configuration_of(passed: Attachable) -> Configuration:
    """Return a configuration unchanged, or wrap a gradient program in `Gradients`."""
    return passed if isinstance(passed, Configuration) else Gradients(passed)


def as_passed(config: Configuration) -> Attachable:
    """Return a configuration as the user passed it to `attach`, the inverse of `configuration_of`."""
    return config.program if isinstance(config, Gradients) else config


class Stages:
    """The configurations that a wire runs, by the step from which each one does.

    Args:
        configurations: Configurations by first step, 0 among them.
        schedule: The `Schedule` that the user passed, or None.
    """

    def __init__(self, configurations: Mapping[int, Configuration], schedule: object = None) -> None:
        self._by_step = dict(configurations)
        self.schedule = schedule

    @property
    def passed(self) -> object:
        """The program, configuration or schedule that the user passed."""
        return self.at(0) if self.schedule is None else self.schedule

    @property
    def all(self) -> list[Configuration]:
        """The configurations of all stages."""
        return list(self._by_step.values())

    def at(self, step: int) -> Configuration:
        """Return the configuration that runs in a step."""
        return self._by_step[max(first for first in self._by_step if first <= step)]

    def check_join(self, joins: bool, step: int) -> None:
        """Raise UnavailableError if a later stage would begin inside torch's `Join`.

        A swap is collective and happens in forward. A rank that has run out of inputs runs no forward, so
        the others would wait for it until their time limit.
        """
        later = [first for first in self._by_step if first > step]
        if later and joins:
            raise UnavailableError(
                f"a Schedule whose next stage begins at step {later[0]} cannot run inside Join (step {step}"
                " now): a rank that has run out of inputs would miss the swap; give every rank the same"
                " number of batches, or call wire.swap(program) outside of Join"
            )

    def saved(self, description: str, step: int) -> Configuration | None:
        """Return the stage of a step if a saved state names it, as stages may share a description."""
        due = self.at(step)
        return due if description == describe(due) else None

    def known(self, fallback: "OnExcess") -> dict[str, Configuration]:
        """Return all stages, and the configurations that audits fall back to, by description.

        Running stages come last, so that errors name them.
        """
        own = [variant for stage in self.all for variant in stage.variants()]
        others = (
            [] if isinstance(fallback, str) else [after for each in own for after in _after(each, fallback)]
        )
        return {describe(config): config for config in (*others, *own, *self.all)}


def _after(config: Configuration, program: Program) -> list[Configuration]:
    """Return a configuration's variants after audits of gradients, of models, or of both fall back."""
    gradients = config.with_gradient_program(program)
    if config.model_program() is None:
        return [gradients]
    return [gradients, config.with_model_program(program), gradients.with_model_program(program)]
