"""Named ranges for torch's profiler.

| range | what runs |
|---|---|
| `thinwire::encode` | a program up to its first collective |
| `thinwire::combine` | a program between two collectives: it decodes, reduces, and encodes again |
| `thinwire::decode` | a program after its last collective |
| `thinwire::issue`, `thinwire::wait` | the start of a collective, and the wait for its result |
| `thinwire::settle` | the end of a step |
| `thinwire::averaging` | an exchange of models |
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler

from thinwire.engine.comm.process_group import profiler_runs

_OFF: AbstractContextManager[Any] = contextlib.nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context that shows up as `thinwire::name` in a running profiler; it costs nothing otherwise.

    torch's profiler sees backward's own thread. For the wire thread give it
    `experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True)`.
    """
    if not profiler_runs():
        return _OFF
    return profiler.record_function(f"thinwire::{name}")


def stage_name(stage: int, last: int | None) -> str:
    """Return the name of a program's range.

    Args:
        stage: The number of collectives before it.
        last: The number of all its collectives, known from the step before; None in the first step.
    """
    if stage == 0:
        return "encode"
    return "decode" if stage == last else "combine"
