"""SparseLoCo: DiLoCo whose pseudo-gradients are sent as their few largest entries, two bits each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from thinwire.codecs.topk import LargestEntries
from thinwire.programs.error_feedback import ErrorFeedback
from thinwire.programs.gathered import Gathered
from thinwire.programs.naming import preset
from thinwire.strategies.averaging.diloco import DiLoCo

_BLOCK = 4096
_PLAIN = partial(torch.optim.SGD, lr=1.0)


@preset
def SparseLoCo(  # noqa: N802 - it reads as the configuration that it makes
    period: int,
    *,
    ratio: float = 64 / _BLOCK,
    keep: float = 0.95,
    outer: Callable[[Any], torch.optim.Optimizer] = _PLAIN,
    **options: Any,
) -> DiLoCo:
    """Train locally, and exchange a few entries of the pseudo-gradients after every `period` steps.

    Each rank sends the largest entries of every block of 4096, with 2 bits for the value and about 8 for the
    position of each. The rest is kept for the next exchange. Two ranks send 1/200 of the exact bytes in an
    exchange, once in `period` steps. The bytes grow with the number of ranks. 1-D tensors are exact, and in
    small models they make up most of the bytes. `rules=[("*", config.program)]` sends them sparse too.

    Use it on links on which `DiLoCo` with `Int4()` or `Int2()` still waits, and for long trainings. Entries
    arrive many exchanges late, so short trainings fall behind (docs/benchmarks.md).

    Args:
        period: Steps from one exchange to the next.
        ratio: Share of the entries that is sent.
        keep: Share of the residual that is kept for the next exchange.
        outer: A function that makes the outer optimizer. By default SGD with lr 1 and without momentum,
            because the residual already carries changes over to later exchanges.
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
