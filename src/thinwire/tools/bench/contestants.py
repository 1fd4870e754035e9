"""The contestants of a benchmark: plain DDP, thinwire's programs and strategies, torch's counterparts."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import thinwire
from thinwire import Averaging, Configuration, Schedule, Warmup
from thinwire.errors import OptionError
from thinwire.tools.bench.parsing import Attachable, parse_program, public_name
from thinwire.tools.bench.torch_baselines import COUNTERPARTS, Counterpart, MakeOptimizer

PLAIN = "DDP"
ALONE = "no communication"

BUCKET_MB = {"Int8": 1.0, "Int4": 1.0, "Int2": 1.0, "FP8": 1.0}
"""The best bucket sizes of programs without an attribute `bucket_mb`. The others use DDP's default.

Measured by `thinwire bench --bucket-mb` on emulated links of 10 and 100 Mbit/s: with small buckets, a cheap
codec sends the first gradients while backward still runs. PowerSGD's cost per bucket exceeds this gain at 100
Mbit/s.
"""

_EXCHANGES = 16
"""The fewest exchanges of whole models after which losses can be compared, if all numbers are sent."""


@dataclass(frozen=True)
class Contestant:
    """One way to train.

    Attributes:
        name: The name in tables.
        kind: "ddp", "thinwire", "torch", or "alone" for no communication at all.
        text: The program as the user wrote it. For torch's, the program that it is compared with.
        rival: The name of torch's counterpart, or None.
    """

    name: str
    kind: str
    text: str
    rival: str | None = None

    @cached_property
    def program(self) -> Attachable | None:
        """The argument of `attach`. None for plain DDP and without communication."""
        return parse_program(self.text) if self.text else None

    @property
    def averages_models(self) -> bool:
        """True if each rank trains its own model between averages."""
        stages = self.program.stages.values() if isinstance(self.program, Schedule) else [self.program]
        return any(isinstance(stage, Averaging) for stage in stages)

    @property
    def cycle(self) -> int | None:
        """The steps after which costs repeat. None if they do not repeat within a run."""
        return cycle_of(self.program)

    def bucket_mb(self, asked: float | None) -> float | None:
        """Return the size of DDP's buckets.

        torch's hooks with several collectives race if there is more than one bucket, so they get a single
        one. thinwire's programs get the size in `BUCKET_MB`.

        Args:
            asked: The size that the user passed. None to choose.

        Returns:
            The size in MB, or None for DDP's default.
        """
        if self.kind == "torch" and (needed := self._torch().bucket_mb):
            return needed
        if asked is not None or self.kind != "thinwire":
            return asked
        suited = getattr(self.program, "bucket_mb", None)
        return float(suited) if isinstance(suited, int | float) else BUCKET_MB.get(public_name(self.text))

    def wrap(self, model: torch.nn.Module, bucket_mb: float | None) -> DDP:
        """Wrap a model in DDP.

        Every contestant has its own process group, so that none benefits from connections that another one
        has warmed up.

        Args:
            model: The model, equal on all ranks.
            bucket_mb: The bucket size that the user passed. None to choose.
        """
        size = self.bucket_mb(bucket_mb)
        return DDP(model, bucket_cap_mb=size, process_group=dist.new_group(), init_sync=False)

    def prepare(self, ddp: DDP, make: MakeOptimizer) -> tuple[Optimizer, thinwire.Wire | None]:
        """Attach this contestant to a model.

        Args:
            ddp: The model from `wrap`.
            make: Makes the optimizer for some parameters.

        Returns:
            The optimizer to step, and the wire of a thinwire contestant.
        """
        if self.kind == "torch":
            return self._torch().prepare(ddp, self.program, make), None
        optimizer = make(ddp.parameters())
        if self.program is None:
            return optimizer, None
        passed = optimizer if isinstance(self.program, Configuration | Schedule) else None
        return optimizer, thinwire.attach(ddp, self.program, optimizer=passed, history=1)

    def _torch(self) -> Counterpart:
        return COUNTERPARTS[public_name(self.text)]


def line_up(programs: list[str], *, with_torch: bool = True) -> list[Contestant]:
    """Return the contestants for some programs.

    Plain DDP comes first, then each program followed by torch's counterpart. The last contestant does not
    communicate.

    Args:
        programs: Texts for `parse_program`.
        with_torch: Whether to add torch's own hooks and optimizers.

    Raises:
        OptionError: A text is not a program, or a program is named twice.
    """
    contestants = [Contestant(PLAIN, "ddp", "")]
    for text in programs:
        program, torchs = parse_program(text), COUNTERPARTS.get(public_name(text)) if with_torch else None
        rival = f"torch {torchs.name(program)}" if torchs else None
        contestants.append(Contestant(_short_name(text), "thinwire", text, rival))
        if rival and all(rival != contestant.name for contestant in contestants):
            contestants.append(Contestant(rival, "torch", text))
    names = [contestant.name for contestant in contestants]
    if twice := [name for name in names if names.count(name) > 1]:
        raise OptionError(f"programs has {twice[0]} twice: name each once")
    return [*contestants, Contestant(ALONE, "alone", "")]


def _short_name(text: str) -> str:
    """Return a program's name in tables: the user's text, with the capitals of the public name."""
    _, bracket, options = text.strip().partition("(")
    return public_name(text) + bracket + options


def cycle_of(program: object) -> int | None:
    """Return the number of steps after which a program's costs repeat.

    Returns:
        1 for a gradient program, the period of averaged models, or None for a schedule or a warm-up, whose
        costs do not repeat.
    """
    if isinstance(program, Schedule | Warmup) or getattr(program, "warmup_steps", None):
        return None
    return _period(program)


def rounds_needed(program: object) -> int:
    """Return the number of steps after which a program's costs are known.

    These are two whole periods of averaged models, counted from the start of a schedule's last stage. The
    warm-up of PowerSGD must be less than half of the run, because its figures are medians.

    >>> rounds_needed(thinwire.LocalSGD(period=8, warmup_steps=10)), rounds_needed(thinwire.Int8())
    (26, 2)
    """
    if isinstance(program, Schedule):
        last = max(program.stages)
        return last + rounds_needed(program.stages[last])
    if isinstance(program, Warmup):
        return program.steps + rounds_needed(program.program)
    warmup = getattr(program, "warmup_steps", 0) + 2 * getattr(program, "start_steps", 0)
    return int(warmup) + 2 * _period(program)


def exchanges(program: Averaging, steps: int) -> tuple[int, int]:
    """Return the exchanges of whole models in a run, and the fewest from which its loss can be judged.

    Averaged models fall behind at first and catch up later. Where only a share of the numbers is sent, most
    of them arrive after 1 / share exchanges, and training lags by as many.

    >>> exchanges(thinwire.DiLoCo(period=16), 64), exchanges(thinwire.SparseLoCo(16, ratio=1/64), 64)
    ((4, 16), (4, 128))
    """
    made = max(0, steps - program.warmup_steps) // _period(program)
    share = _share_sent(program.model_program())
    return made, max(_EXCHANGES, math.ceil(2 / share))


def _share_sent(program: object) -> float:
    """Return the share of all numbers that a program sends, by the `ratio` of its codec."""
    inner = getattr(program, "program", None) or getattr(program, "codec", None)
    return float(getattr(program, "ratio", 1.0)) if inner is None else _share_sent(inner)


def _period(program: object) -> int:
    levels = getattr(program, "levels", None)
    period = max(levels) if levels else getattr(program, "period", None)
    return period if isinstance(period, int) else 1
