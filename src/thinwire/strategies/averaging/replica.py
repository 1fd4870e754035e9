"""This rank's part of one replica: parameters, anchors and the programs' memory.

A replica is one complete copy of the model that trains: the module of one rank, or of several ranks that
together hold a sharded one. In the second case each rank averages its shards with the same shards of the
other replicas.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.optim import Optimizer

from thinwire.engine.comm.borrowed_group import run_abreast
from thinwire.engine.pack import batches, local_part, real_numbers
from thinwire.programs.memory import Memory
from thinwire.step.model import Model
from thinwire.strategies.averaging.anchors import Anchors, split_evenly
from thinwire.strategies.averaging.policy import Averaging, OuterLoop
from thinwire.strategies.averaging.shared_state import reset_states
from thinwire.strategies.zero.parameters import share


class LocalParts(Mapping[str, torch.Tensor]):
    """This rank's parts of parameters by name. Each access looks them up, because FSDP may replace them.

    Args:
        parameters: The parameters by name, as optimizers hold them.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.whole = parameters

    def __getitem__(self, name: str) -> torch.Tensor:
        return local_part(self.whole[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


class Replica:
    """This rank's part of a replica that averages with others, and its counts.

    Args:
        model: The handle of the model.
        optimizers: The optimizers that step it.
        config: When and how models are averaged.
        memory: The programs' memory of exchanged models.
    """

    def __init__(
        self, model: Model, optimizers: Sequence[Optimizer], config: Averaging, memory: Memory
    ) -> None:
        named = model.parameters()
        self.parameters = LocalParts({name: held for name, held in named.items() if held.requires_grad})
        self.frozen = {name: held for name, held in named.items() if not held.requires_grad}
        self.optimizers = list(optimizers)
        self.device = model.device
        self.config = config
        self.memory = memory
        self.anchors: Anchors | None = None
        self.window = 0
        """Steps since the parameters were last equal to the anchors, or to the mean of all replicas."""
        self.exchanges = 0
        """Averages applied so far, of one fragment each."""
        self.whole = 0
        """Averages of the whole model among all replicas."""
        loop, self._model = config.outer_loop, model
        sizes = {name: part.numel() for name, part in self.parameters.items()}
        self.fragments = split_evenly(sizes, 1 if loop is None else loop.fragments)

    @property
    def loop(self) -> OuterLoop:
        """The outer optimizer's options. Only configurations with anchors have them."""
        loop = self.config.outer_loop
        assert loop is not None, "only an outer loop has anchors"
        return loop

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers by name."""
        return self._model.buffers()

    def new_anchors(self) -> Anchors:
        """Return new anchors, with the values of the parameters."""
        return Anchors(self.parameters, self.fragments, self.loop.optimizer)

    def take_anchors(self) -> Anchors:
        """Return the anchors, taken from the parameters at the first call."""
        if self.anchors is None:
            self.anchors = self.new_anchors()
        return self.anchors

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write parameters in place, so that views and memory layouts stay valid."""
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)

    def reset_optimizers(self, names: Sequence[str]) -> None:
        """Remove the optimizers' state of these parameters."""
        reset_states([self.parameters.whole[name] for name in names], self.optimizers)

    def forget_model(self) -> None:
        """Release the parameters of a deleted model."""
        self.parameters, self.frozen, self.optimizers, self.anchors = LocalParts({}), {}, [], None


@contextlib.contextmanager
def no_autograd() -> Iterator[None]:
    """Disable autograd and inference mode. Tensors made in inference mode could not be trained."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def start_equal(model: Model) -> None:
    """Copy the first replica's parameters and buffers to all others, as DDP does. Collective.

    DiLoCo's anchors must be equal on all replicas, and they start from these values.
    """
    held = [real_numbers(tensor) for tensor in (*model.tensors().values(), *model.buffers().values())]
    rank = model.group.rank()
    with no_autograd():
        programs = (share([held[number] for number in batch], 0, rank) for batch in batches(held))
        run_abreast(programs, model.group)
