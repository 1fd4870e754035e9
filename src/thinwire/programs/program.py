"""The protocol of programs: `Bucket` is a program's input, `Outcome` its result.

    def __call__(self, bucket, memory):
        total = yield AllReduce(bucket.buffer / bucket.world_size)
        return Outcome(mean=total)

A program must yield the same collectives on every rank. It may branch on shapes, configuration, the step and
reduced values, but never on local data.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from thinwire.engine.ops import Collectives
from thinwire.engine.pack import unpack
from thinwire.errors import OptionError, ProgramError
from thinwire.programs.description import short
from thinwire.programs.memory import Memory
from thinwire.programs.torch_hooks import refuse_hook


@dataclass(frozen=True, eq=False)
class Bucket:
    """One rank's gradients of several parameters in one flat buffer, to be averaged.

    Attributes:
        index: DDP's number of the bucket. DDP may rebuild its buckets, so do not use it to name state.
        buffer: The gradients, one after another. Each is in the order of its parameter's elements, regardless
            of the memory format. A program may overwrite it.
        names: Names of the parameters in the model.
        shapes: Shapes of the parameters, in the same order. A complex parameter has a last dimension of 2.
        rank: This rank in the group that averages.
        world_size: Number of ranks in that group.
        step: Number of the step, from 0. Only steps in which ranks communicate count.
        track_error: Whether the outcome must have an `error`.
        exact: Names of parameters whose mean must not be compressed. It is empty unless the program's class
            sets `carries_exact`. Their error is 0.
        residuals: Residuals to add to the gradients. It is None unless the program's class sets
            `folds_residuals`. Then the outcome needs no `error`.
        exact_dtype: Dtype in which numbers that must be exact are sent: the gradients' own, where the buffer
            has a wider one, as under error feedback. None is the buffer's.
        whole_shapes: Shapes of the whole parameters, where `shapes` are those of slices, as within
            `AcrossNodes`. Rules are about these. None if parameters are whole.

    Example::

        for name, gradient in bucket.views().items():
            ...
    """

    index: int
    buffer: torch.Tensor
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    rank: int
    world_size: int
    step: int
    track_error: bool = False
    exact: frozenset[str] = frozenset()
    residuals: "Residuals | None" = None
    exact_dtype: torch.dtype | None = None
    whole_shapes: tuple[torch.Size, ...] | None = None

    def views(self) -> dict[str, torch.Tensor]:
        """Return the gradients by parameter name.

        Returns:
            Views of the buffer, in the shapes of the parameters.
        """
        return dict(zip(self.names, unpack(self.buffer, self.shapes), strict=True))

    def __str__(self) -> str:
        shown = ", ".join(self.names[:2])
        more = f" and {len(self.names) - 2} more" if len(self.names) > 2 else ""
        return f"bucket {self.index} ({shown}{more})"


@dataclass(frozen=True, eq=False)
class Residuals:
    """The residuals of a bucket's parameters, for a program that adds them and writes the new ones itself.

    A program computes with gradient + keep * old, and writes its error to `new`, which may share memory with
    `old`. A parameter in `bucket.exact` has None in both.

    Attributes:
        old: Residuals of the step before, flat, in the bucket's real dtype.
        new: Tensors for the new residuals, flat and uninitialised. All of them must be overwritten.
        keep: Share of the old residual to add.
    """

    old: tuple[torch.Tensor | None, ...]
    new: tuple[torch.Tensor | None, ...]
    keep: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a program.

    Attributes:
        mean: The averaged gradients, of the shape, dtype and device of the bucket's buffer. It may be the
            buffer itself, which saves memory.
        error: This rank's input minus its contribution to the mean, for error feedback. Over all ranks,
            mean(inputs) = mean + mean(errors). Required if `bucket.track_error` is set.
        finite: A scalar bool tensor, whether the mean is finite. None lets the step check `mean`. Set it if
            `mean` contains only a part of the averaged numbers, as under ZeRO.

    Example::

        return thinwire.Outcome(mean=total)
    """

    mean: torch.Tensor
    error: torch.Tensor | None = None
    finite: torch.Tensor | None = None


class Program(Protocol):
    """The protocol of programs: a callable that averages one bucket by yielding collectives.

    Example::

        @dataclass(frozen=True)
        class Mean:
            def __call__(self, bucket, memory):
                total = yield thinwire.AllReduce(bucket.buffer / bucket.world_size)
                return thinwire.Outcome(mean=total)

        wire = thinwire.attach(ddp, Mean())
    """

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Average one bucket.

        Yield the same collectives on every rank, and receive each result as the value of its `yield`.

        Args:
            bucket: Gradients of this rank. Their buffer may be overwritten.
            memory: Tensors kept between steps, by parameter name and slot.

        Returns:
            A generator of collectives that returns the outcome.

        Raises:
            ProgramError: The mean differs from the bucket's buffer in shape, dtype or device. The caller of
                the program checks this.
        """


def require_program(program: object, option: str = "program") -> None:
    """Raise OptionError unless `program` is a program.

    Args:
        program: Value to validate.
        option: Name of the option in the message.

    Raises:
        OptionError: It is not callable with (bucket, memory), such as a codec, a class, or a preset that was
            not called; or it is a communication hook of DDP.
    """
    refuse_hook(program, option)
    if not callable(program):
        raise OptionError(
            f"{option}={program!r} is not a program: pass an instance, such as thinwire.Int8(); codecs become"
            " programs by TwoShot(codec)"
        )
    if isinstance(program, type) or not _takes_a_bucket(program):
        name = getattr(program, "__name__", type(program).__name__)
        raise OptionError(
            f"{option}={program!r} is not a program: pass an instance by calling it, {name}(); a program of"
            " your own takes (bucket, memory)"
        )


def _takes_a_bucket(program: Callable[..., object]) -> bool:
    """Return whether a callable takes a bucket and a memory. Presets such as `Int8` do not."""
    try:
        inspect.signature(program).bind("bucket", "memory")
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def ignores_order(program: object) -> bool:
    """Return whether a program's mean does not depend on the order of numbers in a bucket."""
    return _promises(program, "ignores_order")


def carries_exact(program: object) -> bool:
    """Return whether a program averages the parameters in `bucket.exact` exactly, in the same collectives."""
    return _promises(program, "carries_exact")


def folds_residuals(program: object) -> bool:
    """Return whether a program adds `bucket.residuals` to the gradients and writes the new ones itself."""
    return _promises(program, "folds_residuals")


def stateless(program: object) -> bool:
    """Return whether a program keeps nothing in its memory."""
    return _promises(program, "stateless")


def tracks_error(program: object) -> bool:
    """Return whether a program reports all of its error where `bucket.track_error` is set.

    False for programs that feed back their own error, or lose some of it where no rank can observe it.
    """
    return bool(getattr(program, "tracks_error", True))


def _promises(program: object, trait: str) -> bool:
    """Return whether a program promises something about how it runs.

    A promise holds for the class that declares it, and for subclasses that override no method. A method may
    break it: it may keep a slot, which would be shared by all models, or ignore residuals, which would become
    garbage. Such a subclass declares the trait itself, or does without: then everything is right, only with
    more copies.
    """
    if trait in getattr(program, "__dict__", {}):
        return bool(getattr(program, trait))
    for kind in type(program).__mro__:
        if trait in vars(kind):
            return bool(getattr(program, trait))
        if any(_may_change(name, value) for name, value in vars(kind).items()):
            return False
    return False


def _may_change(name: str, value: object) -> bool:
    """Return whether a class attribute is code that a program runs. Dataclasses add only other dunders."""
    is_code = inspect.isroutine(value) or isinstance(value, property)
    return is_code and (name == "__call__" or not name.startswith("__"))


def feeds_back(program: object, shape: torch.Size) -> bool:
    """Return whether a program adds all of the slot "residual" to the gradient of a parameter of this shape.

    A program declares it with a method `feeds_back(shape)`. Parameters in `bucket.exact` have no residual.
    """
    return _promises(program, "feeds_back") and bool(getattr(program, "feeds_back")(shape))  # noqa: B009


def exact_alone(program: object) -> bool:
    """Return whether a program compresses nothing in a group of one rank, where nothing is sent."""
    return _promises(program, "exact_alone")


def is_alone(program: object, bucket: Bucket) -> bool:
    """Return whether a program returns a bucket's gradients as they are, because only one rank averages."""
    return bucket.world_size == 1 and exact_alone(program)


def unchanged(bucket: Bucket) -> Outcome:
    """Return the outcome in a group of one rank: its gradients, plus residuals if given, without an error."""
    if bucket.residuals is not None:
        for view, old, new in zip(
            unpack(bucket.buffer, bucket.shapes), bucket.residuals.old, bucket.residuals.new, strict=True
        ):
            if old is not None and new is not None:
                view.add_(old.view_as(view), alpha=bucket.residuals.keep)
                new.zero_()
    return Outcome(bucket.buffer, torch.zeros_like(bucket.buffer) if bucket.track_error else None)


def preferred_bytes(program: object) -> int | None:
    """Return the bucket size at which a program is fastest, or None if it prefers DDP's buckets whole.

    A program declares it with an attribute `preferred_bytes`. A wrapper inherits that of its `program`.
    """
    if hasattr(program, "preferred_bytes"):
        own: int | None = program.preferred_bytes
        return own
    return preferred_bytes(program.program) if hasattr(program, "program") else None


def check_fit(program: object, shapes: Mapping[str, torch.Size], world_size: int) -> None:
    """Validate a program, and the programs in it, against model and group before anything is sent.

    A program that depends on them has a method `check(shapes, world_size)`.

    Args:
        program: Program, or list of programs, to validate.
        shapes: Shapes of the parameters by name.
        world_size: Number of ranks.

    Raises:
        OptionError: Raised by a program's `check`.
    """
    check = getattr(program, "check", None)
    if callable(check):
        check(shapes, world_size)
    if isinstance(program, list | tuple):
        parts = list(program)
    else:
        known = dataclasses.fields(program) if dataclasses.is_dataclass(program) else ()
        parts = [getattr(program, one.name) for one in known]
    for part in parts:
        check_fit(part, shapes, world_size)


def outcome_of(program: Program, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
    """Run the program and validate its outcome."""
    outcome = yield from program(bucket, memory)
    check_outcome(program, outcome, bucket)
    return outcome


def check_outcome(program: Program, outcome: object, bucket: Bucket) -> None:
    """Raise ProgramError unless the outcome's mean has the shape, dtype and device of the bucket's buffer."""
    if not isinstance(outcome, Outcome):
        raise ProgramError(
            f"{short(program)} returned a {type(outcome).__name__} for {bucket}: return Outcome(mean)"
        )
    mean, like = outcome.mean, bucket.buffer
    if (mean.shape, mean.dtype, mean.device) != (like.shape, like.dtype, like.device):
        raise ProgramError(
            f"{short(program)} returned a mean of {_kind(mean)} for {bucket}: it must match the bucket's"
            f" buffer, {_kind(like)}"
        )


def mean_of(steps: Collectives[Outcome]) -> Collectives[torch.Tensor]:
    """Run a program and return only its mean."""
    return (yield from steps).mean


NO_EXCEPTIONS: Mapping[str, Program] = {}
"""The empty mapping, where all parameters use one program."""


@dataclass(frozen=True, eq=False)
class Programs:
    """The programs of all parameters in a step.

    Attributes:
        program: Program of parameters without an exception.
        exceptions: Programs of the other parameters by name.
        exact: Exceptions that use `Exact`. A program that sets `carries_exact` sends them in its own
            collectives.
        sliced: Whether buckets are divided into slices of the size that a program prefers.
    """

    program: Program
    exceptions: Mapping[str, Program] = field(default_factory=dict)
    exact: frozenset[str] = frozenset()
    sliced: bool = False


def by_program(
    names: Iterable[str], program: Program, exceptions: Mapping[str, Program]
) -> list[tuple[Program, tuple[str, ...]]]:
    """Group parameters by program, in order of the first parameter of each.

    Args:
        names: Names of the parameters.
        program: Program of parameters without an exception.
        exceptions: Programs of the other parameters by name.

    Returns:
        Pairs of a program and the names of its parameters. Programs are compared by identity.
    """
    members: dict[int, tuple[Program, list[str]]] = {}
    for name in names:
        chosen = exceptions.get(name, program)
        members.setdefault(id(chosen), (chosen, []))[1].append(name)
    return [(chosen, tuple(own)) for chosen, own in members.values()]


def _kind(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
