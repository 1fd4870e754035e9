"""DDP's options that only some versions of torch have, and names that a version may lack."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import Staged, batch, mlp
from tests.ranks.ddp.test_modes import TINY_BUCKETS, both_ways, train
from thinwire.ddp_comm_hooks.default_hooks import allreduce_hook
from thinwire.version import private

MANUAL = "require_manual_backward_finalization"
needs_manual_finalization = pytest.mark.skipif(
    not hasattr(DDP, MANUAL), reason=f"torch {torch.__version__} has no DDP.{MANUAL} (since 2.15)"
)


def manual(ddp: DDP, on: bool) -> DDP:
    setattr(ddp, MANUAL, on)
    return ddp


def manual_from_the_start(rank: int, world_size: int) -> None:
    ddp = manual(DDP(mlp()), True)
    with pytest.raises(thinwire.UnavailableError, match=rf"{MANUAL}=True.*set ddp.{MANUAL} = False"):
        thinwire.attach(ddp, thinwire.Exact())
    wire = thinwire.attach(manual(ddp, False), thinwire.Exact())  # the refusal left no trace
    train(ddp, rank)
    assert wire.step == 6


@needs_manual_finalization
def test_attach_refuses_manual_finalization() -> None:
    run_ranks(manual_from_the_start, 2)


def manual_on_one_rank(rank: int, world_size: int) -> str:
    try:
        thinwire.attach(manual(DDP(mlp()), rank == 1), thinwire.Exact())
    except thinwire.ThinwireError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@needs_manual_finalization
def test_the_other_ranks_learn_of_it() -> None:
    first, second = run_ranks(manual_on_one_rank, 2)
    assert second.startswith("UnavailableError")
    assert first.startswith("MismatchError")
    assert f"rank 1 raised: {MANUAL}=True" in first


def manual_later(rank: int, world_size: int, torch_named: bool) -> None:
    ddp = DDP(mlp(), bucket_cap_mb=TINY_BUCKETS)
    if torch_named:
        ddp.register_comm_hook(None, allreduce_hook)
    else:
        thinwire.attach(ddp, thinwire.Int8())
    train(ddp, rank, steps=2)
    manual(ddp, True)
    with pytest.raises(thinwire.UnavailableError, match=f"{MANUAL}=True"):
        ddp(batch(rank, 2)).square().mean().backward()


@needs_manual_finalization
@pytest.mark.parametrize("torch_named", [False, True])
def test_manual_finalization_that_is_set_later_raises_in_backward(torch_named: bool) -> None:
    run_ranks(manual_later, 2, torch_named)


def with_option(rank: int, world_size: int, option: dict[str, Any]) -> None:
    for as_view in (True, False):
        for mode in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            options = {"bucket_cap_mb": TINY_BUCKETS, "gradient_as_bucket_view": as_view, **mode, **option}
            both_ways(rank, mlp, **options)
            both_ways(rank, mlp, program=Staged(), **options)
            split = DDP(mlp(), **options)
            wire = thinwire.attach(split, thinwire.Int8(), rules=[("0.*", thinwire.Int4())], audit_every=2)
            train(split, rank)
            assert wire.step == 6
            assert len(wire.audits()) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "since"), [("batched_grad_copy", "2.13"), ("lazy_bucket_allocation", "2.15")]
)
def test_options_that_change_how_buckets_are_filled(option: str, since: str) -> None:
    if option not in inspect.signature(DDP).parameters:
        pytest.skip(
            f"torch {torch.__version__} has no DDP(..., {option}=) (2.6 to 2.9 lack it, {since} has it)"
        )
    run_ranks(with_option, 2, {option: True})


def test_a_name_that_torch_lacks_is_named_with_its_version() -> None:
    said = rf"torch {torch.__version__.split('+')[0]}.* has no {{}}\._gone, which thinwire needs: use torch"
    with pytest.raises(thinwire.UnavailableError, match=said.format("SimpleNamespace")):
        private(SimpleNamespace(), "_gone")
    with pytest.raises(thinwire.UnavailableError, match=said.format("torch.distributed")):
        private(torch.distributed, "_gone")
