"""Programs around something else: `Wrapper` around another program, `as_program` around a plain callable."""

import functools
import inspect
from dataclasses import dataclass
from enum import Enum
from typing import Any

from thinwire.engine.ops import Collectives
from thinwire.errors import OptionError
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program, ProgramFunction

_TORCH, _OURS = "torch.distributed.algorithms.ddp_comm_hooks", "thinwire.ddp_comm_hooks"
_PROGRAMS = {
    "allreduce_hook": "Exact()",
    "fp16_compress_hook": "FP16()",
    "fp16_compress_wrapper": "FP16()",
    "bf16_compress_hook": "BF16()",
    "bf16_compress_wrapper": "BF16()",
    "powerSGD_hook": "PowerSGD(rank=4)",
    "batched_powerSGD_hook": "PowerSGD(rank=4, flatten=True)",
    "quantization_pertensor_hook": "Int8()",
    "quantization_perchannel_hook": "Int8()",
    "post_localSGD_hook": "LocalSGD(period=8)",
    "hook_with_zero_step": "ZeRO()",
    "hook_with_zero_step_interleaved": "ZeRO(interleaved=True)",
}
"""The program or configuration in place of each torch-named hook, or of the function that makes it."""


@dataclass(frozen=True, repr=False)
class Wrapper(Program):
    """The base class of programs that run one other program, and have its traits.

    A subclass overrides the traits that it does not keep. A trait that is added to `Program` needs no change
    here.

    Args:
        program: The program to run.

    Raises:
        OptionError: `program` is not a program.
    """

    program: Program

    def __post_init__(self) -> None:
        adapt(self, "program")

    @property
    def inner(self) -> tuple[Program, ...]:
        """The wrapped program."""
        return (self.program,)


@dataclass(frozen=True, repr=False)
class PlainProgram(Program):
    """A function, or an object whose class is not derived from `Program`, as a program without promises."""

    described: ProgramFunction
    """The function. `describe` and `repr` show it in place of this object."""

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Call the function."""
        return self.described(bucket, memory)


def as_program(program: Any, option: str = "program") -> Program:
    """Return a value that the user passed as a `Program`.

    Args:
        program: A program, or a callable that takes (bucket, memory).
        option: Name of the option in errors.

    Returns:
        The program itself, or the callable in a `PlainProgram`.

    Raises:
        OptionError: It is not callable with (bucket, memory), such as a codec, a class, or a preset that was
            not called. Or it is a communication hook of DDP. Or it declares traits without being derived from
            `Program`.
    """
    if isinstance(program, Program):
        return program
    _refuse_hook(program, option)
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
    traits = [name for name in vars(Program) if not name.startswith("_") and hasattr(program, name)]
    if traits:
        kind = type(program).__name__
        raise OptionError(
            f"{option}={program!r} declares the trait {traits[0]!r}, but is no Program: derive its class"
            f" from thinwire.Program, as in `class {kind}(thinwire.Program)`, or rename the attribute"
        )
    return PlainProgram(program)


def adapt(options: object, *names: str) -> None:
    """Replace options of a frozen dataclass that hold plain callables by programs, for `__post_init__`.

    Raises:
        OptionError: An option is not a program.
    """
    for name in names:
        object.__setattr__(options, name, as_program(getattr(options, name), name))


def _takes_a_bucket(program: Any) -> bool:
    """Return whether a callable takes a bucket and a memory. Presets such as `Int8` do not."""
    try:
        inspect.signature(program).bind("bucket", "memory")
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _refuse_hook(program: object, option: str) -> None:
    """Raise OptionError if `program` is a communication hook, which takes (state, bucket).

    Args:
        program: The value to check: a hook of torch's, thinwire's or the user's, a `functools.partial` of
            one, or a `DDPCommHookType`.
        option: The name of the option, for the error.
    """
    hook = _hook_in(program)
    if hook is None:
        return
    module, name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", repr(hook)).split(".")[0]
    known = module.startswith((_TORCH, _OURS))
    program_text = f"pass thinwire.{_PROGRAMS[name]}, or " if known and name in _PROGRAMS else ""
    place = f"{module.replace(_TORCH, _OURS)}.{name}" if known else name
    raise OptionError(
        f"{option}={name} is a communication hook, which takes a state and DDP's bucket, and not a program:"
        f" {program_text}register the hook on a DDP model without a wire, as in"
        f" ddp.register_comm_hook(state, {place})"
    )


def _hook_in(program: object) -> object:
    """Return the hook that a value is or contains, recognised by its annotation, or None."""
    if isinstance(program, Enum):
        program = program.value
    while isinstance(program, functools.partial):
        program = program.keywords.get("comm_hook", program.func)
    if isinstance(program, type) or not callable(program):
        return None
    try:
        kinds = [parameter.annotation for parameter in inspect.signature(program).parameters.values()]
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    names = [kind if isinstance(kind, str) else getattr(kind, "__name__", "") for kind in kinds]
    return program if any(name.split(".")[-1] == "GradBucket" for name in names) else None
