"""Simulation of a program on several ranks in one process, over many steps."""

from collections.abc import Collection, Mapping, Sequence

import torch

from thinwire.engine.pack import pack
from thinwire.engine.simulate import simulate
from thinwire.programs.finite import finite
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, ProgramFunction
from thinwire.programs.wrapper import as_program


class SimulatedRanks:
    """Simulated ranks that average gradients with a program, each with its own memory and without a network.

    Args:
        program: The program that averages.
        shapes: The shapes of the parameters by name.
        count: The number of ranks.
        exact: The names of parameters whose mean must be exact, for programs with `carries_exact`.

    >>> from thinwire import Exact
    >>> ranks = SimulatedRanks(Exact(), {"weight": (2,)}, count=2)
    >>> ranks.step([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])[0].mean
    tensor([2., 3.])
    """

    def __init__(
        self,
        program: ProgramFunction,
        shapes: Mapping[str, Sequence[int]],
        count: int,
        exact: Collection[str] = (),
    ) -> None:
        self.program = as_program(program)
        self.exact = frozenset(exact)
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.memories = [Memory() for _ in range(count)]
        self.steps = 0

    def step(self, gradients: Sequence[torch.Tensor], *, track_error: bool = False) -> list[Outcome]:
        """Run one step.

        As in training, a rank whose mean is non-finite does not commit its memory.

        Args:
            gradients: For each rank, the gradients of all parameters in one flat tensor. They are not
                modified.
            track_error: Whether programs return their errors.

        Returns:
            The outcome of each rank.
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
                self.exact,
            )
            programs.append([self.program(bucket, memory)])
        with torch.no_grad():
            outcomes = [result[0] for result in simulate(programs).results]
            counts = [self.holds(outcome) for outcome in outcomes]
        for memory, holds in zip(staged, counts, strict=True):
            if holds:
                memory.commit()
        self.steps += all(counts)
        return outcomes

    def holds(self, outcome: Outcome) -> bool:
        """Return whether a rank commits a step with this outcome, which needs a finite mean."""
        return bool(finite(outcome.mean) if outcome.finite is None else outcome.finite)

    def kept(self, rank: int, slot: str) -> torch.Tensor:
        """Return a slot of a rank's memory for all parameters that have it, as one flat tensor.

        Args:
            rank: The rank.
            slot: The slot's name, such as `"residual"`.

        Returns:
            The tensors, one after another.
        """
        state = self.memories[rank].state_dict()
        return pack([state[name][slot] for name in self.shapes if slot in state.get(name, {})])
