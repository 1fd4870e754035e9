"""`Program`, the base class of programs, with its input `Bucket` and its result `Outcome`.

    def __call__(self, bucket, memory):
        total = yield AllReduce(bucket.buffer / bucket.world_size)
        return Outcome(mean=total)

A program must yield the same collectives on every rank. It may branch on shapes, configuration, the step and
reduced values, but never on local data.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from thinwire.codecs.codec import numbers_of
from thinwire.codecs.rounding import add_scaled
from thinwire.engine.ops import Collective, Collectives
from thinwire.engine.pack import unpack
from thinwire.errors import ProgramError
from thinwire.programs.description import ReprAsWritten, short
from thinwire.programs.memory import Memory


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
        exact: Names of parameters whose mean must not be compressed. It is empty unless the program
            has the trait `carries_exact`. Their error is 0.
        left_out: Names of parameters that are averaged elsewhere. It is empty unless the program has the
            trait `leaves_out`. Their numbers in the buffer must stay as they are.
        residuals: Residuals to add to the gradients. It is None unless the program has the trait
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
    left_out: frozenset[str] = frozenset()

    def segments(self) -> list[torch.Tensor]:
        """Return the numbers of all parameters but those that are left out, as few flat views as possible."""
        if not self.left_out:
            return [numbers_of(self.buffer)]
        found: list[torch.Tensor] = []
        start = stop = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name in self.left_out and start < stop:
                found.append(numbers_of(self.buffer[start:stop]))
            stop += shape.numel()
            if name in self.left_out:
                start = stop
        return [*found, numbers_of(self.buffer[start:stop])] if start < stop else found

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


class Program(ReprAsWritten, ABC):
    """The base class of programs: a callable that averages one bucket by yielding collectives.

    A function of (bucket, memory) is a program too. A class can also declare traits, which tell its callers
    how it runs. It overrides them with class attributes, such as `stateless = True`, or with properties. A
    program that runs others has the traits that all of these have, unless it declares its own.

    A subclass of a program that defines methods inherits no promises (`stateless`, `ignores_order`,
    `carries_exact`, `leaves_out`, `folds_residuals`, `feeds_back`, `exact_alone`, `takes_sparse`), because a
    method may break them. It declares those that it keeps.

    Example::

        @dataclass(frozen=True)
        class Mean(thinwire.Program):
            stateless = True

            def __call__(self, bucket, memory):
                total = yield thinwire.AllReduce(bucket.buffer / bucket.world_size)
                return thinwire.Outcome(mean=total)

        wire = thinwire.attach(ddp, Mean())
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset the promises of a program that the subclass or a mixin changes and does not declare again."""
        super().__init_subclass__(**options)
        if not any("__call__" in vars(base) for base in cls.__mro__[1:] if base is not Program):
            return
        # The first class with code decides. A promise of a class behind it is about other code.
        order = cls.__mro__
        first = next(
            kind for kind in order if any(_is_code(name, value) for name, value in vars(kind).items())
        )
        for promise, broken in _BROKEN.items():
            declares = next(kind for kind in order if promise in vars(kind))
            if order.index(declares) > order.index(first):
                own = first is not cls and issubclass(first, Program)
                setattr(cls, promise, inspect.getattr_static(first, promise) if own else broken)

    @abstractmethod
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

    @property
    def inner(self) -> "tuple[Program, ...]":
        """The programs that this one runs. Its undeclared traits are those that all of them have."""
        return ()

    @property
    def stateless(self) -> bool:
        """True if it keeps nothing in its memory, so that nothing is staged for rolling back."""
        return self._all("stateless")

    @property
    def ignores_order(self) -> bool:
        """True if its mean does not depend on the order of the numbers in a bucket."""
        return self._all("ignores_order")

    @property
    def carries_exact(self) -> bool:
        """True if it averages the parameters in `bucket.exact` exactly, in the same collectives."""
        return self._all("carries_exact")

    @property
    def leaves_out(self) -> bool:
        """True if it averages in place, and leaves the parameters in `bucket.left_out` as they are.

        It is not forwarded, because a program around it may change the whole bucket.
        """
        return False

    @property
    def folds_residuals(self) -> bool:
        """True if it adds `bucket.residuals` to the gradients and writes the new ones itself."""
        return self._all("folds_residuals")

    @property
    def exact_alone(self) -> bool:
        """True if its mean is the gradient in a group of one rank, where nothing is sent."""
        return self._all("exact_alone")

    @property
    def takes_sparse(self) -> bool:
        """True if it averages sparse gradients too."""
        return self._all("takes_sparse")

    @property
    def tracks_error(self) -> bool:
        """True if it reports all of its error where `bucket.track_error` is set.

        False for programs that feed back their own error, or lose some of it where no rank can observe it.
        `ErrorFeedback` rejects these.
        """
        return self._all("tracks_error", otherwise=True)

    @property
    def exact_vectors(self) -> bool:
        """True if it is lossy, so that 1-D tensors are averaged exactly unless a rule fits them."""
        return self._all("exact_vectors")

    @property
    def preferred_bytes(self) -> int | None:
        """The bucket size at which it is fastest, or None if it prefers DDP's buckets whole."""
        sizes = {program.preferred_bytes for program in self.inner}
        return sizes.pop() if len(sizes) == 1 else None

    def feeds_back(self, shape: torch.Size) -> bool:
        """Return whether it adds all of the slot "residual" to the gradient of a parameter.

        After a change of programs it then receives the old residual in that slot. Otherwise the residual is
        added to its gradients, rounded to their dtype. Parameters in `bucket.exact` have no residual.

        Args:
            shape: Shape of the parameter.

        Returns:
            True if the whole residual is added, in every step.
        """
        return bool(self.inner) and all(program.feeds_back(shape) for program in self.inner)

    def check(self, shapes: Mapping[str, torch.Size], world_size: int) -> None:
        """Validate the program, and those within it, against model and group before anything is sent.

        Args:
            shapes: Shapes of the parameters by name.
            world_size: Number of ranks that run the program together.

        Raises:
            OptionError: The program cannot average these parameters among so many ranks.
        """
        for program in self.inner:
            program.check(shapes, world_size)

    def subgroups(self, rank: int, world_size: int) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks to which it limits collectives, so that accelerators connect at attach.

        On an accelerator, a group that this does not return connects in the first backward that uses it.

        Args:
            rank: This rank, which is in each of the groups.
            world_size: Number of ranks that run the program together.

        Returns:
            The groups. Those at one place exclude each other: a rank has only one of them.
        """
        found = (group for program in self.inner for group in program.subgroups(rank, world_size))
        return tuple(dict.fromkeys(found))

    def outline(self, bucket: Bucket) -> Iterator[Collective] | None:
        """Return the collectives of a bucket without computing anything, for planning with many ranks.

        Unlike the traits it is not forwarded, because a program may add collectives to those within it.

        Args:
            bucket: Gradients, of which only shape, dtype and device are used.

        Returns:
            The collectives in order, or None if only running the program shows them.
        """
        return None

    def _all(self, trait: str, *, otherwise: bool = False) -> bool:
        """Return whether all inner programs have a trait. A program without inner ones has the default."""
        return all(getattr(program, trait) for program in self.inner) if self.inner else otherwise


_BROKEN: Mapping[str, object] = {
    "stateless": False,
    "ignores_order": False,
    "carries_exact": False,
    "leaves_out": False,
    "folds_residuals": False,
    "exact_alone": False,
    "takes_sparse": False,
    "feeds_back": lambda self, shape: False,
}
"""The promises of programs, with what remains of each in a subclass that changes how it runs.

Without a promise everything is right, only with more copies. With one that does not hold, a slot of one model
would be shared by all, or residuals would become garbage.
"""


def _is_code(name: str, value: object) -> bool:
    """Return whether a class attribute may change how a program runs. Dataclasses add only other dunders."""
    code = inspect.isroutine(value) or isinstance(value, property)
    return code and (name == "__call__" or not (name.startswith("__") or name in vars(Program)))


ProgramFunction: TypeAlias = Callable[[Bucket, Memory], Collectives[Outcome]]
"""A program, or a plain function or object that is called like one. `as_program` makes it a `Program`."""


def is_alone(program: Program, bucket: Bucket) -> bool:
    """Return whether a program returns a bucket's gradients as they are, because only one rank averages."""
    return bucket.world_size == 1 and program.exact_alone


def unchanged(bucket: Bucket) -> Outcome:
    """Return the outcome in a group of one rank: its gradients, plus residuals if given, without an error."""
    if bucket.residuals is not None:
        for view, old, new in zip(
            unpack(bucket.buffer, bucket.shapes), bucket.residuals.old, bucket.residuals.new, strict=True
        ):
            if old is not None and new is not None:
                add_scaled(view, old.view_as(view), bucket.residuals.keep)
                new.zero_()
    return Outcome(bucket.buffer, torch.zeros_like(bucket.buffer) if bucket.track_error else None)


def mean_of(program: Program, bucket: Bucket, memory: Memory) -> Collectives[torch.Tensor]:
    """Run the program, validate its outcome, and return the mean alone."""
    outcome = yield from program(bucket, memory)
    check_outcome(program, outcome, bucket)
    return outcome.mean


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
