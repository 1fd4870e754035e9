r"""Elastic training: checkpoints hold all state and can be loaded by another number of ranks.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic.py --folder checkpoints

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 3:4 --max-restarts 3 --rdzv-backend c10d \
        --rdzv-endpoint host:29400 examples/elastic.py --folder /shared --program "DiLoCo(period=4)"

torchrun restarts all workers when one dies. Each then resumes from the latest complete checkpoint. Batches
depend only on step and rank, so a resumed run trains on the same data. `--kill-at` kills a worker on purpose.
The variable is needed if hosts join and leave. Without it, workers that torchrun restarts because another
host failed would use the store of the previous workers.
"""

import argparse
import hashlib
import os
import shutil
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

WIDTH = 32
KEEP = 2


class Job:
    """A model, its optimizer and its wire, which can be saved and resumed.

    Args:
        program: A program or a configuration as Python text.
    """

    def __init__(self, program: str) -> None:
        torch.manual_seed(0)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        chosen = eval(program, {"torch": torch}, vars(thinwire))
        self.wire = thinwire.attach(self.ddp, chosen, optimizer=self.optimizer, timeout=30.0)

    def train(self, step: int) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        self.loss(step, self.rank).backward()
        self.optimizer.step()

    def loss(self, step: int, rank: int) -> torch.Tensor:
        """Return the loss of the batch of a step and a rank."""
        numbers = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss: torch.Tensor = (self.ddp(numbers) - numbers.roll(1, dims=1)).square().mean()
        return loss

    def save(self, folder: Path, step: int) -> None:
        """Save a checkpoint of this step, and delete old ones. Its folder gets its name when complete."""
        self.report(f"saving step {step}")
        thinwire.save_checkpoint(folder / name_of(step), self.ddp, self.optimizer, self.wire, step=step)
        if self.rank == 0:
            for old in complete(folder)[:-KEEP]:
                shutil.rmtree(old)

    def resume(self, folder: Path) -> int:
        """Load the latest checkpoint, saved by any number of ranks. Return its step, or 0 without one."""
        found = torch.tensor(max(map(step_of, complete(folder)), default=0))
        dist.broadcast(found, 0)  # all ranks load the one that rank 0 found
        if not found:
            return 0
        path = folder / name_of(int(found))
        step: int = thinwire.load_checkpoint(path, self.ddp, self.optimizer, self.wire)["step"]
        self.report(f"resumed step {step}")
        return step

    def residual(self) -> torch.Tensor:
        """Return the mean of all ranks' residuals, which compression has not sent yet."""
        ((inner,),) = self.wire.state_dict().values()
        slots = [(key, slot) for slots in inner["memory"].values() for key, slot in slots.items()]
        residuals = [slot.double().flatten() for key, slot in slots if key.endswith("residual")]
        total = torch.cat([torch.zeros(1, dtype=torch.float64), *residuals])
        dist.all_reduce(total)
        return total / self.size

    def report(self, what: str) -> None:
        """Print an event with the number of ranks and the residual, on rank 0."""
        residual = self.residual()
        if self.rank == 0:
            total, norm = residual.sum(), residual.norm()
            print(f"{what} ranks {self.size} residual {total:.6e} norm {norm:.6e}", flush=True)

    def digest(self) -> str:
        """Return a short hash of the parameters' bits."""
        bits = torch.cat([parameter.detach().flatten() for parameter in self.ddp.parameters()]).view(
            torch.uint8
        )
        return hashlib.sha256(bytes(bits.tolist())).hexdigest()[:16]


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(folder.glob("step-????????"))


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def run(options: argparse.Namespace) -> tuple[float, str]:
    """Train from the latest checkpoint to the end. Return the final loss and the parameters' digest."""
    options.folder.mkdir(parents=True, exist_ok=True)
    job = Job(options.program)
    begin = job.resume(options.folder)
    first = begin == 0 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for step in range(begin, options.steps):
        if first and (step, job.rank) == (options.kill_at, options.kill_rank):
            if options.kill_agent:
                os.kill(os.getppid(), signal.SIGKILL)  # simulates the loss of a host, not just of a worker
            os.kill(os.getpid(), signal.SIGKILL)
        job.train(step)
        if (step + 1) % options.save_every == 0:
            job.save(options.folder, step + 1)
    job.wire.finalize()
    with torch.no_grad():
        loss = float(job.loss(options.steps, rank=0))
    return loss, job.digest()


def parsed(args: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder of checkpoints, shared by all ranks"
    )
    parser.add_argument(
        "--program", default="Int8()", help="for example 'Int8()', 'DiLoCo(period=4)' or 'ZeRO(Int8())'"
    )
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument(
        "--kill-at", type=int, default=-1, metavar="STEP", help="kill a worker, in the first run only"
    )
    parser.add_argument("--kill-rank", type=int, default=0)
    parser.add_argument(
        "--kill-agent", action="store_true", help="also kill its torchrun, as if the host were lost"
    )
    return parser.parse_args(args)


def main() -> None:
    """Train as one worker of torchrun."""
    options = parsed()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loss, digest = run(options)
    if rank == 0:
        print(f"final loss {loss:.9f} digest {digest}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
