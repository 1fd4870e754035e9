"""The doctor's supervisor: a hang and a crash of a check are results, and no host name leaves the machine."""

import math
import platform
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from click.testing import CliRunner, Result

from thinwire.tools.doctor import running, supervisor
from thinwire.tools.doctor.check import DIFFERS, FAILED, HUNG, OK, SKIPPED, Outcome, judged, worst
from thinwire.tools.doctor.facts import without_host_names
from thinwire.tools.doctor.supervisor import Request, passed
from thinwire_command import cli

REQUEST = Request("cpu", "gloo", (), 10_000, ("facts",), limit=60.0)


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["doctor", "--accelerator", *words])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of a job with one rank."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)


def test_the_worst_rank_speaks_for_all() -> None:
    ranks = [Outcome(OK, "fine"), Outcome(DIFFERS, "other bits"), Outcome(SKIPPED, "")]
    assert worst(ranks).text == "other bits"
    assert worst([*ranks, Outcome(HUNG, "stuck")]).verdict == HUNG
    assert judged(["a", "b", "c", "d", "e"], "fine").text == "a; b; c, and 2 more"
    assert not passed({"checks": {"bits": {"verdict": DIFFERS}}})
    assert passed({"checks": {"bits": {"verdict": OK}, "memory": {"verdict": SKIPPED}}})


def test_names_of_hosts_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.secret.org")
    monkeypatch.setattr(platform, "node", lambda: "node17")
    monkeypatch.setenv("MASTER_ADDR", "10.20.30.40")
    text = without_host_names("connect to 10.20.30.40 from node17.secret.org (node17)")
    assert text == "connect to HOST from HOST (HOST)"


def test_a_check_runs_in_a_process_of_its_own(alone: None) -> None:
    found = supervisor._run("facts", REQUEST, 0)
    assert found.verdict == OK, found
    assert found.details["backend"] == "gloo"


def test_a_check_that_ends_without_a_result_failed(alone: None) -> None:
    broken = Request("cpu", "gloo", ("no_such_module",), 10_000, ("facts",), limit=60.0)
    found = supervisor._run("facts", broken, 0)
    assert found.verdict == FAILED
    assert "exit code 1" in found.text
    assert "No module named 'no_such_module'" in found.text


def test_a_hang_is_a_result_with_all_stacks(tmp_path: Path) -> None:
    script = (
        "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1, all_threads=True)\n"
        "def stuck_here(): print('ready', flush=True); time.sleep(600)\n"
        "stuck_here()"
    )
    log = tmp_path / "stderr"
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=errors, bufsize=0
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        found = supervisor._hung(child, 60.0, log)
        child.kill()
        child.wait()
        child.stdout.close()
    assert found.verdict == HUNG
    assert "stuck_here" in found.details["stacks"]


def test_all_ranks_stay_until_the_report_is_written(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    other = threading.Thread(target=supervisor._leave, args=(store, 1, 2), daemon=True)
    other.start()
    other.join(0.3)
    assert other.is_alive(), "torchrun would end rank 0 before it has written"
    supervisor._leave(store, 0, 2)
    other.join(30)
    assert not other.is_alive()

    fresh, reports = dist.HashStore(), []

    def finished(report: dict[str, Any]) -> None:
        assert not fresh.check(["doctor/written"])
        reports.append(report)

    monkeypatch.setattr(supervisor, "store_of", lambda seconds: fresh)
    nothing = Request("cpu", "gloo", (), 10_000, ())
    assert supervisor.examine(nothing, lambda name, outcome, seconds: None, finished) == reports[0]


def test_every_host_takes_its_own_name_out(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    monkeypatch.setattr(supervisor, "store_of", lambda seconds: store)
    monkeypatch.setattr(supervisor, "_run", lambda name, request, rank: Outcome(FAILED, "node17 is gone"))
    report = supervisor.examine(REQUEST, lambda name, outcome, seconds: None, lambda report: None)
    assert report["checks"]["facts"]["text"] == "HOST is gone"


def test_parameters_are_compared_bit_by_bit_only_where_every_device_has_the_same() -> None:
    assert math.frexp(running._LEARNING_RATE)[0] == 0.5, "GPUs fuse the product and the sum of an update"
    assert running._bitwise("Exact", {}, 2)
    assert not running._bitwise("Exact", {}, 3), "NCCL adds three numbers in another order than Gloo"
    assert not running._bitwise("Int8", {"rules": []}, 3)
    assert running._bitwise("Int8", {}, 3)


def test_a_subgroup_leaves_a_rank_out_if_it_can() -> None:
    assert [running._members(size) for size in (2, 3, 4)] == [(0, 1), (0, 1), (0, 1, 2)]


def test_wrong_use_says_what_to_run(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    alone_result = run("--device", "cpu")
    assert alone_result.exit_code == 2
    assert "run torchrun --nproc-per-node=2 -m thinwire doctor --accelerator" in alone_result.stderr
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "choose from facts, groups, " in run("--only", "nonsense").stderr
    assert "torch finds no accelerator" in run().stderr
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert "2 ranks run on this machine, which shows them 1 of type cuda" in run("--device", "cuda").stderr
    assert "--import no_such_module failed" in run("--import", "no_such_module").stderr
