"""Held-out losses. Models that ranks train apart are evaluated on their average."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as DDP

from thinwire.tools.bench.devices import on_device
from thinwire.tools.bench.workloads import Workload

_BATCHES = 4
_FROM_STEP = 1_000_000


@torch.no_grad()
def held_out_losses(models: list[tuple[nn.Module, bool]], workload: Workload) -> list[float]:
    """Return the held-out loss of each model, averaged over the batches of all ranks. Collective.

    Args:
        models: Models, each with whether ranks train it apart, so that its average is evaluated.
        workload: The data.
    """
    held_out = workload.held_out or (lambda rank, number: workload.batch(rank, _FROM_STEP + number))
    batches = [on_device(held_out(dist.get_rank(), number)) for number in range(_BATCHES)]
    losses = []
    for model, apart in models:
        inner = model.module if isinstance(model, DDP) else model
        losses.append(_loss(inner, averaged(inner) if apart else {}, batches))
    total = torch.stack(losses)
    dist.all_reduce(total)
    means: list[float] = (total / dist.get_world_size()).tolist()
    return means


def _loss(model: nn.Module, tensors: dict[str, torch.Tensor], batches: list[Any]) -> torch.Tensor:
    """Return the mean loss in evaluation mode, with `tensors` in place of the model's own of these names."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        losses = [
            (functional_call(model, tensors, (batch,)) if tensors else model(batch)).detach().float()
            for batch in batches
        ]
    finally:
        for module in training:
            module.training = True
    return torch.stack(losses).mean()


@torch.no_grad()
def averaged(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the means over ranks of a model's parameters and floating-point buffers. Collective.

    The model itself stays as it is, so that training continues as if it had not been evaluated.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    floating = {name: one for name, one in tensors.items() if one.is_floating_point()}
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, one in floating.items():
        by_dtype.setdefault(one.dtype, []).append(name)
    means: dict[str, torch.Tensor] = {}
    for names in by_dtype.values():
        flat = torch.cat([floating[name].reshape(-1) for name in names])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = flat.split([floating[name].numel() for name in names])
        means |= {name: part.view(floating[name].shape) for name, part in zip(names, parts, strict=True)}
    return means
