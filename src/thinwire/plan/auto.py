"""Auto: a program that a plan on the real network chooses after the first steps, and a check of its gain."""

import json
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from thinwire.codecs.checks import check_whole
from thinwire.engine.comm.agreement import agreeing
from thinwire.engine.futures import at_work
from thinwire.engine.meter import GRADIENTS
from thinwire.errors import OptionError
from thinwire.plan.candidates import Candidate
from thinwire.plan.compute import assumed, cores_per_rank
from thinwire.plan.encode import Speeds, contention
from thinwire.plan.gaps import Known, kind_of
from thinwire.plan.network import Network
from thinwire.plan.planner import Planner
from thinwire.plan.probe import Probe
from thinwire.plan.recommend import MAX_GAP, Limits, recommend
from thinwire.plan.traffic import BUCKET
from thinwire.programs.allreduce import BF16, Exact
from thinwire.programs.description import describe, short
from thinwire.programs.powersgd import PowerSGD
from thinwire.programs.presets import Int4, Int8
from thinwire.programs.program import Program
from thinwire.programs.wrapper import as_program
from thinwire.step.strategy import Configuration, Context, Strategy, Target, require_state

logger = logging.getLogger("thinwire")

_KEY = "auto"
_WARM_UP = 2
"""Steps left out at the start of a measurement: DDP rebuilds its buckets and memory is allocated."""
_GAIN = 1.02
"""Step times must differ by this ratio to be a gain."""


def _candidates() -> tuple[Program, ...]:
    return (BF16(), Int8(), Int4(), PowerSGD(rank=8, factor_dtype="int8", warmup=0))


@dataclass(frozen=True, kw_only=True, repr=False)
class Auto(Configuration):
    """A program chosen by a plan on the real network, after the first steps.

    The first `after` steps exchange exact gradients and are timed. Then all ranks probe the network, and
    rank 0 plans as `thinwire plan` does, from the timed steps, the probed link and the speed of every program
    on its host. All ranks use rank 0's choice, which may be exact gradients. After `check_after` more steps,
    their time is compared with that of the first ones. Without a gain, gradients are exact again.

    The choice and its reason are in the log of `thinwire`, in `wire.program`, in `wire.explain()` and in the
    saved state, so a resumed run continues with it and does not plan again.

    Args:
        max_gap: The largest expected loss gap, as a share of the loss. Programs whose gap was never
            measured are not chosen. Gaps were measured on transformers. For other models they are the only
            evidence, and the reason mentions it.
        max_memory: The most bytes beyond plain DDP's memory. None for no limit.
        candidates: The gradient programs to choose from.
        after: Steps that are timed before the plan.
        check_after: Steps after which the gain is checked.
        steps: The length of the training, if known, for loss gaps that were measured over a similar length.
        program: The program that runs, which `Auto` sets itself. None before the plan.

    Raises:
        OptionError: An option has a wrong type or value.

    Example::

        wire = thinwire.attach(ddp, thinwire.Auto(max_gap=0.005))
    """

    schedulable: ClassVar[bool] = False

    max_gap: float = MAX_GAP
    max_memory: float | None = None
    candidates: tuple[Program, ...] = field(default_factory=_candidates)
    after: int = 8
    check_after: int = 32
    steps: int | None = None
    program: Program | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.max_gap, int | float) or not 0 <= self.max_gap < math.inf:
            raise OptionError(f"max_gap={self.max_gap!r} must be at least 0: a share of the loss, as 0.01")
        if self.max_memory is not None and not self.max_memory > 0:
            raise OptionError(f"max_memory={self.max_memory!r} must be positive: bytes, or None for no limit")
        check_whole("after", self.after, _WARM_UP + 1, "steps that are timed before the plan")
        check_whole("check_after", self.check_after, _WARM_UP + 1, "steps after which the gain is checked")
        programs = tuple(as_program(candidate, "candidates") for candidate in self.candidates)
        object.__setattr__(self, "candidates", programs)

    def validate(self, target: Target) -> None:
        """Raise OptionError if a candidate does not fit the model."""
        describe(self)
        for candidate in self.candidates:
            candidate.check(target.model.shapes(), target.model.group.size())

    def bind(self, context: Context) -> Strategy:
        """Return the strategy that plans and checks."""
        return AutoStrategy(self, context)

    def gradient_program(self) -> Program:
        """Return the chosen program, or `Exact()` before the plan."""
        return Exact() if self.program is None else self.program

    def with_gradient_program(self, program: Program) -> Configuration:
        """Return the configuration after another choice."""
        return replace(self, program=program)

    def variants(self) -> Sequence[Configuration]:
        """Return the configuration after each possible choice."""
        chosen = (None, Exact(), *self.candidates)
        return [replace(self, program=program) for program in chosen]


class AutoStrategy(Strategy):
    """Runs `Auto` on a model: times steps, plans once, and checks the plan once."""

    config: Auto

    def __init__(self, config: Auto, context: Context) -> None:
        super().__init__(config, context)
        self._forwards: Any = None
        self._since = context.steps.count
        """The step at which the running measurement began."""
        self._latest: tuple[int, float] | None = None
        self._seconds: list[float] = []
        self._baseline: float | None = None
        self._reason = ""
        self._done = False

    def start(self) -> None:
        """Time steps from the model's forward passes."""
        # A plan swaps programs. In a forward pass all ranks are certain to be between two steps.
        self._forwards = self.context.model.on_forward(self._forward)

    def close(self) -> None:
        """Stop planning and checking."""
        if self._forwards is not None:
            self._forwards.remove()
            self._forwards = None

    def explain(self) -> str:
        """Return the chosen program and the reason."""
        return f"Auto: {self._reason}" if self._reason else f"Auto: plans after {self.config.after} steps"

    def state_dict(self) -> dict[str, Any]:
        """Return the reason of the choice, and whether it was checked."""
        saved = {"reason": self._reason, "baseline": self._baseline, "done": self._done}
        return {_KEY: saved}

    def prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Validate a saved state, and return a function that applies it, so that a plan is made once."""
        saved = require_state(state, _KEY)

        def take_over() -> None:
            self._reason, self._done = str(saved.get("reason", "")), bool(saved.get("done", False))
            baseline = saved.get("baseline")
            self._baseline = None if baseline is None else float(baseline)
            self._begin_measuring()

        return take_over

    def _forward(self) -> None:
        """Time the step that has ended. Plan, or check the plan, once enough steps were timed."""
        steps = self.context.steps
        if self._done or steps.is_open or self.context.model.joins:
            return
        now, count = time.perf_counter(), steps.count
        if self._latest is not None and count == self._latest[0] + 1:
            self._seconds.append(now - self._latest[1])
        if self._latest is None or count != self._latest[0]:
            self._latest = (count, now)
        planned = self.config.program is not None
        if count - self._since >= (self.config.check_after if planned else self.config.after):
            with at_work():
                self._check() if planned else self._plan()
            self._begin_measuring()

    def _begin_measuring(self) -> None:
        self._since, self._latest, self._seconds = self.context.steps.count, None, []

    def _plan(self) -> None:
        """Probe the network on all ranks, plan on rank 0, and use its choice on all ranks. Collective."""
        communicator = self.context.communicator
        if communicator.size == 1:
            self._done, self._reason = True, "one rank exchanges nothing"
            return
        # Only rank 0 plans. Clocks and processors differ, so ranks would choose different programs.
        network = Probe(communicator, self.context.model.device).run()
        shared = self._share(lambda: self._choice(network))
        self._reason, self._baseline = shared["reason"], shared["step"]
        chosen: Program = Exact() if shared["choice"] < 0 else self.config.candidates[shared["choice"]]
        self._done = shared["choice"] < 0
        self._say(logging.INFO, f"auto: {self._reason}")
        self.change(replace(self.config, program=chosen))

    def _choice(self, network: Network) -> dict[str, Any]:
        """Return this rank's choice as plain values: a candidate's index, or -1 for exact gradients."""
        step = self._typical()
        model = self.context.model
        trained = [
            (name, parameter.shape)
            for name, parameter in model.parameters().items()
            if parameter.requires_grad
        ]
        # Backward computes gradients about in the reverse order of the parameters.
        measured = assumed(dict(reversed(trained)), self._computing(step))
        cores = cores_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        planner = Planner(measured, step=(self.config.steps or 2000) // 2)
        planner.speeds = Speeds(factor=contention(cores))
        size = model.bucket_bytes
        cap = None if size is None or size == BUCKET else size / (1 << 20)
        candidates = [Candidate(short(program), program, cap) for program in self.config.candidates]
        known = Known(steps=self.config.steps, kind=kind_of(model.module("Auto")))
        rows = planner.rows(candidates, network, known)
        limits = Limits(gap=self.config.max_gap, memory=self.config.max_memory)
        advice = recommend(rows, network, limits, self.config.steps)
        index = -1 if advice.row is None else candidates.index(advice.row.candidate)
        return {"choice": index, "reason": advice.text, "step": step}

    def _check(self) -> None:
        """Compare the timed steps with exact ones, and fall back to these without a gain. Collective."""
        shared = self._share(lambda: {"step": self._typical()})
        before = math.inf if self._baseline is None else self._baseline
        now = shared["step"]
        self._done = True
        gain = f"a step takes {1e3 * now:.1f} ms, and took {1e3 * before:.1f} ms with exact gradients"
        if now * _GAIN <= before:
            self._reason += f" Checked after {self.config.check_after} steps: {gain}."
            self._say(logging.INFO, f"auto: {short(self.config.program)} pays: {gain}")
            return
        self._reason += f" Back to exact gradients after {self.config.check_after} steps: {gain}."
        self._say(
            logging.WARNING, f"auto: {short(self.config.program)} does not pay: {gain}; back to Exact()"
        )
        self.change(replace(self.config, program=Exact()))

    def _typical(self) -> float:
        return statistics.median(self._seconds[_WARM_UP:] or self._seconds)

    def _computing(self, step: float) -> float:
        """Return the time of a step without the exposed time, where that is measured."""
        records = self.context.engine.stats().records[-len(self._seconds) :]
        waits = [
            record.exposed_seconds
            for record in records
            if record.purpose == GRADIENTS and record.exposed_seconds is not None
        ]
        # A difference of two medians may be negative on a noisy machine.
        return max(step - (statistics.median(waits) if waits else 0.0), 0.05 * step)

    def _share(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return rank 0's values on all ranks. Collective."""
        communicator, own = self.context.communicator, ""
        # A plan runs the candidates, which may be the user's code. If one raises on rank 0, `agreeing` raises
        # on all ranks; otherwise they would wait for rank 0 until the time limit.
        with agreeing(communicator.rendezvous, communicator.limit, f"{_KEY} on rank 0"):
            if communicator.rank == 0:
                own = json.dumps(make())
        shared: dict[str, Any] = json.loads(communicator.rendezvous.gather(_KEY, own, communicator.limit)[0])
        return shared

    def _say(self, level: int, text: str) -> None:
        if self.context.communicator.rank == 0:
            logger.log(level, text)
