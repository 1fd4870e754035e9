"""The names of `torch.distributed.optim` that thinwire has: change the import prefix, nothing else."""

from thinwire.optim.post_localSGD_optimizer import PostLocalSGDOptimizer
from thinwire.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]
