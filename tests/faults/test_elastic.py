"""examples/elastic.py: workers are killed, the rest resumes, and nothing that was owed is lost."""

import os
import re
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import thinwire
from examples import elastic
from tests.harness import run_ranks

ROOT = Path(__file__).parents[2]
PROGRAMS = ["Int8()", "DiLoCo(period=4, program=Int8())", "ZeRO(Int8())"]


def arguments(folder: Path, program: str, steps: int) -> list[str]:
    return ["--folder", str(folder), "--program", program, "--steps", str(steps), "--save-every", "3"]


class Agent:
    """One torchrun, on the loopback interface, with what it and its workers say."""

    def __init__(self, log: Path, *options: str) -> None:
        self._log = log
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1", *options]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)

    def said(self) -> str:
        return self._log.read_text()


def said_by(agents: list[Agent], seconds: float) -> str:
    """All they said, when all have ended; none is left behind."""
    deadline = time.monotonic() + seconds
    try:
        for agent in agents:
            agent.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pytest.fail("torchrun hangs:\n" + "\n".join(agent.said() for agent in agents))
    finally:
        for agent in agents:
            agent.process.terminate()  # it ends its workers
            agent.process.wait(120)
    return "\n".join(agent.said() for agent in agents)


def trained(rank: int, world_size: int, folder: str, program: str, steps: int) -> tuple[float, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP's own
        return elastic.run(elastic.parsed(arguments(Path(folder), program, steps)))


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_the_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    script = [str(ROOT / "examples/elastic.py"), *arguments(tmp_path / "killed", "Int8()", 10)]
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    agent = Agent(tmp_path / "log", *options, *script, "--kill-at=7", "--kill-rank=1")
    said = said_by([agent], 600)
    (loss, digest), _ = run_ranks(trained, 2, str(tmp_path / "whole"), "Int8()", 10)
    assert "exitcode: -9" in said
    assert "resumed step 6 ranks 2" in said, said
    assert f"final loss {loss:.9f} digest {digest}" in said, said
    assert [path.name for path in elastic.complete(tmp_path / "killed")] == ["step-00000006", "step-00000009"]


def all_trained(rank: int, world_size: int, folder: str) -> None:
    for number, program in enumerate(PROGRAMS):
        trained(rank, world_size, f"{folder}/{number}", program, 6)


def all_resumed(rank: int, world_size: int, folder: str) -> list[tuple[torch.Tensor, float, str]]:
    results = []
    for number, program in enumerate(PROGRAMS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job = elastic.Job(program)
            assert job.resume(Path(f"{folder}/{number}")) == 6
            residual = job.residual()
        results.append((residual, *trained(rank, world_size, f"{folder}/{number}", program, 8)))
    return results


def test_fewer_ranks_go_on_and_owe_the_same(tmp_path: Path) -> None:
    run_ranks(all_trained, 4, str(tmp_path))
    ranks = run_ranks(all_resumed, 3, str(tmp_path))
    for number, program in enumerate(PROGRAMS):
        states = [state for (state,) in thinwire.read_states(tmp_path / f"{number}/step-00000006").values()]
        key = "models: residual" if "DiLoCo" in program else "residual"
        names = list(states[0]["memory"])
        before = [sum(state["memory"][name][key].double() for state in states) / 4 for name in names]
        owed = torch.cat([one.flatten() for one in before])
        assert owed.norm() > 0
        for after, loss, digest in (results[number] for results in ranks):
            torch.testing.assert_close(after[1:], owed, rtol=0, atol=1e-9)
            assert (loss, digest) == ranks[0][number][1:], "ranks differ"


@pytest.mark.slow
def test_a_lost_host_leaves_three_that_go_on(tmp_path: Path) -> None:
    """Real membership: four agents on this machine, of which one is killed together with its worker."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    waits = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=100"
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=elastic"]
    options = ["--nnodes=3:4", "--max-restarts=3", "--local-addr=127.0.0.1", *rendezvous]
    script = [str(ROOT / "examples/elastic.py"), *arguments(tmp_path / "checkpoints", "Int8()", 10)]
    kill = ["--kill-at=7", "--kill-rank=3", "--kill-agent"]
    agents = []
    for number in range(4):
        conf = f"--rdzv-conf=is_host={int(number == 0)},{waits}"
        agents.append(Agent(tmp_path / f"log {number}", *options, conf, *script, *kill))
    said = said_by(agents, 600)
    saved = re.search(r"saving step 6 ranks 4 residual (\S+) norm (\S+)", said)
    found = re.search(r"resumed step 6 ranks 3 residual (\S+) norm (\S+)", said)
    assert saved, said
    assert found, said
    assert [float(one) for one in saved.groups()] == pytest.approx(list(map(float, found.groups())), rel=1e-5)
    assert "final loss" in said
