"""The time of a step without communication, measured on this machine or assumed."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire.errors import OptionError
from thinwire.plan.cost import Compute
from thinwire.plan.devices import Device
from thinwire.plan.encode import copy_rate
from thinwire.plan.gaps import kind_of
from thinwire.plan.traffic import Shapes

_ROUNDS, _MOST_SECONDS = 7, 8.0
_FORWARD, _OPTIMIZER = 0.3, 0.05
"""Shares of forward and of the optimizer in a step whose parts were not measured."""

_QUARTILES = 1.349
"""The distance of the quartiles of a normal distribution, in standard deviations."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Measured:
    """A model and its step without communication.

    Attributes:
        shapes: The shapes of the parameters in the order in which backward computes their gradients.
        compute: The times.
        kind: The kind of the model, see `thinwire.plan.gaps.kind_of`.
    """

    shapes: Shapes
    compute: Compute
    kind: str = ""


def cores_per_rank(ranks_here: int = 1) -> float:
    """Return the number of cores for each rank on this host."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return here / max(1, ranks_here)


def measure(model: nn.Module, batch: Callable[[int], Any], make: MakeOptimizer) -> Measured:
    """Measure forward, backward and the optimizer's step on this machine.

    Args:
        model: The model. `model(batch(step))` is the loss.
        batch: Returns the batch of a step.
        make: Makes the optimizer.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    ready: dict[str, float] = {}

    def note(tensor: torch.Tensor) -> None:
        ready.setdefault(names[id(tensor)], time.perf_counter())

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(note) for parameter in trained]
    optimizer = make(trained)
    rounds: list[tuple[list[str], list[float]]] = []
    begun = time.perf_counter()
    # The first round allocates memory and is left out, so at least two are needed.
    try:
        while len(rounds) < _ROUNDS and (len(rounds) < 2 or time.perf_counter() - begun < _MOST_SECONDS):
            ready.clear()
            rounds.append(_round(model, batch(len(rounds)), optimizer, ready))
    finally:
        for handle in handles:
            handle.remove()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    order = rounds[-1][0]
    times = [values for _, values in rounds[1:]]
    found = {name: shapes[name] for name in order}
    return Measured(found, _compute(times), kind_of(model))


def _round(
    model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, ready: dict[str, float]
) -> tuple[list[str], list[float]]:
    """Train one step. Return the order of gradients, and the times after forward, gradients and step."""
    started = time.perf_counter()
    optimizer.zero_grad()
    loss = model(batch)
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    ended = time.perf_counter()
    arrivals = sorted(ready.values())
    times = [instant - started for instant in (forward, *arrivals, backward, ended)]
    return list(ready), times


def _compute(rounds: Sequence[Sequence[float]]) -> Compute:
    """Return the medians of all rounds."""
    medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
    totals = [times[-1] for times in rounds]
    return Compute(
        begin=medians[0],
        arrivals=tuple(medians[1:-2]),
        backward=medians[-2],
        optimizer=medians[-1] - medians[-2],
        copy_rate=copy_rate(),
        spread=_deviation(totals),
        cores=cores_per_rank(),
    )


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation, estimated from the quartiles.

    A single round that another process disturbed does not change the quartiles.
    """
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / _QUARTILES


def assumed(shapes: Shapes, seconds: float, kind: str = "", device: Device | None = None) -> Measured:
    """Return a step of a known total time, whose parts are assumed.

    Forward takes 30 % and the optimizer 5 %. Backward computes gradients in proportion to their sizes.

    Args:
        shapes: The shapes of the parameters in the order of gradients.
        seconds: The time of a step without communication.
        kind: The kind of the model.
        device: The device of the data sheet whose memory is used. None for this machine's, which is measured.
    """
    begin, backward = _FORWARD * seconds, (1 - _OPTIMIZER) * seconds
    total, done, arrivals = sum(shape.numel() for shape in shapes.values()), 0, []
    for shape in shapes.values():
        done += shape.numel()
        arrivals.append(begin + (backward - begin) * done / total)
    compute = Compute(
        begin=begin,
        arrivals=tuple(arrivals),
        backward=backward,
        optimizer=seconds - backward,
        copy_rate=copy_rate() if device is None else device.copy_rate,
        cores=cores_per_rank() if device is None else Compute.cores,
        shared=device is not None,
    )
    return Measured(shapes, compute, kind)


def shapes_of(model: nn.Module) -> Shapes:
    """Return the shapes of the trainable parameters in the order of backward, the last layer first."""
    trained = [
        (name, parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    if not trained:
        raise OptionError("the model has no parameter that requires a gradient: nothing is exchanged")
    return dict(reversed(trained))


def transformer_shapes(parameters: float) -> Shapes:
    """Return the shapes of a transformer with about `parameters` parameters, for plans without a model.

    A layer has matrices of 12 width^2 numbers and two norms. The width is that of common models of the size,
    about 64 times the number of layers.

    >>> round(sum(shape.numel() for shape in transformer_shapes(7e9).values()) / 7e9, 2)
    1.0
    """
    # parameters = 12 layers width^2 with width = 64 layers.
    layers = max(1, round((parameters / (12 * 64**2)) ** (1 / 3)))
    width = max(1, round((parameters / (12 * layers)) ** 0.5))
    found: dict[str, torch.Size] = {}
    for layer in reversed(range(layers)):
        for name, shape in (
            ("down", (width, 4 * width)),
            ("up", (4 * width, width)),
            ("out", (width, width)),
            ("qkv", (3 * width, width)),
            ("norm_2", (width,)),
            ("norm_1", (width,)),
        ):
            found[f"layers.{layer}.{name}"] = torch.Size(shape)
    return found
