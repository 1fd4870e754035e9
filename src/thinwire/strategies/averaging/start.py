"""The values that replicas without DDP start from."""

import torch

from thinwire.engine.comm.borrowed_group import run_abreast
from thinwire.engine.pack import batches, real_numbers
from thinwire.step.model import Model
from thinwire.strategies.zero.parameters import share


def start_equal(model: Model) -> None:
    """Copy the first replica's parameters and buffers to all others, as DDP does. Collective."""
    held = [real_numbers(one) for one in (*model.tensors().values(), *model.buffers().values())]
    rank = model.group.rank()
    with torch.inference_mode(False), torch.no_grad():
        programs = (share([held[number] for number in batch], 0, rank) for batch in batches(held))
        run_abreast(programs, model.group)
