r"""Training with torchft: replicas that may die and come back at any time.

    python examples/train_torchft.py --kill-at 20          # three replicas on this machine, one is killed

    thinwire lab --hosts 3 --rate 100mbit -- python examples/train_torchft.py --kill-at 20

On each host a supervisor runs one replica, and starts it again if it is killed. Host 0 has the lighthouse.
Without the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, all hosts are processes on this machine.
"""

import argparse
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from torchft.coordination import LighthouseServer

import thinwire
from examples import tiny
from thinwire.integrations import torchft

_VICTIM = 1
_AGAIN = " again"


def train(options: argparse.Namespace) -> None:
    """Train as one replica."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module = model(options.hidden)
    optimizer = torch.optim.AdamW(module.parameters(), lr=options.lr)
    manager = torchft.make_manager(
        min_replicas=options.min_replicas,
        lighthouse=f"http://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        name=f"replica-{rank}{_AGAIN if options.restarted else ''}",
        host=own_address(),
        timeout=options.timeout,
        quorum_timeout=120.0,
    )
    program = eval(options.program, {"torch": torch}, vars(thinwire))
    wire = torchft.attach(manager, module, program, optimizer=optimizer)
    wire.join()  # a replica that comes back continues at the others' step
    rows, end = tiny.Rows().rows, math.inf if options.kill_at >= 0 else options.steps
    while wire.step < end:
        if end == math.inf and any(name.endswith(_AGAIN) for name in wire.replicas):
            end = max(options.steps, wire.step + options.after)  # at the same step on all replicas
        if rank == _VICTIM and 0 <= options.kill_at <= wire.step and not options.restarted:
            os.kill(os.getpid(), signal.SIGKILL)
        place = 8 * (wire.step * size + rank) % (len(rows) - 8)
        optimizer.zero_grad()
        tiny.loss_of(module(rows[place : place + 8]), rows[place : place + 8]).backward()
        optimizer.step()
        time.sleep(options.pause)
    wire.finalize()
    found = {"replica": rank, "restarted": options.restarted, **result(wire, module)}
    tiny.show(found, options.folder and options.folder / f"replica-{rank}.json")
    manager.shutdown(wait=False)


def model(hidden: int) -> torch.nn.Module:
    """Return a model with the same random weights in every process."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(tiny.WIDTH, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, tiny.WIDTH)
    return torch.nn.Sequential(*layers)


def result(wire: thinwire.Wire, module: torch.nn.Module) -> dict[str, object]:
    """Return what a run has led to on this replica, with the loss of the first rows."""
    rows = tiny.Rows().rows[:64]
    with torch.no_grad():
        loss = tiny.loss_of(module(rows), rows).item()
    return {
        "step": wire.step,
        "exchanges": wire.exchanges,
        "loss": loss,
        "digest": tiny.digest(module),
        "bytes_sent": wire.stats().bytes_sent,
    }


def own_address() -> str:
    """Return the address by which the other hosts reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
        return str(probe.getsockname()[0])


def supervise(options: argparse.Namespace) -> int:
    """Run one host: its replica, started again whenever it is killed, and on host 0 the lighthouse."""
    lighthouse = None
    if os.environ["RANK"] == "0":
        lighthouse = LighthouseServer(
            bind=f"[::]:{os.environ['MASTER_PORT']}",
            min_replicas=1,  # replicas below their own --min-replicas train on, and do not wait for a quorum
            join_timeout_ms=10_000,  # waits so long for a slow replica, but not for a dead one
            heartbeat_timeout_ms=1_000,  # a replica that is silent for so long is dead
        )
    command, code = [sys.executable, __file__, *sys.argv[1:], "--train"], -1
    while code < 0:
        code = subprocess.run(command, check=False).returncode
        if code < 0:
            print(f"replica {os.environ['RANK']} was killed by signal {-code}: starting it again", flush=True)
            command = [*command, "--restarted"] if "--restarted" not in command else command
    if lighthouse is not None:
        time.sleep(options.linger)  # replicas of other hosts may still ask for a quorum
        lighthouse.shutdown()
    return code


def run_here(replicas: int) -> int:
    """Run all hosts as processes of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": str(replicas), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    hosts = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]], env={**os.environ, **shared, "RANK": f"{rank}"}
        )
        for rank in range(replicas)
    ]
    return max(abs(host.wait()) for host in hosts)


def parsed(args: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--program", default="DiLoCo(period=8, program=Int4())")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=3, help="without the variables of a launcher")
    parser.add_argument("--min-replicas", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--pause", type=float, default=0.05, metavar="SECONDS", help="added to each step")
    parser.add_argument("--linger", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--kill-at", type=int, default=-1, metavar="STEP", help="kill replica 1, once")
    parser.add_argument(
        "--after", type=int, default=24, metavar="STEPS", help="steps to train with all, once it is back"
    )
    parser.add_argument("--hidden", type=int, default=128, help="width of the model's hidden layer")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--folder", type=Path, default=None, help="where to write results")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--restarted", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(args)


def main() -> int:
    """Train as a replica, or supervise one, or all."""
    options = parsed()
    if "RANK" not in os.environ:
        return run_here(options.replicas)
    if not options.train:
        return supervise(options)
    logging.basicConfig(level=logging.WARNING, format=f"replica {os.environ['RANK']}: %(message)s")
    logging.getLogger("thinwire").setLevel(logging.INFO)
    train(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
