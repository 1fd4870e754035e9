"""Fast and safe PyTorch data-parallel training on slow networks.

Example::

    wire = thinwire.attach(ddp, thinwire.BF16())
"""

from thinwire.attach import Wire, attach
from thinwire.codecs.cast import Cast
from thinwire.errors import (
    AttachError,
    DriftError,
    LabError,
    MismatchError,
    OptionError,
    ProgramError,
    StateError,
    ThinwireError,
    UnavailableError,
    WireError,
)
from thinwire.programs.allreduce import BF16, FP16, Exact, Reduced
from thinwire.programs.powersgd import PowerSGD
from thinwire.programs.program import Bucket, Memory, Outcome, Program
from thinwire.programs.warmup import Warmup
from thinwire.version import __version__
from thinwire.wire.meter import Stats, StepRecord
from thinwire.wire.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Await,
    Broadcast,
    Reduce,
    ReduceScatter,
    Steps,
)

__all__ = [
    "BF16",
    "FP16",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "AttachError",
    "Await",
    "Broadcast",
    "Bucket",
    "Cast",
    "DriftError",
    "Exact",
    "LabError",
    "Memory",
    "MismatchError",
    "OptionError",
    "Outcome",
    "PowerSGD",
    "Program",
    "ProgramError",
    "Reduce",
    "ReduceScatter",
    "Reduced",
    "StateError",
    "Stats",
    "StepRecord",
    "Steps",
    "ThinwireError",
    "UnavailableError",
    "Warmup",
    "Wire",
    "WireError",
    "__version__",
    "attach",
]
