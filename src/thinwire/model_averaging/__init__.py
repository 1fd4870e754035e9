"""The names of `torch.distributed.algorithms.model_averaging`: change the import prefix, nothing else."""
