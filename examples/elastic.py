r"""Training that outlives its workers: all state in checkpoints, for the same or another number of ranks.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic.py --folder checkpoints

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 3:4 --max-restarts 3 --rdzv-backend c10d \
        --rdzv-endpoint host:29400 examples/elastic.py --folder /shared --program "DiLoCo(period=4)"

torchrun starts all workers again when one is lost; each then goes on from the latest complete checkpoint.
Data are a function of step and rank, so that a resumed run sees what it would have seen. `--kill-at` loses a
worker on purpose. (The variable is for hosts that come and go: workers that torchrun restarts because another
host's failed would otherwise meet in the store of the workers before them.)
"""

import argparse
import hashlib
import os
import shutil
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

WIDTH = 32
KEEP = 2


class Job:
    """A model, its optimizer and its wire, with what it takes to save and resume them."""

    def __init__(self, program: str) -> None:
        torch.manual_seed(0)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        chosen = eval(program, {"torch": torch}, vars(thinwire))
        self.wire = thinwire.attach(self.ddp, chosen, optimizer=self.optimizer, timeout=30.0)
        self.moments = thinwire.PerRank(self.optimizer, merge=thinwire.merge_optimizer_states)

    def train(self, step: int) -> None:
        """One step; the wire and the optimizer do the rest."""
        self.optimizer.zero_grad()
        self.loss(step, self.rank).backward()
        self.optimizer.step()

    def loss(self, step: int, rank: int) -> torch.Tensor:
        """On data that depend on step and rank alone."""
        numbers = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss: torch.Tensor = (self.ddp(numbers) - numbers.roll(1, dims=1)).square().mean()
        return loss

    def save(self, folder: Path, step: int) -> None:
        """Write beside, then rename: a checkpoint has its name only when it is complete."""
        unfinished = folder / "unfinished"
        if self.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was lost while saving
        dist.barrier()
        self.tell(f"saving step {step}")
        parts = {"model": self.ddp.module, "optimizer": self.moments, "wire": self.wire}
        dcp.save(parts, checkpoint_id=unfinished)
        if self.rank == 0:
            unfinished.rename(folder / f"step-{step:08d}")
            for old in complete(folder)[:-KEEP]:
                shutil.rmtree(old)

    def resume(self, folder: Path) -> int:
        """Go on from the latest checkpoint, of whatever number of ranks; how many steps it has seen."""
        latest: list[Path | None] = [next(reversed(complete(folder)), None)]
        dist.broadcast_object_list(latest)  # rank 0 decides
        (path,) = latest
        if path is None:
            return 0
        dcp.load({"model": self.ddp.module}, checkpoint_id=path)
        self.moments.load_state_dict(thinwire.read_states(path, "optimizer"))
        self.wire.load_state_dict(
            thinwire.read_states(path, "wire")
        )  # last: it may bring parameters of this rank
        step = int(path.name.removeprefix("step-"))
        self.tell(f"resumed step {step}")
        return step

    def owed(self) -> torch.Tensor:
        """What compression has not sent yet, of all ranks: the mean of their residuals."""
        ((inner,),) = self.wire.state_dict().values()
        slots = [(key, one) for slots in inner["memory"].values() for key, one in slots.items()]
        residuals = [one.double().flatten() for key, one in slots if key.endswith("residual")]
        total = torch.cat([torch.zeros(1, dtype=torch.float64), *residuals])
        dist.all_reduce(total)
        return total / self.size

    def tell(self, what: str) -> None:
        """Print where the run is, once."""
        owed = self.owed()
        if self.rank == 0:
            print(f"{what} ranks {self.size} owed {owed.sum():.6e} norm {owed.norm():.6e}", flush=True)

    def digest(self) -> str:
        """A short name of the parameters' bits."""
        bits = torch.cat([one.detach().flatten() for one in self.ddp.parameters()]).view(torch.uint8)
        return hashlib.sha256(bytes(bits.tolist())).hexdigest()[:16]


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted(folder.glob("step-????????"))


def run(options: argparse.Namespace) -> tuple[float, str]:
    """Train to the end, from wherever the folder is; the final loss, and the digest of the parameters."""
    options.folder.mkdir(parents=True, exist_ok=True)
    job = Job(options.program)
    begin = job.resume(options.folder)
    first = begin == 0 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for step in range(begin, options.steps):
        if first and (step, job.rank) == (options.kill_at, options.kill_rank):
            if options.kill_agent:
                os.kill(os.getppid(), signal.SIGKILL)  # a host that is lost, and not just a worker
            os.kill(os.getpid(), signal.SIGKILL)
        job.train(step)
        if (step + 1) % options.save_every == 0:
            job.save(options.folder, step + 1)
    job.wire.finalize()
    with torch.no_grad():
        loss = float(job.loss(options.steps, rank=0))
    return loss, job.digest()


def parsed(args: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where checkpoints are; all ranks must see it"
    )
    parser.add_argument(
        "--program", default="Int8()", help="such as 'Int8()', 'DiLoCo(period=4)', 'ZeRO(Int8())'"
    )
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument(
        "--kill-at", type=int, default=-1, metavar="STEP", help="lose a worker, the first time only"
    )
    parser.add_argument("--kill-rank", type=int, default=0)
    parser.add_argument(
        "--kill-agent", action="store_true", help="lose its torchrun too, as when a host is lost"
    )
    return parser.parse_args(args)


def main() -> None:
    """Run under torchrun."""
    options = parsed()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loss, digest = run(options)
    if rank == 0:
        print(f"final loss {loss:.9f} digest {digest}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
