"""Programs as text, in two forms.

`describe` shows all options, to compare ranks and saved states. `short` shows a program as the user wrote it.
"""

import dataclasses
import dis
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from thinwire.engine.comm.agreement import Described
from thinwire.errors import OptionError

Made = TypeVar("Made")
Options = ParamSpec("Options")

_WRITTEN = "_written"
DERIVED_OPTIONS = "_unsaid"
"""Attribute with the names of options whose value was derived, because the user did not set them."""
_RANKS = {
    "rank": ("RANK",),
    "global_rank": ("RANK",),
    "local_rank": ("LOCAL_RANK",),
    "node_rank": ("GROUP_RANK", "NODE_RANK"),
}
"""Names of variables that may hold a rank, with the environment variables of launchers that hold it too."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class ReprAsWritten:
    """A base class whose repr is the text that the user wrote: a preset, or the non-default options.

    >>> from thinwire import DiLoCo, Int4, Warmup
    >>> Warmup(Int4(block=32), steps=10)
    Warmup(Int4(block=32), steps=10)
    >>> DiLoCo(period=16, program=Int4())
    DiLoCo(period=16, program=Int4())
    """

    def __repr__(self) -> str:
        # `short` shows an object without fields by its repr.
        return short(self) if dataclasses.is_dataclass(self) else object.__repr__(self)


def preset(make: Callable[Options, Made]) -> Callable[Options, Made]:
    """Decorate a function that makes programs, so that their repr is the call that made them.

    Its attribute `is_preset` is True: it may be called by name from a text, which other functions may not.
    """
    signature = inspect.signature(make)
    taken = signature.parameters.values()
    rest = next((option.name for option in taken if option.kind is inspect.Parameter.VAR_KEYWORD), "")

    @functools.wraps(make)
    def named(*args: Options.args, **kwargs: Options.kwargs) -> Made:
        program = make(*args, **kwargs)
        given = dict(signature.bind(*args, **kwargs).arguments)
        more = given.pop(rest, {})
        options = [
            f"{name}={value!r}"
            for name, value in given.items()
            if value != signature.parameters[name].default
        ]
        options += [f"{name}={value!r}" for name, value in more.items()]
        object.__setattr__(program, _WRITTEN, f"{make.__name__}({', '.join(options)})")
        return program

    named.is_preset = True  # type: ignore[attr-defined]
    return named


def described(thing: object) -> Described:
    """Return a program in both forms, for comparisons of ranks and of saved states.

    Raises:
        OptionError: As `describe`.
    """
    return Described(describe(thing), short(thing))


def describe(thing: object) -> str:
    """Return a program and all its options as text. Texts are equal if and only if the programs are.

    It is used to compare ranks and saved states. A function is shown by its qualified name and by the plain
    values in its closure and its defaults, because its address differs between ranks.

    >>> from thinwire import Int8
    >>> describe(Int8(error_feedback=False))
    'TwoShot(codec=Quantize(bits=8, block=256, affine=False, stochastic=False, seed=0))'

    Raises:
        OptionError: The text contains a memory address instead of options.
    """
    text = _full(thing)
    if _ADDRESS.search(text):
        raise OptionError(
            f"program={text} does not show its options, so ranks cannot compare them: make its class a frozen"
            " dataclass, or give it a __repr__ that shows them"
        )
    return text


def _full(thing: object) -> str:
    inner = getattr(thing, "described", None)
    if inner is not None:
        return _full(inner)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        if _has_own_repr(thing):
            return repr(thing)
        shown = [
            f"{option.name}={_full(getattr(thing, option.name))}"
            for option in dataclasses.fields(thing)
            if option.repr
        ]
        return f"{type(thing).__qualname__}({', '.join(shown)})"
    if type(thing) in (list, tuple):
        return _in_brackets([_full(item) for item in thing], thing)  # type: ignore[attr-defined]
    if type(thing) is dict:
        return "{" + ", ".join(f"{_full(key)}: {_full(value)}" for key, value in thing.items()) + "}"
    if isinstance(thing, FunctionType):
        return thing.__qualname__ + _closed_over(thing)
    if isinstance(thing, functools.partial):
        return _partial(thing)
    return repr(thing)


def _in_brackets(items: list[str], of: object) -> str:
    """Return the text of a list or a tuple."""
    if isinstance(of, list):
        return f"[{', '.join(items)}]"
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def same_program(program: object, other: object) -> bool:
    """Return whether two programs of this process are equal. Functions are compared by identity."""
    if program is other:
        return True
    return list(_functions(program)) == list(_functions(other)) and _full(program) == _full(other)


def _functions(thing: object) -> Iterator[FunctionType]:
    """Yield all functions within a program."""
    yield from (part for part in _parts(thing) if isinstance(part, FunctionType))


def _parts(thing: object) -> Iterator[object]:
    """Yield a program and everything within it."""
    yield thing
    within: list[object] = []
    if isinstance(thing, functools.partial):
        within = [thing.func, thing.args, thing.keywords]
    elif isinstance(thing, Mapping):
        within = list(thing.values())
    elif isinstance(thing, list | tuple):
        within = list(thing)
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        within = [getattr(thing, option.name) for option in dataclasses.fields(thing)]
    for part in within:
        yield from _parts(part)


def _partial(thing: "functools.partial[object]") -> str:
    text = repr(thing)
    for function in _functions(thing):
        text = text.replace(repr(function), _full(function))
    return text


def _closed_over(function: FunctionType) -> str:
    """Return the plain values in a function's closure and defaults, except ranks and assigned variables."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    # A variable that the function assigns is a counter or a cache, not an option.
    changed = {step.argval for step in dis.get_instructions(function) if step.opname == "STORE_DEREF"}
    values = {name: cell.cell_contents for name, cell in cells if name not in changed and _filled(cell)}
    given = inspect.signature(function).parameters.values()
    values |= {option.name: option.default for option in given if option.default is not option.empty}
    shown = [
        f"{name}={_full(value)}"
        for name, value in values.items()
        if _plain(value) and not _is_rank(name, value)
    ]
    return f"({', '.join(shown)})" if shown else ""


def _is_rank(name: str, value: object) -> bool:
    """Return whether a value is this process's rank, which differs between equal programs."""
    if name not in _RANKS or type(value) is not int:
        return False
    own = {os.environ.get(variable) for variable in _RANKS[name]}
    if dist.is_initialized():
        own.add(str(dist.get_rank()))
    return str(value) in own


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # it is assigned later
        return False


def _plain(value: object) -> bool:
    """Return whether equal values have equal text on all ranks."""
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    is_program = dataclasses.is_dataclass(value) and callable(value) and not isinstance(value, type)
    return value is None or is_program or isinstance(value, int | float | str | torch.dtype)


def _has_own_repr(thing: object) -> bool:
    """Return whether a dataclass's repr was written by its author, not generated."""
    own = vars(type(thing)).get("__repr__")
    return own is not None and not own.__code__.co_filename.endswith(("dataclasses.py", "reprlib.py"))


def short(thing: object) -> str:
    """Return a program as the user wrote it, without options that have their default.

    >>> from thinwire import ErrorFeedback, Quantize, TwoShot
    >>> short(ErrorFeedback(TwoShot(Quantize(bits=4))))
    'ErrorFeedback(TwoShot(Quantize(bits=4)))'
    """
    written = getattr(thing, "__dict__", {}).get(_WRITTEN)
    if written is not None:
        return str(written)
    inner = getattr(thing, "described", None)
    if inner is not None:
        return short(inner)
    if type(thing) in (list, tuple):
        return _in_brackets([short(item) for item in thing], thing)  # type: ignore[attr-defined]
    if isinstance(thing, Mapping):
        return "{" + ", ".join(f"{key!r}: {short(value)}" for key, value in thing.items()) + "}"
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type) or _has_own_repr(thing):
        return _full(thing)
    options: list[str] = []
    named = False
    for option in dataclasses.fields(thing):
        value, made = getattr(thing, option.name), option.default_factory
        default = option.default if made is dataclasses.MISSING else made()
        unsaid = option.name in vars(thing).get(DERIVED_OPTIONS, ()) or (
            default is not dataclasses.MISSING and value == default
        )
        if not option.repr or unsaid:
            named = True  # options after a skipped one cannot be positional
            continue
        by_place = not named and not option.kw_only and not isinstance(value, int | float | str)
        named = named or not by_place
        options.append(short(value) if by_place else f"{option.name}={short(value)}")
    return f"{type(thing).__qualname__}({', '.join(options)})"
