"""Fast and safe PyTorch data-parallel training on slow networks.

Example::

    wire = thinwire.attach(ddp, thinwire.BF16())
"""

from thinwire.attach import attach
from thinwire.averaging.diloco import DiLoCo
from thinwire.averaging.hierarchical import Hierarchical
from thinwire.averaging.local_sgd import LocalSGD
from thinwire.averaging.policy import Averaging
from thinwire.checkpoint import PerRank, read_states
from thinwire.codecs.cast import Cast
from thinwire.codecs.codec import BlockCodec, Codec
from thinwire.codecs.float8 import Float8
from thinwire.codecs.quantize import Quantize
from thinwire.codecs.randomk import RandomEntries
from thinwire.codecs.sign import SignBits
from thinwire.codecs.topk import LargestEntries
from thinwire.errors import (
    AttachError,
    AuditError,
    DivergedError,
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
from thinwire.handle import Wire
from thinwire.programs.allreduce import BF16, FP16, Exact, Reduced
from thinwire.programs.audit import AuditRecord, ParameterAudit
from thinwire.programs.error_feedback import ErrorFeedback
from thinwire.programs.gathered import Gathered
from thinwire.programs.memory import Memory
from thinwire.programs.nodes import AcrossNodes
from thinwire.programs.partition import Partition
from thinwire.programs.powersgd import PowerSGD
from thinwire.programs.presets import FP8, Int4, Int8, RandomK, Sign, TopK
from thinwire.programs.program import Bucket, Outcome, Program
from thinwire.programs.rules import Size
from thinwire.programs.twoshot import TwoShot
from thinwire.programs.warmup import Warmup
from thinwire.schedules import Schedule
from thinwire.sharding.state import merged as merge_optimizer_states
from thinwire.sharding.zero import ZeRO
from thinwire.version import __version__
from thinwire.wire.meter import Stats, StepRecord
from thinwire.wire.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Await,
    Broadcast,
    Exchange,
    Reduce,
    ReduceScatter,
    Steps,
)

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "AcrossNodes",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "AttachError",
    "AuditError",
    "AuditRecord",
    "Averaging",
    "Await",
    "BlockCodec",
    "Broadcast",
    "Bucket",
    "Cast",
    "Codec",
    "DiLoCo",
    "DivergedError",
    "DriftError",
    "ErrorFeedback",
    "Exact",
    "Exchange",
    "Float8",
    "Gathered",
    "Hierarchical",
    "Int4",
    "Int8",
    "LabError",
    "LargestEntries",
    "LocalSGD",
    "Memory",
    "MismatchError",
    "OptionError",
    "Outcome",
    "ParameterAudit",
    "Partition",
    "PerRank",
    "PowerSGD",
    "Program",
    "ProgramError",
    "Quantize",
    "RandomEntries",
    "RandomK",
    "Reduce",
    "ReduceScatter",
    "Reduced",
    "Schedule",
    "Sign",
    "SignBits",
    "Size",
    "StateError",
    "Stats",
    "StepRecord",
    "Steps",
    "ThinwireError",
    "TopK",
    "TwoShot",
    "UnavailableError",
    "Warmup",
    "Wire",
    "WireError",
    "ZeRO",
    "__version__",
    "attach",
    "merge_optimizer_states",
    "read_states",
]
