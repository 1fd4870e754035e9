"""Fast and safe PyTorch data-parallel training on slow networks.

Example::

    wire = thinwire.attach(ddp, thinwire.Int8(), optimizer=optimizer)
    for batch in batches:  # as before, only clipping is the wire's
        optimizer.zero_grad()
        loss_of(ddp(batch)).backward()
        wire.clip_grad_norm_(1.0)
        optimizer.step()
    wire.finalize()
    print(wire.stats())

The names that most scripts use:

    attach                              compress what a DDP or FSDP2 model sends; returns a Wire
    Wire                                stats, explain, clip_grad_norm_, finalize, swap, disable, state_dict
    Exact, BF16, Int8, Int4, PowerSGD   programs for gradients, from exact to coarse
    LocalSGD, DiLoCo, SparseLoCo        local training, with models exchanged every few steps
    ZeRO                                optimizer state in shards
    Schedule, Warmup, ErrorFeedback     programs by step, and around other programs
    save_checkpoint, load_checkpoint    a whole job in one folder, on any number of ranks
    ThinwireError                       the base of all errors

Subpackages: `ddp_comm_hooks`, `model_averaging` and `optim` have torch's names, `integrations` is for
frameworks, `telemetry` writes logs, and `testing` checks codecs, programs and hooks of your own.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

# thinwire's core does not use numpy, and torch's warning would precede the output of every command.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch as torch

from thinwire.attach import attach
from thinwire.checkpoint.dcp import PerRank, read_states
from thinwire.checkpoint.gather import GatheredState
from thinwire.checkpoint.optimizer_state import merge_optimizer_states
from thinwire.checkpoint.save import load_checkpoint, save_checkpoint
from thinwire.codecs.cast import Cast
from thinwire.codecs.codec import BlockCodec, Codec
from thinwire.codecs.float8 import Float8
from thinwire.codecs.quantize import Quantize
from thinwire.codecs.randomk import RandomEntries
from thinwire.codecs.sign import SignBits
from thinwire.codecs.topk import LargestEntries
from thinwire.codecs.two_magnitudes import TwoMagnitudes
from thinwire.engine.meter import Stats, StepRecord
from thinwire.engine.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Await,
    Broadcast,
    Collectives,
    Exchange,
    Reduce,
    ReduceScatter,
)
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
from thinwire.models.fsdp.reduce_scatter import CompressedReduceScatter, compress_reduce_scatter
from thinwire.monitors.audit import AuditRecord, ParameterAudit
from thinwire.plan.auto import Auto
from thinwire.programs.across_nodes import AcrossNodes
from thinwire.programs.allreduce import BF16, FP16, Exact, Reduced
from thinwire.programs.error_feedback import ErrorFeedback
from thinwire.programs.gathered import Gathered, SparseMean
from thinwire.programs.memory import Memory
from thinwire.programs.partition import Partition
from thinwire.programs.powersgd import PowerSGD
from thinwire.programs.presets import FP8, Int2, Int4, Int8, RandomK, Sign, TopK
from thinwire.programs.program import Bucket, Outcome, Program
from thinwire.programs.rules import Size
from thinwire.programs.twoshot import TwoShot
from thinwire.programs.warmup import Warmup
from thinwire.step.strategy import Configuration, Context, Strategy, Target
from thinwire.strategies.averaging.diloco import DiLoCo
from thinwire.strategies.averaging.hierarchical import Hierarchical
from thinwire.strategies.averaging.local_sgd import LocalSGD
from thinwire.strategies.averaging.policy import Averaging
from thinwire.strategies.averaging.sparse_loco import SparseLoCo
from thinwire.strategies.schedule import Schedule
from thinwire.strategies.zero.zero import ZeRO
from thinwire.version import __version__
from thinwire.wire import Wire

__all__ = [  # noqa: RUF022 - in the order of use, as docs/api.md
    # Attach a model
    "attach",
    "Wire",
    "Stats",
    "StepRecord",
    # Compress gradients
    "Exact",
    "BF16",
    "FP16",
    "Int8",
    "FP8",
    "Int4",
    "Int2",
    "PowerSGD",
    "Sign",
    "TopK",
    "RandomK",
    "Auto",
    # Exchange models instead of gradients
    "LocalSGD",
    "DiLoCo",
    "SparseLoCo",
    "Hierarchical",
    # Shard the optimizer
    "ZeRO",
    "merge_optimizer_states",
    # Combine programs
    "Schedule",
    "Warmup",
    "Partition",
    "Size",
    "AcrossNodes",
    "ErrorFeedback",
    # Save and resume
    "save_checkpoint",
    "load_checkpoint",
    "read_states",
    "PerRank",
    "GatheredState",
    # Log and report
    "AuditRecord",
    "ParameterAudit",
    # Shard the model
    "compress_reduce_scatter",
    "CompressedReduceScatter",
    # Write a codec
    "Codec",
    "BlockCodec",
    "Cast",
    "Quantize",
    "Float8",
    "SignBits",
    "TwoMagnitudes",
    "LargestEntries",
    "RandomEntries",
    # Turn a codec into a program
    "TwoShot",
    "Reduced",
    "Gathered",
    "SparseMean",
    # Write a program
    "Program",
    "Bucket",
    "Outcome",
    "Memory",
    "Collectives",
    "AllReduce",
    "AllGather",
    "AllToAll",
    "Exchange",
    "ReduceScatter",
    "Reduce",
    "Broadcast",
    "Await",
    # Write a strategy
    "Configuration",
    "Averaging",
    "Strategy",
    "Context",
    "Target",
    # Handle errors
    "ThinwireError",
    "OptionError",
    "AttachError",
    "UnavailableError",
    "MismatchError",
    "WireError",
    "ProgramError",
    "DriftError",
    "DivergedError",
    "AuditError",
    "StateError",
    "LabError",
    # Version
    "__version__",
]

_SUBPACKAGES = ("ddp_comm_hooks", "integrations", "model_averaging", "optim", "telemetry", "testing")

if TYPE_CHECKING:  # a checker that saw __getattr__ would take any misspelt name for a module
    from thinwire import ddp_comm_hooks as ddp_comm_hooks
    from thinwire import integrations as integrations
    from thinwire import model_averaging as model_averaging
    from thinwire import optim as optim
    from thinwire import telemetry as telemetry
    from thinwire import testing as testing
else:

    def __getattr__(name: str) -> Any:
        """Import a public subpackage on its first use, so that `import thinwire` stays cheap."""
        if name in _SUBPACKAGES:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*__all__, *_SUBPACKAGES})
