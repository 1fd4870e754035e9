"""A program on several ranks in this process, over many steps."""

from collections.abc import Mapping, Sequence

import torch

from thinwire.programs.memory import Memory
from thinwire.programs.overflow import is_finite
from thinwire.programs.program import Bucket, Outcome, Program
from thinwire.wire.pack import pack
from thinwire.wire.simulate import simulate


class SimulatedRanks:
    """Ranks that average gradients with a program, each with a memory of its own; no network.

    >>> from thinwire import Exact
    >>> ranks = SimulatedRanks(Exact(), {"weight": (2,)}, count=2)
    >>> ranks.step([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])[0].mean
    tensor([2., 3.])
    """

    def __init__(self, program: Program, shapes: Mapping[str, Sequence[int]], count: int) -> None:
        self.program = program
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.memories = [Memory() for _ in range(count)]
        self.steps = 0

    def step(self, gradients: Sequence[torch.Tensor], *, track_error: bool = False) -> list[Outcome]:
        """What every rank gets, given all ranks' gradients of all parameters, flat; they stay as they are.

        As in training, a rank whose mean is not finite remembers nothing of the step.
        """
        programs, staged = [], [memory.staged() for memory in self.memories]
        for rank, (flat, memory) in enumerate(zip(gradients, staged, strict=True)):
            bucket = Bucket(
                0,
                flat.clone(),
                tuple(self.shapes),
                tuple(self.shapes.values()),
                rank,
                len(self.memories),
                self.steps,
                track_error,
            )
            programs.append([self.program(bucket, memory)])
        with torch.no_grad():
            outcomes = [result[0] for result in simulate(programs).results]
            counts = [is_finite(outcome) for outcome in outcomes]
        for memory, holds in zip(staged, counts, strict=True):
            if holds:
                memory.commit()
        self.steps += all(counts)
        return outcomes

    def kept(self, rank: int, slot: str) -> torch.Tensor:
        """What a rank keeps in a slot, of all parameters that have it, flat."""
        state = self.memories[rank].state_dict()
        return pack([state[name][slot] for name in self.shapes if slot in state.get(name, {})])
