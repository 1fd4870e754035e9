"""torchft: replicas die, come back and stay equal, with a real manager, lighthouse and process group."""

import contextlib
import importlib
import io
import json
import logging
import os
import pickle
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchft import Manager, ProcessGroupGloo
from torchft.checkpointing._serialization import _streaming_save
from torchft.coordination import LighthouseServer

import thinwire
from benchmarks.live_job import Job
from benchmarks.live_replica import Plan
from examples import tiny
from tests import harness
from tests.surface.test_docs import python_blocks
from thinwire.engine.pack import local_part
from thinwire.integrations import torchft
from thinwire.integrations.torchft_transport import reachable_host
from thinwire.monitors.replicas import fingerprints
from thinwire.tools.lab.namespaces import Lab
from thinwire.tools.lab.network import plan as network_plan

DILOCO = thinwire.DiLoCo(4, program=thinwire.Int8())


@pytest.mark.parametrize("dies_in", [-1, 3], ids=["killed", "killed in an exchange"])
def test_a_replica_dies_and_comes_back_and_all_end_equal(tmp_path: Path, dies_in: int) -> None:
    with Job(Plan(folder=tmp_path, dies_in=dies_in), harness._context) as job:
        job.await_("the start", lambda: all(job.exchanges(place)[1:] for place in (0, 2)))
        if dies_in < 0:
            job.await_("replica 1", lambda: bool(job.exchanges(1)[1:]))
            job.kill(1)
        job.await_("the death", lambda: job.dead(1))
        before = job.exchanges(0)[-1]["exchanges"]
        job.await_("two go on", lambda: job.exchanges(0)[-1]["exchanges"] >= before + 2)
        assert job.exchanges(0)[-1]["replicas"] == ["replica-0", "replica-2"]
        job.start(1)
        job.await_("the return", lambda: len(job.exchanges(0)[-1]["replicas"]) == 3)
        results = job.end()
        first = job.exchanges(1)[0]
        rows = {row["exchanges"]: row for row in job.exchanges(0)}
        logs = [job.log(place, 0) for place in (0, 2)]
    assert len({(one["digest"], one["step"]) for one in results}) == 1, results
    assert first["step"] == rows[first["exchanges"]]["step"] > 0, "it continues at the others' step"
    assert first["anchors"] == rows[first["exchanges"]]["anchors"]
    for log in logs:
        assert log.count("was not committed") <= 1, "a death costs at most one exchange"
        assert "replica-1 left before step" in log
        assert "its residuals of 0.weight, 1.weight are lost" in log
        assert "fallen behind" not in log, "the living keep their state"


def check_it_comes_back(
    job: Job, harm: Callable[[int], None], undo: Callable[[int], None], lasts: float
) -> None:
    """Harm replica 1 for longer than the time limit: the others go on, it comes back, and all end equal."""
    job.await_start()
    before = job.exchanges(0)[-1]["exchanges"]
    harm(1)
    began = time.monotonic()
    job.await_("two go on", lambda: job.exchanges(0)[-1]["exchanges"] >= before + 2)
    assert job.exchanges(0)[-1]["replicas"] == ["replica-0", "replica-2"]
    time.sleep(max(0.0, lasts - (time.monotonic() - began)))
    undo(1)
    job.await_("the return", job.all_there)
    results = job.end()
    assert not any(job.lives), "no replica was started again"
    assert len({(one["digest"], one["step"]) for one in results}) == 1, results
    assert "this replica had fallen behind, and continues at step" in job.log(1, 0)
    assert all("fallen behind" not in job.log(place, 0) for place in (0, 2)), "the others keep their state"


def test_a_replica_that_freezes_for_longer_than_the_time_limit_comes_back(tmp_path: Path) -> None:
    with Job(Plan(folder=tmp_path, timeout=4.0), harness._context) as job:
        check_it_comes_back(job, job.freeze, job.thaw, 5.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="replicas enter network namespaces, which takes root")
def test_a_replica_that_is_cut_off_the_network_comes_back(tmp_path: Path) -> None:
    with (
        Lab(network_plan(hosts=4)) as lab,
        Job(Plan(folder=tmp_path, timeout=4.0), harness._context, lab) as job,
    ):
        check_it_comes_back(job, lab.cut, lab.mend, 5.0)


def test_a_sharded_replica_commits_on_all_of_its_ranks_or_on_none(tmp_path: Path) -> None:
    """One rank dies in an exchange. The other ranks of both replicas may have completed theirs."""
    plan = Plan(folder=tmp_path, replicas=2, shards=2, minimum=1, dies_in=3, timeout=10.0)
    with Job(plan, harness._context) as job:
        job.await_("the death", lambda: job.dead(1))
        job.kill(1)  # as torchrun ends the ranks that are left
        before = job.exchanges(0)[-1]["exchanges"]
        job.await_("one goes on", lambda: job.exchanges(0)[-1]["exchanges"] >= before + 2)
        job.start(1)
        job.await_("the return", job.all_there)
        results = job.end()
        logs = [job.log(0, 0, rank) for rank in range(2)]
        found = {row["exchanges"]: row["anchors"] for row in job.exchanges(0)}
        again = {row["exchanges"]: row["anchors"] for row in job.exchanges(1)}
    assert len(results) == 4
    assert len({(one["digest"], one["step"]) for one in results}) == 1, results
    assert again.items() <= found.items(), "the same shards have the same anchors after each exchange"
    for log in logs:
        assert log.count("was not committed") == 1, log
        assert "replica-1 left before step" in log


def test_replicas_below_the_minimum_train_on_and_exchange_again(tmp_path: Path) -> None:
    with Job(Plan(folder=tmp_path, replicas=2, minimum=2), harness._context) as job:
        job.await_start()
        job.kill(1)
        few = "it had 1 replicas, and commits need at least 2"
        job.await_("two windows alone", lambda: job.log(0, 0).count(few) >= 2)
        before = job.exchanges(0)[-1]["exchanges"]
        job.start(1)
        job.await_("the return", job.all_there)
        job.await_("an exchange", lambda: job.exchanges(0)[-1]["exchanges"] > before)
        results = job.end()
        first = job.exchanges(1)[0]
    assert len({(one["digest"], one["step"]) for one in results}) == 1, results
    assert first["step"] > 8, "it continues where the other is, which has trained alone"


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "program": ({"program": thinwire.DiLoCo(4, program=thinwire.Int4())}, r"program: DiLoCo\(.*Int[48]"),
    "period": ({"program": thinwire.DiLoCo(8, program=thinwire.Int8())}, r"program: DiLoCo\(.*[48]"),
    "model": ({"width": 5}, r"parameter 0\.weight: \([58], \d+\) torch\.float32 on this replica, \([58], "),
    "frozen": ({"frozen": True}, r"parameter 0\.weight: .* frozen on "),
    "min_replicas": ({"minimum": 1}, r"option min_replicas: [12] on this replica, [12] on the peer\. Give"),
}


def mismatched(place: int, address: str, subject: str) -> str:
    """Return the error of a replica, of which the second is set up differently."""
    options = {
        "program": DILOCO,
        "width": 8,
        "minimum": 2,
        "frozen": False,
        **(DIFFERENT[subject][0] if place else {}),
    }
    module = nn.Sequential(nn.Linear(tiny.WIDTH, options["width"]), nn.Linear(options["width"], tiny.WIDTH))
    module[0].weight.requires_grad_(not options["frozen"])
    manager = torchft.make_manager(
        min_replicas=options["minimum"],
        lighthouse=address,
        host="localhost",
        timeout=10.0,
        quorum_timeout=6.0,
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    wire = torchft.attach(manager, module, options["program"], optimizer=optimizer)
    with pytest.raises(thinwire.ThinwireError) as caught:
        wire.join()
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("subject", DIFFERENT)
def test_a_difference_is_named_and_not_called_a_missing_quorum(subject: str) -> None:
    server = lighthouse(2)
    try:
        found = sorted(apart(mismatched, 2, server.address(), subject))
    finally:
        server.shutdown()
    assert found[0].startswith("MismatchError: this replica is set up differently"), found
    assert re.search(DIFFERENT[subject][1], found[0]), found
    assert found[1].startswith("WireError: "), "the other one waits for more replicas"


def patient(place: int, address: str, folder: Path) -> list[str]:
    """Replica 0 waits in vain, says for what, and joins in its second attempt, when there is another."""
    module = tiny.model()
    manager = torchft.make_manager(
        min_replicas=2, lighthouse=address, host="localhost", quorum_timeout=60.0 if place else 6.0
    )
    wire = torchft.attach(manager, module, DILOCO, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    messages: list[str] = []
    if place:
        while not (folder / "alone").exists():
            time.sleep(0.05)
    else:
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("thinwire").addHandler(handler)
        with (
            patch("thinwire.integrations.torchft_manager._FIRST_NOTICE", 1.0),
            pytest.raises(
                thinwire.WireError, match=r"no quorum within 6 s.*lighthouse with --min_replicas 1"
            ),
        ):
            wire.join()
        (folder / "alone").touch()
        wire._runner.strategy.membership.service.patience *= 10
    wire.join()
    assert len(wire.replicas) == 2
    return messages


def test_a_replica_says_what_it_waits_for_and_may_try_again(tmp_path: Path) -> None:
    server = lighthouse(2)
    try:
        messages, _ = apart(patient, 2, server.address(), tmp_path)
    finally:
        server.shutdown()
    found = [
        one for one in messages if "for a quorum, and waits up to 6 s: fewer replicas ask for one" in one
    ]
    assert [one.split()[4] for one in found][:2] == ["1", "2"], messages
    assert len(found) <= 3, "ever more rarely"


def apart(function: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """Call `function(place, *args)` in some processes, since torchft leaves threads behind, and warns."""
    pipes, processes = [], []
    for place in range(count):
        receiver, sender = harness._context.Pipe(duplex=False)
        process = harness._context.Process(target=told, args=(sender, function, place, *args), daemon=True)
        process.start()
        pipes.append(receiver)
        processes.append(process)
    try:
        assert all(pipe.poll(100) for pipe in pipes), "a process does not answer"
        results = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    failures = [one for one in results if isinstance(one, str) and one.startswith("Traceback")]
    assert not failures, failures[0]
    return results


def told(sender: Any, function: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    try:
        result = function(*args)
    except BaseException:
        result = traceback.format_exc()
    sender.send(result)
    sender.close()
    os._exit(0)


def lighthouse(minimum: int = 1) -> LighthouseServer:
    return LighthouseServer(
        bind="[::]:0", min_replicas=minimum, join_timeout_ms=100 if minimum == 1 else 20_000
    )


def manager_for(server: LighthouseServer, **options: Any) -> Any:
    return torchft.make_manager(
        **{"min_replicas": 1, "lighthouse": server.address(), "host": "localhost", **options}
    )


def trained(steps: int, wire: Any, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    rows = tiny.Rows().rows
    while wire.step < steps:
        batch = rows[8 * wire.step :][:8]
        optimizer.zero_grad()
        tiny.loss_of(module(batch), batch).backward()
        optimizer.step()


def resumed(_: int, folder: Path) -> None:
    server = lighthouse()

    def made() -> tuple[Any, Any, nn.Module, torch.optim.Optimizer]:
        module, manager = tiny.model(), manager_for(server)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        return manager, torchft.attach(manager, module, DILOCO, optimizer=optimizer), module, optimizer

    manager, wire, module, optimizer = made()
    trained(10, wire, module, optimizer)
    torch.save({"wire": wire.state_dict(), "optimizer": optimizer.state_dict()}, folder / "job.pt")
    position = manager.current_step()
    trained(20, wire, module, optimizer)
    manager.shutdown(wait=False)
    assert position == 3, "the start, and two exchanges"

    server = lighthouse()  # knows nothing of the first manager
    manager, again, other, stepping = made()
    saved = torch.load(folder / "job.pt")
    stepping.load_state_dict(saved["optimizer"])
    (key, (inner,)) = next(iter(saved["wire"].items()))
    for wrong in (
        {},
        {"step": 3},
        {"step": -1, "batches_committed": 3},
        {"step": 1.5, "batches_committed": 3},
    ):
        with pytest.raises(thinwire.StateError):
            again.load_state_dict({key: ({**inner, "live": {**inner["live"], "service": wrong}},)})
    again.load_state_dict(saved["wire"])
    assert (again.step, manager.current_step()) == (10, position)
    trained(20, again, other, stepping)
    assert tiny.digest(other) == tiny.digest(module)
    assert again.exchanges == wire.exchanges == 5
    with pytest.raises(thinwire.StateError, match="had joined"):
        again.load_state_dict(saved["wire"])


def test_a_saved_replica_resumes_bit_by_bit_with_the_managers_step(tmp_path: Path) -> None:
    apart(resumed, 1, tmp_path)


def native(rank: int, size: int, shards: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
    module = started(mesh["shard"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    wire = thinwire.attach(module, DILOCO, replicas=mesh["replicate"], optimizer=optimizer)
    return steps_of(rank, size, module, optimizer, wire)


def live(place: int, address: str, shards: int, folder: Path) -> list[int]:
    replica, rank = divmod(place, shards)
    dist.init_process_group("gloo", f"file://{folder}/{replica}", rank=rank, world_size=shards)
    mesh = init_device_mesh("cpu", (shards,))
    module = started(mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    manager = torchft.make_manager(
        min_replicas=2, lighthouse=address, shards=mesh, host="localhost", name=f"replica-{replica}"
    )
    wire = torchft.attach(manager, module, DILOCO, optimizer=optimizer)
    return steps_of(place, 2 * shards, module, optimizer, wire)


def started(mesh: DeviceMesh) -> nn.Module:
    module = nn.Sequential(nn.Linear(tiny.WIDTH, 8), nn.Linear(8, tiny.WIDTH))
    torch.manual_seed(0)
    with torch.no_grad():
        for one in module.parameters():
            one.normal_()
    if mesh.size() > 1:
        for part in (*module, module):
            fully_shard(part, mesh=mesh)
    return module


def steps_of(
    rank: int, size: int, module: nn.Module, optimizer: torch.optim.Optimizer, wire: Any
) -> list[int]:
    rows = tiny.Rows().rows
    for step in range(8):
        batch = rows[8 * (size * step + rank) :][:8]
        optimizer.zero_grad()
        tiny.loss_of(module(batch), batch).backward()
        optimizer.step()
    wire.finalize()
    bits: list[int] = fingerprints(map(local_part, module.parameters())).tolist()
    return bits


@pytest.mark.parametrize("shards", [1, 2])
def test_undisturbed_replicas_end_as_ranks_of_a_fixed_group_do(tmp_path: Path, shards: int) -> None:
    server = lighthouse(2)
    try:
        found = apart(live, 2 * shards, server.address(), shards, tmp_path)
    finally:
        server.shutdown()
    assert found == harness.run_ranks(native, 2 * shards, shards)


def page(place: int, address: str) -> int:
    os.environ["TORCHFT_LIGHTHOUSE"] = address
    names: dict[str, Any] = {}
    for block in python_blocks("docs/integrations/torchft.md"):
        exec(block, names)
    batches = iter(tiny.Rows().rows.split(8))
    wire = names["train"](tiny.model(), batches, lambda output: output.square().mean(), steps=6)
    return int(wire.step)


def test_the_page_shows_what_trains() -> None:
    server = lighthouse(2)
    try:
        assert apart(page, 2, server.address()) == [6, 6]
    finally:
        server.shutdown()


def too_few(_: int) -> None:
    module = tiny.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    strict, lenient = lighthouse(2), lighthouse(1)
    manager = manager_for(strict, min_replicas=2, quorum_timeout=1.0)
    wire = torchft.attach(manager, module, DILOCO, optimizer=optimizer)
    with pytest.raises(thinwire.WireError, match=r"no quorum within 1 s: fewer replicas ask"):
        module(torch.zeros(1, tiny.WIDTH))
    assert wire.step == 0

    module = tiny.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    manager = manager_for(lenient, min_replicas=2, quorum_timeout=3.0)
    wire = torchft.attach(manager, module, DILOCO, optimizer=optimizer)
    with pytest.raises(thinwire.WireError, match=r"1 replicas where at least 2 are needed: start more"):
        wire.join()


def test_too_few_replicas_are_an_error_with_a_way_out() -> None:
    apart(too_few, 1)


class Harmful:
    """A value whose unpickling makes a folder."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.sentinel),)


def state(**changes: Any) -> dict[str, Any]:
    return {"user": {"thinwire": {}}, "torchft": {"step": 7, "batches_committed": 7}, **changes}


def received(_: int, folder: Path) -> None:
    server = lighthouse()
    manager = manager_for(server)
    ours, limit = manager._checkpoint_transport, timedelta(seconds=5)

    def loaded(sent: dict[str, Any], cut: int | None = None) -> Any:
        """Return what our transport receives from a server of ours, or of others with the same bytes."""
        stream = io.BytesIO()
        _streaming_save(sent, stream)
        with serving(stream.getvalue()[:cut]) as address:
            return ours.recv_checkpoint(0, address, 7, limit)

    plain: dict[str, Any] = {"weights": torch.arange(6.0).reshape(2, 3), "numbers": [1, 2.5, None, "text"]}
    found = loaded(state(user={"thinwire": plain}))
    assert torch.equal(found["user"]["thinwire"].pop("weights"), plain.pop("weights"))
    assert found == state(user={"thinwire": plain})

    sentinel = folder / "sentinel"
    for evil in (
        state(user={"thinwire": Harmful(sentinel)}),
        state(torchft=Harmful(sentinel)),
        Harmful(sentinel),
    ):
        with pytest.raises(thinwire.StateError, match=r"more than tensors and plain values"):
            loaded(evil)  # type: ignore[arg-type]
    with serving(pickle.dumps(Harmful(sentinel))) as address, pytest.raises(thinwire.StateError):
        ours.recv_checkpoint(0, address, 7, limit)
    assert not sentinel.exists()
    for foreign in (
        {},
        state(user={}),
        state(torchft={"step": -1, "batches_committed": 0}),
        state(torchft=[]),
    ):
        with pytest.raises(thinwire.StateError):
            loaded(foreign)
    for cut in (0, 1, 40, 300, -1):
        with pytest.raises(thinwire.WireError, match="did not arrive"):
            loaded(state(user={"thinwire": {"weights": torch.zeros(100)}}), cut)
    for address in (f"file://{sentinel}?", "gopher://localhost:1/", "no address"):
        with pytest.raises(thinwire.StateError, match="not an HTTP address"):
            ours.recv_checkpoint(0, address, 7, limit)


@contextlib.contextmanager
def serving(content: bytes) -> Iterator[str]:
    """Serve some bytes to all requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://localhost:{server.server_address[1]}/checkpoint/"
    finally:
        server.shutdown()
        server.server_close()


def test_the_bytes_of_a_hostile_peer_raise_and_nothing_runs(tmp_path: Path) -> None:
    apart(received, 1, tmp_path)


def hostile(place: int, address: str, folder: Path) -> None:
    """Replica 0 says that it is ahead of the other, and sends it a harmful state."""
    module = tiny.model()
    manager = torchft.make_manager(min_replicas=2, lighthouse=address, host="localhost", timeout=10.0)
    wire = torchft.attach(manager, module, DILOCO, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    if place == 0:
        manager.load_state_dict({"step": 7, "batches_committed": 7})
        manager._user_state_dicts["thinwire"] = lambda: Harmful(folder / "sentinel")
        with contextlib.suppress(thinwire.WireError):
            wire._runner.strategy.membership._round(time.monotonic() + 60)
        return
    with pytest.raises(thinwire.StateError, match=r"more than tensors and plain values.*mkdir"):
        wire.join()
    assert not (folder / "sentinel").exists()


def test_a_hostile_replica_runs_no_code_in_one_that_joins(tmp_path: Path) -> None:
    server = lighthouse(2)
    try:
        apart(hostile, 2, server.address(), tmp_path)
    finally:
        server.shutdown()


def listens(_: int) -> None:
    server = lighthouse()
    manager = manager_for(server, host="127.0.0.1")
    address = manager._checkpoint_transport.metadata()
    ports = {
        "states": urlsplit(address).port,
        "rendezvous": json.loads(manager._pg.get_reconfigure_handle())["store"].rpartition(":")[2],
        "ranks": manager.thinwire_store.port,
    }
    for port in ports.values():
        socket.create_connection(("127.0.0.1", int(port)), 5).close()
        with pytest.raises(ConnectionRefusedError):  # another address of this host
            socket.create_connection(("127.0.0.2", int(port)), 5)
    manager._checkpoint_transport.send_checkpoint([1], 3, state(), timedelta(seconds=5))
    for path in ("3", "../3", "x/3", "checkpoint/3/full"):
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"http://127.0.0.1:{ports['states']}/{path}", timeout=5)
    manager.shutdown()


def test_states_and_stores_are_served_at_one_address_and_to_those_who_know_the_path() -> None:
    apart(listens, 1)


def test_the_default_host_is_the_address_that_reaches_the_lighthouse() -> None:
    assert reachable_host(None, "http://127.0.0.1:29510") == "127.0.0.1"
    assert reachable_host("localhost", "http://127.0.0.1:29510") == "localhost"
    with pytest.raises(thinwire.OptionError, match=r"host='192\.0\.2\.77' is not an address of this host"):
        reachable_host("192.0.2.77", "http://127.0.0.1:29510")
    with (
        patch("thinwire.integrations.torchft_transport._route", lambda _: ("198.51.100.2", "198.51.100.1")),
        pytest.raises(thinwire.OptionError, match=r"'localhost' is 127.*cannot reach.*takes 198\.51\.100\.2"),
    ):
        reachable_host("localhost", "http://198.51.100.1:29510")
    for every in ("0.0.0.0", "::"):
        with pytest.raises(thinwire.OptionError, match="cannot reach: pass its address"):
            reachable_host(every, "http://127.0.0.1:29510")
    for wrong in ("host:29510", "http://host", "http://[::1:29510", ""):
        with pytest.raises(thinwire.OptionError, match="is not an address: pass one such as"):
            reachable_host(None, wrong)


def no_lighthouse(_: int) -> None:
    os.environ.pop("TORCHFT_LIGHTHOUSE", None)
    with pytest.raises(thinwire.WireError, match=r"no lighthouse.*torchft_lighthouse --min_replicas 1"):
        torchft.make_manager(min_replicas=2)
    with pytest.raises(thinwire.WireError, match=r"localhost:1 does not answer: start one"):
        torchft.make_manager(min_replicas=2, lighthouse="http://localhost:1", timeout=1.0)
    wrong: list[Any] = [0, -1.0, float("nan"), "5"]
    for option in ("timeout", "quorum_timeout"):
        for value in wrong:
            with pytest.raises(thinwire.OptionError, match=f"{option}=.* must be a positive number"):
                torchft.make_manager(min_replicas=2, lighthouse="http://localhost:1", **{option: value})


def test_no_lighthouse_is_an_error_with_a_way_out() -> None:
    apart(no_lighthouse, 1)


def refused(_: int) -> None:
    server = lighthouse()
    module = tiny.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    manager = manager_for(server)
    cases: dict[Any, str] = {
        thinwire.DiLoCo(4, overlap=2): r"overlap=2 is not supported with torchft",
        thinwire.DiLoCo(4, warmup_steps=3): r"warmup_steps=3 is not supported",
        thinwire.DiLoCo(4, within=2): r"within=2 is not supported",
        thinwire.DiLoCo(4, optimizer_state="mean"): r'"mean" is not supported',
        thinwire.LocalSGD(4): r"has no outer optimizer",
        thinwire.Int8(): r"has no outer optimizer",
    }
    for program, reason in cases.items():
        with pytest.raises(thinwire.OptionError, match=reason):
            torchft.attach(manager, module, program, optimizer=optimizer)
    with pytest.raises(thinwire.OptionError, match="holds none of the model's parameters"):
        torchft.attach(manager, module, DILOCO, optimizer=torch.optim.SGD(tiny.model().parameters(), lr=1.0))
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    with pytest.raises(thinwire.AttachError, match=r"wrapped in DDP.*shard it with fully_shard"):
        torchft.attach(manager, ddp, DILOCO, optimizer=optimizer)
    with (
        patch.object(manager, "_group_world_size", 2),
        pytest.raises(thinwire.UnavailableError, match=r"has 2 ranks, and the model is whole on each"),
    ):
        torchft.attach(manager, module, DILOCO, optimizer=optimizer)
    torchft.attach(manager, module, DILOCO, optimizer=optimizer)
    with pytest.raises(thinwire.AttachError, match="has a wire already"):
        torchft.attach(manager, module, DILOCO, optimizer=optimizer)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    asynchronous = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=server.address(),
    )
    with pytest.raises(thinwire.UnavailableError, match="use_async_quorum=False"):
        torchft.attach(asynchronous, module, DILOCO, optimizer=optimizer)


def test_what_cannot_work_is_refused() -> None:
    apart(refused, 1)


def test_without_torchft_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.delitem(sys.modules, "thinwire.integrations.torchft")
    with pytest.raises(thinwire.UnavailableError, match="pip install torchft-nightly"):
        importlib.import_module("thinwire.integrations.torchft")
