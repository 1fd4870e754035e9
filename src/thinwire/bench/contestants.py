"""Who takes part: plain DDP, thinwire's programs, and torch's own hook of the same name where it has one."""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.bench.workloads import call_users, find_object
from thinwire.errors import OptionError
from thinwire.programs.program import Program, describe

PLAIN = "DDP"
ALONE = "no communication"


@dataclass(frozen=True)
class TorchHook:
    """torch's own hook for what a program does.

    Attributes:
        name: Its name in torch, with what tells it apart, given the program.
        register: Makes a model use it; given the program, for its options.
        bucket_mb: What it needs to survive, where that is not the user's.
    """

    name: Callable[[Any], str]
    register: Callable[[DDP, Any], None]
    bucket_mb: float | None = None


def _simple(hook: Callable[..., Any]) -> TorchHook:
    return TorchHook(
        lambda program: hook.__name__, lambda ddp, program: ddp.register_comm_hook(ddp.process_group, hook)
    )


def _powersgd_name(program: thinwire.PowerSGD) -> str:
    return f"{'batched_' * program.flatten}powerSGD_hook rank {program.rank}, one bucket"


def _register_powersgd(ddp: DDP, program: thinwire.PowerSGD) -> None:
    hook = torch_powersgd.batched_powerSGD_hook if program.flatten else torch_powersgd.powerSGD_hook
    state = torch_powersgd.PowerSGDState(
        ddp.process_group,
        program.rank,
        start_powerSGD_iter=2,
        min_compression_rate=program.min_compression,
        use_error_feedback=program.error_feedback,
        warm_start=program.warm_start,
    )
    ddp.register_comm_hook(state, hook)


PROGRAMS: dict[str, TorchHook | None] = {
    "Exact": _simple(torch_hooks.allreduce_hook),
    "FP16": _simple(torch_hooks.fp16_compress_hook),
    "BF16": _simple(torch_hooks.bf16_compress_hook),
    "Int8": None,
    "Int4": None,
    "FP8": None,
    "Sign": None,
    "TopK": None,
    "RandomK": None,
    "PowerSGD": TorchHook(_powersgd_name, _register_powersgd, bucket_mb=100_000),
}
"""thinwire's programs by name, each with torch's hook for the same thing, if one runs.

(torch's quantization hooks do not on Gloo; benchmarks/hooks.py mends them.)
"""


@dataclass(frozen=True)
class Contestant:
    """One way to train.

    Attributes:
        name: As it stands in tables.
        kind: "ddp", "thinwire", "torch", or "alone" for no communication at all.
        text: The program as the user wrote it; for torch's hooks the program they stand against.
        rival: The name of torch's hook for the same thing.
    """

    name: str
    kind: str
    text: str
    rival: str | None = None

    def wrap(self, model: torch.nn.Module, bucket_mb: float | None) -> DDP:
        """The model in DDP, each with connections of its own, so that none finds them warmer than another.

        torch's multi-step hooks race with more than one bucket, so they get one.
        """
        hook = _torch_hook(self.text) if self.kind == "torch" else None
        size = hook.bucket_mb if hook and hook.bucket_mb else bucket_mb
        return DDP(model, bucket_cap_mb=size, process_group=dist.new_group(), init_sync=False)

    def prepare(self, ddp: DDP, steps: int) -> thinwire.Wire | None:
        """Make `ddp` exchange its gradients this way, for so many steps."""
        if self.kind == "thinwire":
            return thinwire.attach(ddp, parse_program(self.text), history=steps)
        if self.kind == "torch":
            hook = _torch_hook(self.text)
            assert hook is not None, "the line-up has torch's hook only where there is one"
            hook.register(ddp, parse_program(self.text))
        return None


def line_up(programs: list[str], *, with_torch: bool = True) -> list[Contestant]:
    """Plain DDP first, then each program followed by torch's counterpart, then the one that does not talk."""
    contestants = [Contestant(PLAIN, "ddp", "")]
    for text in programs:
        hook = _torch_hook(text) if with_torch else None
        rival = f"torch {hook.name(parse_program(text))}" if hook else None
        contestants.append(Contestant(_short_name(text), "thinwire", text, rival))
        if rival and all(rival != contestant.name for contestant in contestants):
            contestants.append(Contestant(rival, "torch", text))
    names = [contestant.name for contestant in contestants]
    if twice := [name for name in names if names.count(name) > 1]:
        raise OptionError(f"programs has {twice[0]} twice: name each once")
    return [*contestants, Contestant(ALONE, "alone", "")]


def parse_program(text: str) -> Program:
    """A program from text: `bf16`, `Reduced(Cast(...))` or `package.module:Name(option=1)`.

    >>> parse_program("exact")
    Exact()
    """
    module, colon, call = text.rpartition(":")
    try:
        tree = ast.parse(call.strip(), mode="eval").body
    except SyntaxError as error:
        raise OptionError(
            f"program={text!r} does not parse ({error.msg}): write Name or Name(option=value)"
        ) from error
    program = call_users(lambda: _build(tree, f"{module}{colon}"), f"program={text!r}")
    if not callable(program) or isinstance(program, type):
        raise OptionError(
            f"program={text!r} is not a program: it must yield collectives, see docs/programs.md"
        )
    describe(program)
    return program  # type: ignore[no-any-return] # whatever it is, attach checks it again


def split_programs(text: str) -> list[str]:
    """Texts between the commas that are not within brackets.

    >>> split_programs("exact, PowerSGD(rank=4, warm_start=True),bf16")
    ['exact', 'PowerSGD(rank=4, warm_start=True)', 'bf16']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _build(tree: ast.expr, prefix: str) -> Any:
    """Calls, names and literals; a bare name is called without options."""
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        options = {word.arg: _value(word.value) for word in tree.keywords if word.arg}
        return _find(tree.func.id, prefix)(*(_value(arg) for arg in tree.args), **options)
    if isinstance(tree, ast.Name):
        return _find(tree.id, prefix)()
    raise ValueError("it is no name")


def _value(tree: ast.expr) -> Any:
    """An option: a literal, or a nested program."""
    return _build(tree, "") if isinstance(tree, ast.Call | ast.Name) else ast.literal_eval(tree)


def _find(name: str, prefix: str) -> Any:
    if prefix:
        return find_object(prefix + name, "program")
    for public in thinwire.__all__:
        if public.lower() == name.lower():
            return getattr(thinwire, public)
    raise OptionError(
        f"program={name!r} is unknown: choose from {', '.join(PROGRAMS)}, or your own by package.module:Name"
    )


def _short_name(text: str) -> str:
    """How a program stands in tables: as the user wrote it, spelled as thinwire spells it."""
    parse_program(text)
    name, bracket, options = text.strip().partition("(")
    return _proper(name) + bracket + options


def _proper(name: str) -> str:
    return next((public for public in thinwire.__all__ if public.lower() == name.lower()), name)


def _torch_hook(text: str) -> TorchHook | None:
    return PROGRAMS.get(_proper(text.strip().partition("(")[0]))
