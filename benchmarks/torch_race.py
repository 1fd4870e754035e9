"""torch's powerSGD_hook and thinwire's on a model of several buckets, which torch's does not survive.

    .venv/bin/python benchmarks/torch_race.py

torch issues its second collective from a future's callback, so that ranks may issue them in different orders
(docs/design/architecture.md). Gloo then aborts the process, hangs, or adds up what does not belong together.
A line per trial says what happened. Whether torch's hook races depends on timing, so this is no test.
"""

import argparse
import sys
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from thinwire.ddp_comm_hooks import powerSGD_hook as own_hooks
from thinwire.testing import check_hook


def _register(hooks: Any, ddp: DDP) -> None:
    state = hooks.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, hooks.powerSGD_hook)


def torchs(ddp: DDP) -> None:
    """Register torch's hook."""
    _register(torch_hooks, ddp)


def ours(ddp: DDP) -> None:
    """Register thinwire's hook."""
    _register(own_hooks, ddp)


def main() -> None:
    """Train with each hook several times."""
    parser = argparse.ArgumentParser(description="Train with powerSGD_hook on several buckets.")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=60, help="after which a trial counts as hanging")
    arguments = parser.parse_args()
    for trial in range(arguments.trials):
        for register in (torchs, ours):
            try:
                # The size of PowerSGD's error is no subject here.
                check_hook(register, steps=arguments.steps, tolerance=1e9, seconds=arguments.seconds)
                outcome = "the same gradients on both ranks"
            except AssertionError as error:
                outcome = f"FAILS: {str(error).strip().splitlines()[-1]}"
            sys.stdout.write(f"trial {trial}, {register.__name__}: {outcome}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
