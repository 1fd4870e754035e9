"""What runs ZeRO and averaged models beside the hook; plain programs need nobody."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.averaging.averager import Averager
from thinwire.averaging.diloco import DiLoCo
from thinwire.averaging.flights import Models
from thinwire.averaging.policy import Averaging
from thinwire.bridge import Bridge, parameters_of
from thinwire.programs.auditor import Auditor
from thinwire.programs.memory import MODELS, Memory
from thinwire.programs.program import Program
from thinwire.programs.rules import Rules, exceptions_of
from thinwire.schedules import Runs
from thinwire.sharding.sharder import Sharder
from thinwire.sharding.zero import ZeRO
from thinwire.wire.communicator import Communicator


@dataclass(frozen=True)
class Runners:
    """Makes them, with what all of a wire's have in common; making one is collective."""

    bridge: Bridge
    optimizers: Sequence["ref[Optimizer]"]
    memory: Memory
    check_every: int
    rules: Rules
    auditor: Auditor

    def sharder(self, runs: Runs, ddp: DistributedDataParallel) -> Sharder | None:
        """For ZeRO."""
        if not isinstance(runs, ZeRO):
            return None
        (optimizer,) = self.living_optimizers()
        communicator = Communicator(ddp.process_group, self.bridge.communicator.limit)
        communicator.open()
        return Sharder(runs, ddp, parameters_of(ddp), optimizer, communicator, self.bridge.engine)

    def averager(
        self, runs: Runs, ddp: DistributedDataParallel, fall_back: Callable[[Program], Any]
    ) -> Averager | None:
        """For models that are averaged; `fall_back` changes the program that they are exchanged by."""
        if not isinstance(runs, Averaging):
            return None
        shapes = {name: one.shape for name, one in parameters_of(ddp).items()}
        exceptions = exceptions_of(self.rules, runs.program, shapes) if isinstance(runs, DiLoCo) else {}
        communicator = Communicator(ddp.process_group, self.bridge.communicator.limit)
        communicator.open()
        try:
            return Averager(
                runs,
                ddp,
                parameters_of(ddp),
                self.living_optimizers(),
                communicator,
                self.bridge.engine.meter,
                self.memory.scoped(MODELS),
                self.check_every,
                exceptions,
                Models(self.auditor, fall_back),
            )
        except BaseException:
            communicator.close()
            raise

    def living_optimizers(self) -> list[Optimizer]:
        """Those that were given, and still are."""
        return [one for reference in self.optimizers if (one := reference()) is not None]


def share_scales(bridge: Bridge) -> None:
    """Bring the ranks' GradScalers together: while ranks trained apart, each went its own way."""
    communicator = bridge.communicator
    own = json.dumps(bridge.scales.standing())
    told = communicator.meeting.gather("scales", own, communicator.limit)
    bridge.scales.bring_together([tuple(one) if one else None for one in map(json.loads, told)])
