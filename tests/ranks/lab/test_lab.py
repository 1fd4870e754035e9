"""Emulated networks: their speed is real, and nothing of them stays behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.bandwidth import measured_rate, transfer
from thinwire import LabError, UnavailableError
from thinwire.tools.cli.doctor import examine
from thinwire.tools.lab import namespaces
from thinwire.tools.lab.namespaces import MARK, Lab, clean
from thinwire.tools.lab.network import parse_rate, plan
from thinwire.tools.lab.run import Finished, run_on


def gathered(hosts: Lab, *command: str) -> tuple[Finished, list[tuple[int, str, str]]]:
    lines: list[tuple[int, str, str]] = []
    finished = run_on(hosts, command, lambda host, stream, line: lines.append((host, stream, line)))
    return finished, lines


OWNER = "THINWIRE_LAB_OF"
"""The environment variable by which the processes of a test are told from those of other tests."""


def commands() -> dict[int, list[str]]:
    """The words of every command that this test started and that still runs, by process."""
    found, own = {}, f"{OWNER}={os.environ[OWNER]}"
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if own in (folder / "environ").read_text(errors="replace").split("\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text().split("\0")
    return found


def leftovers() -> list[list[str]]:
    """What only a lab has, and the sleeps of these tests."""
    sleeps = ("infinity", "60", "61", "62")
    return [
        words
        for words in commands().values()
        if MARK in words or (words[0] == "sleep" and words[1] in sleeps)
    ]


def assert_nothing_is_left() -> None:
    """The kernel may take a moment to end a namespace."""
    ends = time.monotonic() + 60
    while leftovers() and time.monotonic() < ends:
        time.sleep(0.05)
    assert not leftovers()


@pytest.fixture(autouse=True)
def _nothing_stays_behind(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setenv(OWNER, f"{os.getpid()} {request.node.name}")
    interfaces = set(os.listdir("/sys/class/net"))
    yield
    assert_nothing_is_left()
    assert set(os.listdir("/sys/class/net")) == interfaces


@pytest.mark.parametrize(
    "rate",
    [
        pytest.param("10mbit", marks=pytest.mark.slow),
        "100mbit",
        pytest.param("1gbit", marks=pytest.mark.slow),
    ],
)
def test_a_bulk_transfer_is_no_faster_than_the_link(rate: str) -> None:
    """A busy machine may slow it down; benchmarks/bandwidth.py shows how close it comes."""
    wanted = parse_rate(rate)
    assert wanted is not None
    with Lab(plan(hosts=2, rate=rate)) as lab:
        assert leftovers(), "the test would not notice what stays behind"
        assert 0 < measured_rate(lab, 1.0) < 1.1 * wanted


@pytest.mark.slow
def test_groups_are_fast_inside_and_slow_between() -> None:
    with Lab(plan(groups="2x1", rate="10mbit", inside="1gbit")) as lab:
        assert measured_rate(lab, 1.0) < 1.1 * 10e6
    with Lab(plan(groups="1x2", rate="10mbit", inside="100mbit")) as lab:
        assert 11e6 < measured_rate(lab, 10.0) < 1.1 * 100e6


def test_bytes_are_counted_by_host() -> None:
    with Lab(plan(hosts=2, rate="1gbit")) as lab:
        finished, _ = gathered(lab, *transfer(1_000_000))
    assert finished.bytes_sent is not None
    receiver, sender = finished.bytes_sent
    assert 1_000_000 < sender < 1_050_000
    assert receiver < 50_000


def test_hosts_know_each_other_by_name_and_torchrun_finds_its_node() -> None:
    variables = "$RANK/$WORLD_SIZE $PET_NODE_RANK/$PET_NNODES $MASTER_ADDR $GLOO_SOCKET_IFNAME"
    with Lab(plan(hosts=2)) as lab:
        finished, lines = gathered(lab, "sh", "-c", f"getent hosts host1; echo {variables}")
    assert finished.exit_code == 0
    own = sorted(line for host, _, line in lines if host == 1)
    assert own == ["1/2 1/2 10.77.0.1 eth0", "10.77.0.2       host1"]


def test_commands_run_where_the_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.sh").write_text("pwd")
    monkeypatch.chdir(tmp_path)
    with Lab(plan(hosts=1)) as lab:
        finished, lines = gathered(lab, "sh", "train.sh")
    assert finished.exit_code == 0
    assert lines == [(0, "stdout", str(tmp_path))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["yes & exit 5", 'if [ $RANK = 0 ]; then exit 5; fi; trap "" TERM; while :; do echo x; done']
)
def test_what_goes_on_printing_does_not_keep_the_lab_open(command: str) -> None:
    with Lab(plan(hosts=2)) as lab:
        finished, _ = gathered(lab, "sh", "-c", command)
    assert finished.exit_code == 5


@pytest.mark.slow
def test_torchrun_is_one_node_per_host(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print('ranks', int(total))\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", str(script)]
    with Lab(plan(groups="2x1", rate="100mbit")) as lab:
        finished, lines = gathered(lab, *command)
    assert finished.exit_code == 0, lines
    said = sorted((host, line) for host, stream, line in lines if stream == "stdout")
    assert said == [(0, "ranks 2"), (1, "ranks 2")]


def test_the_first_failure_stops_the_others_and_its_exit_code_is_the_runs() -> None:
    command = 'if [ $RANK = 1 ]; then echo "out of data" >&2; exit 7; fi; sleep 60'
    with Lab(plan(hosts=3)) as lab:
        finished, lines = gathered(lab, "sh", "-c", command)
    assert (finished.exit_code, finished.failed_host) == (7, 1)
    assert (1, "stderr", "out of data") in lines
    assert finished.seconds < 30


def test_a_command_killed_by_a_signal_ends_as_a_shell_says_it() -> None:
    with Lab(plan(hosts=2)) as lab:
        finished, _ = gathered(lab, "sh", "-c", "[ $RANK = 0 ] && kill -9 $$; sleep 60")
    assert (finished.exit_code, finished.failed_host) == (137, 0)


def test_an_error_within_the_lab_tears_it_down() -> None:
    def fail() -> None:
        with Lab(plan(hosts=2)) as lab:
            lab.start(0, ["sleep", "60"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert_nothing_is_left()


def test_what_a_command_left_running_ends_with_the_lab() -> None:
    leave = 'setsid sleep 61 >/dev/null 2>&1 & until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done'
    with Lab(plan(hosts=2)) as lab:
        finished, _ = gathered(lab, "sh", "-c", leave)
        assert finished.exit_code == 0
        assert ["sleep", "61", ""] in commands().values()
    assert_nothing_is_left()


def test_a_closed_lab_says_so() -> None:
    lab = Lab(plan(hosts=2))
    with pytest.raises(LabError, match="closed"):
        lab.start(0, ["true"])


def test_a_host_that_is_cut_off_has_no_link_until_it_is_mended() -> None:
    def without_link() -> set[int]:
        _, lines = gathered(lab, "ip", "-o", "link", "show", "eth0")
        return {host for host, _, text in lines if "NO-CARRIER" in text}

    with Lab(plan(hosts=2)) as lab:
        lab.cut(1)
        assert without_link() == {1}
        lab.mend(1)
        assert without_link() == set()


@pytest.mark.slow
def test_two_labs_at_once_do_not_meet() -> None:
    with Lab(plan(hosts=2, rate="10mbit")) as slow, Lab(plan(hosts=2, rate="100mbit")) as fast:
        own = slow.start(0, ["sh", "-c", "sleep 0.2; echo $THINWIRE_LAB"], stdout=subprocess.PIPE)
        assert measured_rate(fast, 0.5) > 20e6
        fast.close()
        assert own.communicate()[0] == "2 hosts at 10mbit\n"
        assert measured_rate(slow, 0.5) < 11e6


def test_without_root_a_user_namespace_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "way_in", lambda: ["--user", "--map-root-user"])
    with Lab(plan(hosts=2, rate="100mbit")) as lab:
        assert measured_rate(lab, 0.5) < 1.1 * 100e6
        assert min(lab.bytes_sent()) > 0


def as_nobody() -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    with Lab(plan(hosts=2, rate="100mbit")) as lab:
        finished, lines = gathered(lab, "sh", "-c", "getent hosts host1 >/dev/null && echo $RANK")
    sys.exit(finished.exit_code or sorted(line for _, _, line in lines) != ["0", "1"])


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run without root already")
def test_a_user_without_any_right_can_open_a_lab() -> None:
    child = multiprocessing.get_context("forkserver").Process(target=as_nobody)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    child.close()


def heed_signals() -> None:
    """Whoever runs the tests may ignore them (nohup does), and children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def opened_elsewhere(folder: Path) -> subprocess.Popen[str]:
    """`thinwire lab` in a process of its own, once its command runs."""
    command = [
        sys.executable,
        "-m",
        "thinwire",
        "lab",
        "--hosts",
        "2",
        "--",
        "sh",
        "-c",
        "touch $0/$RANK; sleep 62",
    ]
    process = subprocess.Popen(
        [*command, str(folder)], text=True, stderr=subprocess.DEVNULL, preexec_fn=heed_signals
    )
    ends = time.monotonic() + 60
    while len(list(folder.iterdir())) < 2 and time.monotonic() < ends:
        time.sleep(0.05)
    assert len(list(folder.iterdir())) == 2
    return process


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_however_the_lab_is_ended_nothing_stays(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = opened_elsewhere(tmp_path)
    process.send_signal(number)
    assert process.wait(120) == code
    assert_nothing_is_left()
    assert clean() == 0


@pytest.mark.slow
def test_clean_ends_a_lab_whose_owner_is_gone_and_no_other(tmp_path: Path) -> None:
    """A keeper that was frozen when its owner died cannot notice; `clean` ends it."""
    with Lab(plan(hosts=2)) as other:
        process = opened_elsewhere(tmp_path)
        own = [pid for pid, words in commands().items() if f"{process.pid}@" in " ".join(words[-2:])]
        for pid in own:
            os.kill(pid, signal.SIGSTOP)
        process.kill()
        process.wait()
        assert own
        assert clean() == 1
        assert other.start(0, ["true"]).wait() == 0
    assert_nothing_is_left()
    assert clean() == 0


@pytest.mark.slow
def test_clean_leaves_labs_alone_whose_owner_it_cannot_see(tmp_path: Path) -> None:
    """In a container, or within another lab."""
    command = [
        sys.executable,
        "-m",
        "thinwire",
        "lab",
        "--",
        "sh",
        "-c",
        "touch $0/$RANK; sleep 6",
        str(tmp_path),
    ]
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--user", "--map-root-user"]
    contained = subprocess.Popen([*inside, *command], stderr=subprocess.DEVNULL)
    ends = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < ends:
        time.sleep(0.05)
    assert clean() == 0
    assert contained.wait(120) == 0


def test_delay_works_or_says_that_the_kernel_has_no_netem() -> None:
    delayed = plan(hosts=2, rate="100mbit", delay=30)
    if next(finding.ok for finding in examine() if finding.name == "netem"):
        with Lab(delayed) as lab:
            assert measured_rate(lab, 0.05) < 50e6, "the first window alone takes 30 ms"
    else:
        with pytest.raises(UnavailableError, match="cannot emulate delay or loss"):
            Lab(delayed).__enter__()
