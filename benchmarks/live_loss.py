"""The loss caused by a replica's absence: `examples/train_torchft.py` without torchft and thinwire.

    .venv/bin/python benchmarks/live_loss.py --absent 100-392 --seeds 5

Replicas are models in this process. After every period their mean change goes through DiLoCo's outer
optimizer, in plain torch and without compression. Replica 1 is absent for some steps: nothing waits, and the
others train on. Then it continues from their anchors and from the state of a peer's optimizer. This is the
best that live membership can reach. A run that was really disturbed should end within its noise.
"""

import argparse
import copy
import random
import statistics
from collections.abc import Sequence

import torch
from torch import nn

from examples import tiny
from examples.train_torchft import model

BATCH = 8
ABSENT = 1


def trained(seed: int, absent: range, options: argparse.Namespace) -> float:
    """Return the loss of the first rows after a training in which replica 1 is absent for some steps."""
    data = tiny.Rows().rows
    places = list(range(0, len(data) - BATCH, BATCH))
    if seed:  # 0 is the order of the example
        random.Random(seed).shuffle(places)
    modules = [model(128) for _ in range(options.replicas)]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01) for module in modules]
    anchors = [parameter.detach().clone().requires_grad_() for parameter in modules[0].parameters()]
    outer = torch.optim.SGD(anchors, lr=0.8, momentum=0.5, nesterov=True)
    for step in range(options.steps):
        present = [place for place in range(options.replicas) if place != ABSENT or step not in absent]
        if step == absent.stop and len(absent):
            optimizers[ABSENT].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for place in present:
            start = places[(step * options.replicas + place) % len(places)]
            batch = data[start : start + BATCH]
            optimizers[place].zero_grad()
            tiny.loss_of(modules[place](batch), batch).backward()
            optimizers[place].step()
        if (step + 1) % options.period == 0:
            exchange(anchors, outer, [modules[place] for place in present], modules)
    with torch.no_grad():
        mean = [
            torch.stack(own).mean(0) for own in zip(*(module.parameters() for module in modules), strict=True)
        ]
        for parameter, value in zip(modules[0].parameters(), mean, strict=True):
            parameter.copy_(value)
        rows = data[:64]
        return tiny.loss_of(modules[0](rows), rows).item()


def exchange(
    anchors: Sequence[torch.Tensor],
    outer: torch.optim.Optimizer,
    present: Sequence[nn.Module],
    everyone: Sequence[nn.Module],
) -> None:
    """Move the anchors by the mean change of the replicas that are present, and set all replicas to them."""
    for anchor, *own in zip(anchors, *(module.parameters() for module in present), strict=True):
        anchor.grad = torch.stack([anchor.detach() - parameter.detach() for parameter in own]).mean(0)
    outer.step()
    with torch.no_grad():
        for module in everyone:
            for parameter, anchor in zip(module.parameters(), anchors, strict=True):
                parameter.copy_(anchor)


def main() -> None:
    """Train with and without the absence, with several orders of the data."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--absent", default="100-392", help="steps in which replica 1 is absent")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--period", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    first, last = map(int, options.absent.split("-"))
    for name, absent in {
        "all replicas": range(0),
        f"without one for {last - first} steps": range(first, last),
    }.items():
        losses = [trained(seed, absent, options) for seed in range(options.seeds)]
        print(
            f"{name}: loss {losses[0]:.4f} with the example's batches; {statistics.mean(losses):.4f} +-"
            f" {statistics.stdev(losses):.4f} over {options.seeds} orders of the data",
            flush=True,
        )


if __name__ == "__main__":
    main()
