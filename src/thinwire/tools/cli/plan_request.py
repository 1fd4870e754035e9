"""The options of `thinwire plan`, parsed: the model, the network, the candidates and the limits."""

import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from thinwire.errors import OptionError
from thinwire.plan.candidates import DEFAULTS, Candidate
from thinwire.plan.compute import Measured, assumed, measure, shapes_of, transformer_shapes
from thinwire.plan.devices import TOKENS, Device, DeviceSpeeds, find_device
from thinwire.plan.encode import Speeds, contention
from thinwire.plan.gaps import TRANSFORMER, Known, kind_of
from thinwire.plan.network import FRAMING, Link, Network
from thinwire.plan.planner import Planner
from thinwire.plan.recommend import Limits
from thinwire.plan.text import predicted
from thinwire.plan.traffic import Shapes
from thinwire.plan.units import (
    is_byte_rate,
    parse_bytes,
    parse_rate,
    parse_seconds,
    parse_share,
    show_seconds,
)
from thinwire.tools.bench.parsing import parse_program, split_programs
from thinwire.tools.bench.predict import left_out, measured_gaps
from thinwire.tools.bench.results import Results
from thinwire.tools.bench.workloads import call_users, check_workload, find_workload
from thinwire.tools.cli.output import err

MOST_HOSTS = 1 << 16
_STEPS = 2000
"""The default length of a training. Programs are planned for its middle."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options as the user wrote them.

    Each is described in the help of `thinwire plan`.

    Raises:
        OptionError: A number is out of range.
    """

    model: str | None
    parameters: float | None
    compute: str | None
    hosts: str | None
    link: str | None
    up: str | None
    down: str | None
    rtt: str
    steps: int | None
    programs: str | None
    max_gap: str
    max_memory: str | None
    exclude: str
    results: Path | None
    device: str | None = None
    tokens: float | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.device is None:
            raise OptionError("--tokens needs --device: without it, pass the time of a step by --compute")
        if self.tokens is not None and self.compute is not None:
            raise OptionError("--tokens and --compute both set the time of a step: pass one of them")
        if self.tokens is not None and not 1 <= self.tokens < 1e15:
            raise OptionError(f"tokens={self.tokens:g} must be at least 1: tokens of a device in each step")
        self.gpu  # noqa: B018 - raises for an unknown device before anything is built
        if self.steps is not None and self.steps < 1:
            raise OptionError(f"steps={self.steps} must be at least 1: a plan is for a training")
        self.limits()

    @property
    def gpu(self) -> Device | None:
        """The device of a data sheet to plan for, or None for this machine."""
        return None if self.device is None else find_device(self.device)

    def limits(self) -> Limits:
        """Return the constraints of a recommendation."""
        memory = None if self.max_memory is None else parse_bytes(self.max_memory, "max-memory")
        excluded = [name for name in split_programs(self.exclude) if name]
        return Limits(gap=parse_share(self.max_gap, "max-gap"), memory=memory, exclude=excluded)

    def known(self) -> Known:
        """Return the measured loss gaps."""
        if self.results is None:
            return Known(steps=self.steps, kind=self.measured.kind)
        results = Results.load(self.results)
        say_left_out(results, self.named)
        return Known(own=measured_gaps(results, self.named), steps=self.steps, kind=self.measured.kind)

    @property
    def named(self) -> list[str]:
        """The programs that the user named."""
        return [] if self.programs is None else split_programs(self.programs)

    def candidates(self) -> list[Candidate]:
        """Return the candidates to compare with plain DDP."""
        texts = list(DEFAULTS) if self.programs is None else self.named
        return [Candidate.of(text, parse_program(text)) for text in texts]

    def networks(self) -> list[Network]:
        """Return the network that the options describe, once for each world size."""
        return [self.network(count) for count in world_sizes(self.hosts)]

    def network(self, hosts: int) -> Network:
        """Return the network of some hosts.

        Raises:
            OptionError: A rate or time does not parse, or there is no rate.
        """
        rates = []
        for name, own in (("up", self.up), ("down", self.down)):
            text = self.link if own is None else own
            if text is None:
                raise OptionError(
                    "pass --link 100mbit, or --up and --down: there is no rate; under torchrun the network is"
                    " probed"
                )
            rate = parse_rate(text, "link" if own is None else name)
            # PCIe and others are described by the bytes of data they carry, Ethernet by the bits of frames.
            rates.append(rate if is_byte_rate(text) else FRAMING * rate)
        latency = parse_seconds(self.rtt, "rtt") / 2
        network = Network(ranks=hosts, link=Link(up=rates[0], down=rates[1], latency=latency))
        return network if self.gpu is None else self.gpu.connect(network)

    def planner(self, ranks: int) -> Planner:
        """Return the planner for the model.

        Raises:
            OptionError: There is no model, or it cannot be imported or trained, or a candidate does not fit.
        """
        self.candidates()
        measured = self.measured
        gpu = self.gpu
        speeds = Speeds(factor=contention(measured.compute.cores)) if gpu is None else DeviceSpeeds(gpu)
        return Planner(measured, step=(self.steps or _STEPS) // 2, speeds=speeds)

    def words(self) -> str:
        """Return a description of the model and its step."""
        numbers = sum(shape.numel() for shape in self.measured.shapes.values())
        step = show_seconds(self.measured.compute.step)
        name = self.model or "a transformer"
        return f"{name}, {numbers / 1e6:,.3g} M parameters, {step} a step without communication"

    def note(self) -> str | None:
        """Return the text which says that a plan for --device is not measured, or None without --device."""
        if self.gpu is None:
            return None
        return predicted(self.gpu, None if self.compute is not None else self.tokens or TOKENS)

    @cached_property
    def measured(self) -> Measured:
        """The model's shapes, and its step as measured here or passed by --compute."""
        seconds = None if self.compute is None else parse_seconds(self.compute, "compute")
        if seconds is not None and seconds <= 0:
            raise OptionError(
                f"compute={self.compute!r} must be above 0: pass the time of a step, such as 0.4s"
            )
        if (self.model is None) == (self.parameters is None):
            raise OptionError("pass either --model module:build, or --parameters 7e9 with --compute 0.4s")
        if self.model is not None and self.gpu is None:
            return _of_model(self.model, seconds)
        if self.model is not None:
            return self._on_device(*_shapes_of_model(self.model), seconds)
        assert self.parameters is not None
        if not 1 <= self.parameters < 1e15:
            raise OptionError(f"parameters={self.parameters:g} must be at least 1: pass a count such as 7e9")
        if self.gpu is not None:
            return self._on_device(transformer_shapes(self.parameters), TRANSFORMER, seconds)
        if seconds is None:
            raise OptionError(
                "--parameters needs --compute or --device: pass the time of a step, such as --compute 0.4s,"
                " or a GPU, such as --device h100"
            )
        return assumed(transformer_shapes(self.parameters), seconds, TRANSFORMER)

    def _on_device(self, shapes: Shapes, kind: str, seconds: float | None) -> Measured:
        """Return the model with a step that is predicted for the device, unless --compute passed its time."""
        assert self.gpu is not None
        if seconds is None and kind != TRANSFORMER:
            raise OptionError(
                f"model={self.model!r} is not a transformer: --device predicts the step of a transformer from"
                " its parameters; pass --compute, the time of a step on the device"
            )
        count = sum(shape.numel() for shape in shapes.values())
        if seconds is None:
            seconds = self.gpu.step_seconds(count, self.tokens or TOKENS)
        return assumed(shapes, seconds, kind, self.gpu)


def _of_model(name: str, seconds: float | None) -> Measured:
    """Return a model's shapes and its step. With `seconds` the model is built without values."""
    with redirect_stdout(sys.stderr):
        if seconds is None:
            check_workload(name)
            return measure_workload(name)
    shapes, kind = _shapes_of_model(name)
    return assumed(shapes, seconds, kind)


def _shapes_of_model(name: str) -> tuple[Shapes, str]:
    """Return the shapes and the kind of a model, which is built without values."""
    with redirect_stdout(sys.stderr):
        workload = find_workload(name)
        with torch.device("meta"):
            built = call_users(workload.build, f"model={name!r} on the device meta")
    return shapes_of(built), kind_of(built)


def measure_workload(name: str) -> Measured:
    """Return the shapes and the times of a workload.

    Raises:
        OptionError: There is no such workload, or it cannot be trained.
    """
    workload = find_workload(name)
    found: Measured = call_users(
        lambda: measure(workload.model(), partial(workload.batch, 0), workload.optimizer), f"model={name!r}"
    )
    return found


def say_left_out(results: Results, named: Collection[str]) -> None:
    """Print the programs of a results file that are left out, because only the user may name code."""
    for text in left_out(results, named):
        err.print(
            f"left out: {text}, because a file may not choose code to run; if it is yours, add it to"
            " --programs",
            style="bold",
        )


def world_sizes(text: str | None) -> list[int]:
    """Parse the world sizes of a plan. A range has powers of two.

    Raises:
        OptionError: The text does not parse, or a world size is below 2.

    >>> world_sizes("8"), world_sizes("2,4"), world_sizes("2..16")
    ([8], [2, 4], [2, 4, 8, 16])
    """
    if text is None:
        raise OptionError("pass --hosts: the number of hosts, such as --hosts 8, or a range 2..4096")
    first, dots, last = text.partition("..")
    try:
        found = [int(number) for number in ((first, last) if dots else text.split(","))]
    except ValueError:
        raise OptionError(f"hosts={text!r} does not parse: write 8, or 2,4,8, or a range 2..4096") from None
    for count in found:
        if not 2 <= count <= MOST_HOSTS:
            raise OptionError(f"hosts={count} must be from 2 to {MOST_HOSTS}: one host sends nothing")
    if not dots:
        return found
    powers = [1 << bit for bit in range(1, 17) if found[0] < 1 << bit < found[1]]
    return sorted({found[0], *powers, found[1]})
