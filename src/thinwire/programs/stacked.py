"""PowerSGD's passes on an accelerator, where each operator costs a launch.

Matrices of one shape are one stack, so that their products are one operator. Everything that does not depend
on a shape, such as adding residuals, is one operator on the list of all tensors. Launches grow with the
number of different shapes and with the rank, but not with the number of matrices.
"""

import torch

from thinwire.engine.foreach import add_all, copy_all, shares_memory, stack_of, subtract_all
from thinwire.programs.lowrank import Averages, LowRankGradient, Passes
from thinwire.programs.memory import RESIDUAL, Memory
from thinwire.programs.reproducible import bases_in_few_launches, stacked_product


class StackedPasses(Passes):
    """PowerSGD's passes over the gradients of a bucket, on stacks of matrices."""

    def __init__(self, parts: list[LowRankGradient]) -> None:
        super().__init__(parts)
        self._matrices = [[part.matrix for part in group] for group in self.groups]
        self._stacks: list[torch.Tensor] = []
        self._views = [view for part in parts for _, view, _ in part.residuals]

    def times(self, qs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Add all residuals, those of rests included, and return M Q."""
        add_all(self._views, [residual for part in self.parts for _, _, residual in part.residuals], 1)
        self._stacks = [stack_of(matrices) for matrices in self._matrices]
        # It obeys the user's TF32 switch, as the model's own products do. Ranks agree all the same: they use
        # the mean alone, and everything after it is exact.
        return [torch.bmm(q, stack.mT) for q, stack in zip(qs, self._stacks, strict=True)]

    def rests(self) -> list[torch.Tensor]:
        """Return the rests, to which `times` has added their residuals."""
        return [part.rest for part in self.with_rest]

    def bases(self, ps: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return orthonormal bases of P, with the same bits on all accelerators."""
        return bases_in_few_launches(ps)

    def transposed_times(self, ps: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return M^T P (P^T P)^-1, which makes P Q^T a projection of M if P is only nearly orthonormal.

        With P^T P = 1 + E, the inverse is 1 - E, up to E^2. It may have other bits on other ranks, because
        the mean over ranks is used alone.
        """
        found = []
        for p, stack in zip(ps, self._stacks, strict=True):
            q = torch.bmm(p, stack)
            found.append(torch.baddbmm(q, torch.bmm(p, p.mT), q, beta=2, alpha=-1))
        return found

    def finish(
        self,
        ps: list[torch.Tensor],
        own: Averages,
        mean: Averages,
        *,
        against: str,
        memory: Memory,
        dtype: torch.dtype,
    ) -> None:
        """Write the means to the gradients, and keep the residuals."""
        kept = [
            memory.new_value(name, RESIDUAL, residual)
            for part in self.parts
            for name, _, residual in part.residuals
        ]
        # residual <- M, then less the product that takes the place of M.
        copy_all(kept, self._views)
        if against == "sent" and kept:
            self._write(ps, own)
            subtract_all(self._views, of=kept)
        self._write(ps, mean)
        # The mean is rounded to the gradients' dtype later. Error feedback compensates for that too.
        if kept and dtype != self._views[0].dtype:
            if against == "sent":
                add_all(kept, self._views, 1)
            subtract_all([view.to(dtype).to(view.dtype) for view in self._views], of=kept)
        elif against == "mean":
            subtract_all(self._views, of=kept)

    def _write(self, ps: list[torch.Tensor], result: Averages) -> None:
        """Write P Q^T and the rests to the gradients."""
        targets, values = [part.rest for part in self.with_rest], list(result.rests)
        for matrices, stack, p, q in zip(self._matrices, self._stacks, ps, result.qs, strict=True):
            # A copy of the gradients is not needed any more, and gives its memory to the product.
            stacked_product(p, q, into=stack)
            if not shares_memory(stack, matrices[0]):
                targets += matrices
                values += stack.unbind()
        copy_all(targets, values)
