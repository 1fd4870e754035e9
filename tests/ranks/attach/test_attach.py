"""The handle: swap, disable, stats, state, drift, what it refuses, and how it goes away."""

import copy
import gc
import io
import logging
import threading
import time
import weakref
from collections import OrderedDict
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import Staged, batch, changed, flat_gradients, mlp, own
from thinwire.engine.comm import rendezvous
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.comm.process_group import store_of
from thinwire.step import runner

TINY_BUCKETS = 0.002


def backward(ddp: DDP, rank: int, step: int) -> torch.Tensor:
    ddp.zero_grad()
    ddp(batch(rank, step)).square().mean().backward()
    return flat_gradients(ddp.module)


def swapping(rank: int, world_size: int) -> None:
    ddp, plain = DDP(mlp(), bucket_cap_mb=TINY_BUCKETS), DDP(mlp())
    wire = thinwire.attach(ddp, thinwire.BF16())
    exact = backward(plain, rank, 0)
    rounded = backward(ddp, rank, 0)
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=2e-2, atol=1e-5)
    wire.swap(Staged())
    assert torch.equal(backward(ddp, rank, 0), exact)
    wire.swap(thinwire.FP16())
    backward(ddp, rank, 0)
    wire.disable()
    assert wire.program == thinwire.Exact()
    assert torch.equal(backward(ddp, rank, 0), exact)
    sent = [record.bytes_sent for record in wire.stats().records]
    total = 4 * sum(parameter.numel() for parameter in ddp.parameters())
    assert sent[3] == 2 * total * (world_size - 1) // world_size
    biases = 4 * sum(parameter.numel() for parameter in ddp.parameters() if parameter.dim() == 1)
    assert sent[0] == (total + biases) * (world_size - 1) // world_size  # vectors travel as they are
    assert sent[2] == sent[0]
    assert wire.stats().steps == wire.step == 4


def test_programs_swap_between_steps_and_bytes_follow() -> None:
    run_ranks(swapping, 2)


def refusals(rank: int, world_size: int) -> None:
    with pytest.raises(thinwire.AttachError, match="needs a DistributedDataParallel model, not a Sequential"):
        thinwire.attach(mlp(), thinwire.Exact())
    ddp = DDP(mlp(), bucket_cap_mb=TINY_BUCKETS)
    for options, said in (
        ({"check_every": -1}, "check_every=-1 must be a whole number, at least 0"),
        ({"history": 0}, "history=0 must be a whole number, at least 1"),
        ({"timeout": 0}, "timeout=0 must be a positive number"),
        ({"timeout": timedelta(seconds=-1)}, "must be a positive number"),
        ({"timeout": float("inf")}, "timeout=inf must be a positive number"),
        ({"timeout": "5"}, "timeout='5' must be a positive number"),
        ({"history": 1.5}, "history=1.5 must be a whole number"),
    ):
        with pytest.raises(thinwire.OptionError, match=said):
            thinwire.attach(ddp, thinwire.Exact(), **options)
    for no_program in ("bf16", thinwire.Exact, None):
        with pytest.raises(thinwire.OptionError, match="is not a program: pass an instance"):
            thinwire.attach(ddp, no_program)  # type: ignore[arg-type]
    with pytest.raises(thinwire.OptionError, match=r"a communication hook.*: pass thinwire\.FP16\(\)"):
        thinwire.attach(ddp, fp16_compress_hook)  # type: ignore[arg-type]
    plain = backward(DDP(mlp()), rank, 0)
    wire = thinwire.attach(ddp, thinwire.Exact())  # none of the refusals left a trace
    assert torch.equal(backward(ddp, rank, 0), plain)
    with pytest.raises(thinwire.AttachError, match=r"has a wire already: use wire.swap"):
        thinwire.attach(ddp, thinwire.Exact())
    with pytest.raises(thinwire.OptionError, match="is not a program"):
        wire.swap("fp16")  # type: ignore[arg-type]
    with pytest.raises(thinwire.AttachError, match=r"copy ddp.module, or save wire.state_dict"):
        copy.deepcopy(wire)
    assert torch.equal(backward(ddp, rank, 0), plain)
    hooked = DDP(mlp())
    hooked.register_comm_hook(None, _foreign_hook)
    with pytest.raises(thinwire.AttachError, match="'_foreign_hook' already, and DDP accepts only one"):
        thinwire.attach(hooked, thinwire.Exact())
    builtin = DDP(mlp())
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(thinwire.AttachError, match="DDP did not accept the hook"):
        thinwire.attach(builtin, thinwire.Exact())


def _foreign_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    raise AssertionError("never called")


def test_bad_input_is_refused_and_changes_nothing() -> None:
    run_ranks(refusals, 2)


def connects_late(rank: int, world_size: int) -> bool:
    assert dist.group.WORLD is not None
    store = store_of(dist.group.WORLD)
    connect = GroupCommunicator._connect

    def late(self: GroupCommunicator, *args: Any) -> dist.ProcessGroup:
        group = connect(self, *args)
        if rank == 1:
            time.sleep(0.5)
            store.set("connected", "")
        return group

    with patch.object(GroupCommunicator, "_connect", late):
        thinwire.attach(DDP(mlp()), thinwire.Exact())  # the model is gone at once, and its connections
    return store.check(["connected"])


def test_attach_returns_when_all_ranks_have_connected() -> None:
    assert run_ranks(connects_late, 2) == [True, True]


def mismatch(rank: int, world_size: int, what: str) -> str:
    program: thinwire.Program = thinwire.Exact()
    options: dict[str, Any] = {}
    model: nn.Module = mlp(layers=4)
    if rank == 1:
        if what == "program":
            program = thinwire.BF16()
        elif what == "preset":
            program = thinwire.Int8(block=128)
        elif what == "rules":
            options["rules"] = [("*bias", thinwire.Int4())]
        elif what == "option":
            options["check_every"] = 7
        elif what == "name":
            layers = dict(model.named_children())
            model = nn.Sequential(
                OrderedDict((name.replace("0", "renamed"), layers[name]) for name in layers)
            )
        elif what == "refused":
            options["history"] = 0
    try:
        thinwire.attach(DDP(model), program, **options)
    except thinwire.ThinwireError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("program", "program: Exact() on ranks 0, 2, BF16() on rank 1"),
        ("preset", "program: Exact() on ranks 0, 2, Int8(block=128) on rank 1"),
        ("rules", "option rules: () on ranks 0, 2, (('*bias', Int4()),) on rank 1"),
        ("option", "option check_every: None on ranks 0, 2, 7 on rank 1"),
        ("name", "parameter renamed.bias: nothing on ranks 0, 2, (24,) torch.float32 on rank 1"),
        (
            "refused",
            "rank 1 raised: history=0 must be a whole number, at least 1: stats() shows the latest steps",
        ),
    ],
)
def test_a_rank_that_is_set_up_differently_is_named_on_every_rank(what: str, said: str) -> None:
    errors = run_ranks(mismatch, 3, what)
    for rank, error in enumerate(errors):
        if what == "refused" and rank == 1:
            assert error.startswith("OptionError: history=0")
        else:
            assert error.startswith("MismatchError")
            assert said in error


def one_swaps(rank: int, world_size: int) -> str:
    ddp = DDP(mlp())
    wire = thinwire.attach(ddp, thinwire.Exact())
    try:
        wire.swap(thinwire.BF16() if rank else thinwire.FP16())
    except thinwire.MismatchError as error:
        assert wire.program == thinwire.Exact()
        return str(error)
    return "no error"


def test_swapping_to_different_programs_is_refused() -> None:
    for error in run_ranks(one_swaps, 2):
        assert "program: FP16() on rank 0, BF16() on rank 1" in error


def late(rank: int, world_size: int) -> tuple[str, bool]:
    """One rank is slower than the limit; it must not go on alone."""
    ddp = DDP(mlp())
    wire = thinwire.attach(ddp, thinwire.Exact(), timeout=3)
    store = store_of(dist.distributed_c10d._get_default_group())
    if rank == 1:
        store.wait(["rank 0 gave up"])
    try:
        wire.swap(thinwire.BF16())
    except thinwire.WireError as error:
        said = str(error)
        store.set(f"rank {rank} gave up", "")
    else:
        said = "no error"
    unswapped = wire.program == thinwire.Exact()
    wire.swap(thinwire.FP16())  # together again
    assert wire.program == thinwire.FP16()
    return said, unswapped


def test_either_all_ranks_swap_or_none() -> None:
    for said, unswapped in run_ranks(late, 2):
        assert "after 3 s: rank 1 did not reach it in time" in said
        assert "'swap' timed out on rank" in said
        assert unswapped


def attached_late(rank: int, world_size: int) -> list[str]:
    """Rank 2 attaches only when rank 0 has logged three times that it waits."""
    rendezvous._PATIENCE = 0.05
    pair = dist.new_group([0, 2])
    if rank == 1:
        return []
    store, lines = store_of(dist.distributed_c10d._get_default_group()), []

    def note(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        if len(lines) == 3:
            store.set("logged", "")
        return False

    logging.getLogger("thinwire").addFilter(note)
    ddp = DDP(mlp(), process_group=pair)
    if rank == 2:
        store.wait(["logged"])
    thinwire.attach(ddp, thinwire.Exact())
    return lines


def test_a_rank_that_waits_in_attach_logs_the_missing_ranks() -> None:
    lines, *_ = run_ranks(attached_late, 3)
    assert len(lines) >= 3
    assert all("rank 0 is still waiting for rank 2 in attach(), after" in one for one in lines)


def test_missing_ranks_are_found_with_few_requests() -> None:
    store, asked = dist.HashStore(), []

    class Counting:
        def check(self, keys: list[str]) -> bool:
            asked.append(len(keys))
            return store.check(keys)

    keys = [str(number) for number in range(1000)]
    for number in {*range(1000)} - {3, 500, 999}:
        store.set(str(number), "")
    assert rendezvous._missing(Counting(), keys) == [3, 500, 999]  # type: ignore[arg-type]
    assert len(asked) < 100


def drifting(rank: int, world_size: int) -> tuple[int, str]:
    ddp = DDP(mlp(), bucket_cap_mb=TINY_BUCKETS)
    thinwire.attach(ddp, thinwire.Exact(), check_every=3)
    for step in range(20):
        if step == 4 and rank == 1:
            with torch.no_grad():
                ddp.module[2].weight[0, 0].nextafter_(torch.tensor(9.0))
        try:
            backward(ddp, rank, step)
        except thinwire.DriftError as error:
            return step, str(error)
    raise AssertionError("no error came")


def test_a_parameter_that_drifts_by_one_bit_is_named() -> None:
    for step, text in run_ranks(drifting, 3):
        assert step == 6
        assert "at step 6 parameter '2.weight' on rank 1 differs from that on rank 0 (1 of 12" in text


def stepping(rank: int, world_size: int, skipping_rank: int | None) -> list[tuple[int, str]]:
    """By default replicas are compared; steps that all ranks skip alike change nothing."""
    runner._CHECK_EVERY = 5
    ends = []
    for program in (thinwire.Int8(), thinwire.Exact(), thinwire.PowerSGD(rank=2, min_compression=1)):
        ddp = DDP(mlp(), bucket_cap_mb=TINY_BUCKETS)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        wire = thinwire.attach(ddp, program, scaler=scaler)
        end = (0, "no error")
        for step in range(12):
            optimizer.zero_grad()
            loss = ddp(batch(rank, step)).square().mean() * (torch.inf if step == 2 and rank == 1 else 1.0)
            try:
                scaler.scale(loss).backward()
            except thinwire.DriftError as error:
                end = (wire.step, str(error))
                break
            if not (rank == skipping_rank and step == 7):
                scaler.step(optimizer)
                scaler.update()
        ends.append(end)
    return ends


@pytest.mark.parametrize("skipping_rank", [None, 1])
def test_a_rank_that_skips_its_optimizer_step_alone_raises_by_default(skipping_rank: int | None) -> None:
    for ends in run_ranks(stepping, 3, skipping_rank):
        for step, text in ends:
            if skipping_rank is None:
                assert text == "no error"
            else:
                assert step == 10
                assert "on rank 1 differs from that on rank 0" in text
                assert "a skipped step" in text


def rounding(rank: int, world_size: int) -> list[str]:
    """One unit in the last place, as another kind of processor would make of it."""
    runner._CHECK_EVERY = 4
    lines: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return False

    logging.getLogger("thinwire").addFilter(note)
    ddp = DDP(mlp(), bucket_cap_mb=TINY_BUCKETS)
    wire = thinwire.attach(ddp, thinwire.Exact())
    for step in range(6):
        if rank == 1 and step == 1:
            with torch.no_grad():
                ddp.module[2].bias.copy_(torch.nextafter(ddp.module[2].bias, torch.tensor(torch.inf)))
        backward(ddp, rank, step)
    assert wire.step == wire.stats().steps == 6
    return lines


def test_replicas_that_rounding_has_moved_apart_are_logged_by_default() -> None:
    for lines in run_ranks(rounding, 2):
        (line,) = lines
        assert "parameter '2.bias' on rank 1 differs" in line
        assert "Rounding explains the difference" in line


def states(rank: int, world_size: int) -> None:
    ddp = DDP(mlp(), bucket_cap_mb=TINY_BUCKETS)
    wire = thinwire.attach(ddp, Staged())
    for step in range(3):
        backward(ddp, rank, step)
    buffer = io.BytesIO()
    torch.save(wire.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)

    # Another bucket layout, before its first backward: state goes by parameter name.
    fresh = DDP(mlp(), bucket_cap_mb=25)
    resumed = thinwire.attach(fresh, Staged())
    resumed.load_state_dict(saved)
    assert resumed.step == 3
    assert own(resumed.state_dict())["memory"]["0.weight"]["steps"].item() == 3
    backward(fresh, rank, 3)
    assert resumed.step == 4
    assert own(resumed.state_dict())["memory"]["0.weight"]["steps"].item() == 4
    assert own(resumed.state_dict())["memory"].keys() == own(saved)["memory"].keys()

    for broken, said in (
        ({}, "not a state of a thinwire wire"),
        ([], "not a state of a thinwire wire"),
        (changed(saved, format=99), "format 99 is not 1"),
        (own(saved), "without keys like .rank 0 of 2."),
        (changed(saved, rank=1 - rank), "states were mixed up"),
        (changed(saved, program="PowerSGD(rank=4)"), "belongs to PowerSGD"),
        (changed(saved, step=-1), "step=-1 must be a whole number"),
        (changed(saved, memory={"other": {}}), "does not have: other"),
    ):
        with pytest.raises(thinwire.StateError, match=said):
            resumed.load_state_dict(broken)
    assert resumed.step == 4
    assert own(resumed.state_dict())["memory"]["0.weight"]["steps"].item() == 4


def test_state_survives_save_load_and_another_bucket_layout() -> None:
    run_ranks(states, 2)


def different_states(rank: int, world_size: int, how: str) -> str:
    ddp = DDP(mlp())
    wire = thinwire.attach(ddp, Staged())
    state = wire.state_dict()
    if rank == 1:
        state = changed(state, **{"step" if how == "step" else "format": 5})
    try:
        wire.load_state_dict(state)
    except thinwire.ThinwireError as error:
        assert wire.step == 0
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_states_of_different_steps_are_refused() -> None:
    for error in run_ranks(different_states, 2, "step"):
        assert "MismatchError: ranks are set up differently: step: 0 on rank 0, 5 on rank 1" in error


def test_a_state_that_does_not_fit_on_one_rank_is_refused_on_all() -> None:
    first, second = run_ranks(different_states, 2, "format")
    assert "MismatchError: rank 1 raised: format 5 is not 1" in first
    assert "StateError: format 5 is not 1" in second


def during_backward(rank: int, world_size: int) -> str:
    ddp = DDP(mlp(), bucket_cap_mb=TINY_BUCKETS)
    wire = thinwire.attach(ddp, thinwire.Exact())
    backward(ddp, rank, 0)
    said: list[str] = []

    def meddle(gradient: torch.Tensor) -> None:
        try:
            wire.swap(thinwire.BF16())
        except thinwire.AttachError as error:
            said.append(str(error))

    first = ddp.module[0].weight.register_hook(meddle)
    backward(ddp, rank, 1)
    first.remove()
    return said[0]


def test_swapping_in_the_middle_of_backward_is_refused() -> None:
    for text in run_ranks(during_backward, 2):
        assert "swap was called during backward" in text


def lifetime(rank: int, world_size: int) -> None:
    groups_before = len(dist.distributed_c10d._world.pg_group_ranks)
    ddp = DDP(mlp(), bucket_cap_mb=TINY_BUCKETS)
    wire = thinwire.attach(ddp, Staged())
    backward(ddp, rank, 0)
    assert any(thread.name == "thinwire" for thread in threading.enumerate())
    assert len(dist.distributed_c10d._world.pg_group_ranks) == groups_before + 1
    model = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert model() is None, "the wire keeps its model alive"
    assert not any(thread.name == "thinwire" for thread in threading.enumerate())
    assert len(dist.distributed_c10d._world.pg_group_ranks) == groups_before
    assert wire.stats().steps == 1  # what was measured is still there


def test_nothing_outlives_the_model() -> None:
    run_ranks(lifetime, 2)


def dropped_at_different_times(rank: int, world_size: int) -> None:
    """Ranks that keep different numbers of old models alive still meet in their new groups."""
    kept = []
    for attempt in range(4):
        ddp = DDP(mlp())
        thinwire.attach(ddp, thinwire.Exact())
        backward(ddp, rank, attempt)
        if rank == 0 or attempt % 2:
            kept.append(ddp)
        del ddp


def test_models_may_be_dropped_at_different_times() -> None:
    run_ranks(dropped_at_different_times, 2)


def destroyed_first(rank: int, world_size: int) -> None:
    ddp = DDP(mlp())
    thinwire.attach(ddp, thinwire.Exact())
    backward(ddp, rank, 0)
    dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # for the harness to destroy


def test_the_user_may_destroy_the_process_group_first() -> None:
    run_ranks(destroyed_first, 2)


def reinitialised(rank: int, world_size: int) -> None:
    """A new world on the same store, as after an elastic restart within the process."""
    assert dist.group.WORLD is not None
    store = store_of(dist.group.WORLD)
    for attempt in range(3):
        ddp, plain = DDP(mlp(), bucket_cap_mb=TINY_BUCKETS), DDP(mlp())
        thinwire.attach(ddp, Staged())
        assert torch.equal(backward(ddp, rank, attempt), backward(plain, rank, attempt))
        del ddp, plain
        dist.destroy_process_group()
        fresh = dist.PrefixStore(f"attempt {attempt}", store)
        dist.init_process_group("gloo", store=fresh, rank=rank, world_size=world_size)


def test_the_world_may_be_initialised_again() -> None:
    run_ranks(reinitialised, 2)


def in_subgroups(rank: int, world_size: int) -> torch.Tensor:
    """Two jobs in one world; one rank of each belongs to one more group than the other."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2])]
    ddp = DDP(mlp(), process_group=groups[rank // 2])
    plain = DDP(mlp(), process_group=groups[rank // 2])
    wire = thinwire.attach(ddp, thinwire.Exact(), check_every=1)
    gradient = backward(ddp, rank, 0)
    assert torch.equal(gradient, backward(plain, rank, 0))
    assert wire.stats().last is not None
    return gradient


def test_a_model_in_a_subgroup_stays_in_it() -> None:
    first, second, third, fourth = run_ranks(in_subgroups, 4)
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.equal(first, third)
