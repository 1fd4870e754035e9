"""SparseLoCo: DiLoCo whose pseudo-gradients are sent as their few largest entries, two bits each."""

from collections.abc import Callable
from typing import Any

import torch

from thinwire.codecs.topk import LargestEntries
from thinwire.programs.description import preset
from thinwire.programs.error_feedback import ErrorFeedback
from thinwire.programs.gathered import Gathered
from thinwire.strategies.averaging.diloco import DiLoCo

_BLOCK = 4096


@preset
def SparseLoCo(  # noqa: N802 - it reads as the configuration that it makes
    period: int,
    *,
    ratio: float = 1 / 4,
    keep: float = 1.0,
    outer: Callable[[Any], torch.optim.Optimizer] | None = None,
    **options: Any,
) -> DiLoCo:
    """Train locally, and exchange the largest changes of the parameters after every `period` steps.

    Each rank sends the largest entries of every block of 4096, with 2 bits for the value and about 4 for the
    position of each. The rest is kept for the next exchange. Two ranks send 1/21 of the exact bytes in an
    exchange, once in `period` steps. The bytes grow with the number of ranks. 1-D tensors are exact, and in
    small models they make up much of the bytes. `rules=[("*", config.program)]` sends them sparse too.

    Use it for long trainings. Entries arrive late, so short trainings fall behind. For a model of a million
    parameters, `DiLoCo` with `Int2()` and a longer period was as good in the same bytes (docs/benchmarks.md).

    The paper sends 1/64 of the entries, feeds back 0.95 of the residual, and uses SGD with lr 1 as the outer
    optimizer. Models of a million parameters learn far more slowly with these settings:
    `SparseLoCo(period, ratio=1/64, keep=0.95, outer=partial(torch.optim.SGD, lr=1))`.

    Args:
        period: Steps from one exchange to the next.
        ratio: Share of the entries that is sent.
        keep: Share of the residual that is kept for the next exchange.
        outer: A function that makes the outer optimizer. By default that of `DiLoCo`.
        **options: Further options of `DiLoCo`, such as `warmup_steps` or `overlap`.

    Returns:
        A `DiLoCo` with the program `ErrorFeedback(Gathered(LargestEntries(...)), keep=keep)`.

    Raises:
        OptionError: An option has a wrong type or value.

    Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo, https://arxiv.org/abs/2508.15706.

    Example::

        wire = thinwire.attach(ddp, thinwire.SparseLoCo(period=32), optimizer=optimizer)
    """
    codec = LargestEntries(ratio=ratio, block=_BLOCK, values="int2")
    return DiLoCo(period, outer=outer, program=ErrorFeedback(Gathered(codec), keep=keep), **options)
