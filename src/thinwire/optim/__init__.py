"""Drop-in replacement for two optimizers of `torch.distributed.optim`: only the import prefix changes."""

from thinwire.optim.post_localSGD_optimizer import PostLocalSGDOptimizer
from thinwire.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]


def __dir__() -> list[str]:
    return sorted(__all__)
