"""ZeRO raises where training would go on with wrong numbers: clipping, lost moments, parameters left out."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp
from thinwire import Exact, LocalSGD, ZeRO


def job(program: Any = None, **options: Any) -> tuple[DDP, torch.optim.AdamW, thinwire.Wire]:
    ddp = DDP(mlp(width=8, layers=3), **options)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    return ddp, optimizer, thinwire.attach(ddp, program or ZeRO(), optimizer=optimizer)


def train(rank: int, ddp: DDP, optimizer: torch.optim.Optimizer, begin: int, end: int) -> torch.Tensor:
    for step in range(begin, end):
        optimizer.zero_grad()
        ddp(batch(rank, step, 8)).square().mean().backward()
        optimizer.step()
    return flat_parameters(ddp.module)


def clipping_below_the_limit(rank: int, world_size: int) -> None:
    """Each rank's part of the norm is below the limit, all parts together are above; 2 of 3 own something."""
    for views in (False, True):
        ddp = DDP(nn.Linear(4, 4), gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        wire = thinwire.attach(ddp, ZeRO(), optimizer=optimizer)
        for step in range(2):
            optimizer.zero_grad()
            ddp(batch(rank, step, 4)).square().mean().backward()
            total = wire.clip_grad_norm_(math.inf)
            optimizer.step()
        optimizer.zero_grad()
        ddp(batch(rank, 1, 4)).square().mean().backward()
        local = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.999 * float(total))
        assert local < total
        with pytest.raises(thinwire.UnavailableError, match=r"use wire\.clip_grad_norm_\(max_norm\)"):
            optimizer.step()
        optimizer.zero_grad()  # the wire still works
        ddp(batch(rank, 1, 4)).square().mean().backward()
        optimizer.step()


def test_clipping_by_a_part_of_the_norm_raises_on_all_ranks_also_where_no_rank_exceeds_it() -> None:
    assert run_ranks(clipping_below_the_limit, 3) == [None] * 3


def clipping_alone(rank: int, world_size: int) -> None:
    """One rank has all gradients, so that torch's function is right."""
    ddp, optimizer, _ = job()
    ddp(batch(rank, 0, 8)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
    optimizer.step()


def test_a_single_rank_may_clip_as_it_likes() -> None:
    assert run_ranks(clipping_alone, 1) == [None]


def unscaled_gradients(rank: int) -> None:
    """A GradScaler may change gradients, before wire.clip_grad_norm_ too; torch's clipping still may not."""
    for fused in (False, True):
        ddp = DDP(mlp(width=8, layers=3))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=fused)
        wire = thinwire.attach(ddp, ZeRO(), optimizer=optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, clip in enumerate(["nothing", "wire", "wire unscaled", "torch"]):
            optimizer.zero_grad()
            scaler.scale(ddp(batch(rank, step, 8)).square().mean()).backward()
            if clip not in ("nothing", "wire"):
                scaler.unscale_(optimizer)
            if clip == "torch":
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)
                with pytest.raises(thinwire.UnavailableError, match=r"use wire\.clip_grad_norm_"):
                    scaler.step(optimizer)
                continue
            if clip != "nothing":
                wire.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()


def other_changes(rank: int) -> None:
    """Changes that need no norm are said to be right by wire.clip_grad_norm_; a closure may make none."""
    ddp, optimizer, wire = job()
    for said in (True, False):
        optimizer.zero_grad()
        ddp(batch(rank, 0, 8)).square().mean().backward()
        torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01)
        if said:
            wire.clip_grad_norm_(math.inf)
            optimizer.step()
        else:
            with pytest.raises(thinwire.UnavailableError, match=r"wire\.clip_grad_norm_\(math\.inf\)"):
                optimizer.step()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = ddp(batch(rank, 1, 8)).square().mean()
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)
        return loss

    clips = False
    optimizer.step(closure)
    clips = True
    with pytest.raises(thinwire.UnavailableError, match=r"use wire\.clip_grad_norm_"):
        optimizer.step(closure)


def parts_of_optimizers(rank: int) -> None:
    """Parameters that another optimizer steps would be stepped by their owner alone."""
    ddp = DDP(mlp(width=8, layers=3))
    body, head = list(ddp.module[:4].parameters()), list(ddp.module[4:].parameters())
    with pytest.raises(thinwire.OptionError, match=r"4\.weight.*4\.bias.*pass one optimizer over all"):
        thinwire.attach(ddp, ZeRO(), optimizer=torch.optim.SGD(body, lr=0.1))
    for parameter in head:
        parameter.requires_grad_(False)
    thinwire.attach(ddp, ZeRO(), optimizer=torch.optim.SGD(body, lr=0.1))


def unfrozen(rank: int) -> None:
    for interleaved in (False, True):
        model = mlp(width=8, layers=3)
        model[0].requires_grad_(False)
        ddp = DDP(model)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        thinwire.attach(ddp, ZeRO(interleaved=interleaved), optimizer=optimizer)
        train(rank, ddp, optimizer, 0, 2)
        model[0].requires_grad_(True)
        ddp.eval()
        with torch.no_grad():
            ddp(batch(rank, 2, 8))
        with pytest.raises(thinwire.AttachError, match=r"'0\.weight' was frozen when the wire was attached"):
            ddp(batch(rank, 2, 8))


def saved_on_one_rank(rank: int) -> None:
    """A rank's own part loads on that rank only, before attach and after; whole states load everywhere."""
    ddp, optimizer, wire = job()
    empty = copy.deepcopy(optimizer.state_dict())
    train(rank, ddp, optimizer, 0, 6)
    own = copy.deepcopy(optimizer.state_dict())
    whole = wire.consolidate_optimizer_state(to=0)
    both: list[Any] = [None, None]
    torch.distributed.all_gather_object(both, (own, whole))
    parts, whole = [one[0] for one in both], both[0][1]
    model = {name: one.clone() for name, one in ddp.module.state_dict().items()}
    expected = train(rank, ddp, optimizer, 6, 9)
    for part in parts[1 - rank], {**parts[1 - rank]}:
        with pytest.raises(thinwire.StateError, match=r"consolidate_optimizer_state.*merge_optimizer_states"):
            optimizer.load_state_dict(part)
    with pytest.raises(thinwire.StateError, match="lack the state of some parameters"):
        thinwire.merge_optimizer_states(parts[:1])
    for after in (True, False):
        for state in (whole, own, thinwire.merge_optimizer_states(parts)):
            again = DDP(mlp(width=8, layers=3))
            again.module.load_state_dict(model)
            other = torch.optim.AdamW(again.parameters(), lr=0.01)
            if not after:
                other.load_state_dict(copy.deepcopy(state))
            thinwire.attach(again, ZeRO(), optimizer=other)
            if after:
                other.load_state_dict(empty)
                other.load_state_dict(copy.deepcopy(state))
            assert torch.equal(train(rank, again, other, 6, 9), expected)
    again = DDP(mlp(width=8, layers=3))
    other = torch.optim.AdamW(again.parameters(), lr=0.01)
    other.load_state_dict(parts[0])
    kind, said = (
        (thinwire.MismatchError, "rank 1 raised") if rank == 0 else (thinwire.StateError, "one rank's part")
    )
    with pytest.raises(kind, match=f"{said}(.|\n)*consolidate_optimizer_state"):
        thinwire.attach(again, ZeRO(), optimizer=other)
    for program in (Exact(), LocalSGD(4)):  # rank 0 too would lose the moments of rank 1's parameters
        with pytest.raises(thinwire.StateError, match=r"one rank's part under ZeRO.*which this rank steps"):
            thinwire.attach(again, program, optimizer=other)
    other.load_state_dict(whole)
    thinwire.attach(again, Exact(), optimizer=other)
    with pytest.raises(thinwire.StateError, match="one rank's part under ZeRO"):
        other.load_state_dict(own)
    other.load_state_dict(thinwire.merge_optimizer_states(parts))
    assert len(other.state_dict()["state"]) == 6
    assert "thinwire_owned" not in other.param_groups[0]


def gradients_kept_over_a_step(rank: int, world_size: int) -> None:
    """All ranks raise before any has stepped, also one that owns nothing; then the wire still works."""
    for program in (ZeRO(), ZeRO(thinwire.Int8())):
        for views in (False, True):
            ddp = DDP(nn.Linear(4, 4), gradient_as_bucket_view=views)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            wire = thinwire.attach(ddp, program, optimizer=optimizer)
            ddp(batch(rank, 0, 4)).square().mean().backward()
            optimizer.step()
            before = flat_parameters(ddp.module)
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"already exchanged.*call optimizer\.zero_grad\(\)"):
                    ddp(batch(rank, 1, 4)).square().mean().backward()
            with ddp.no_sync():
                ddp(batch(rank, 1, 4)).square().mean().backward()
            with pytest.raises(RuntimeError, match="already exchanged"):
                ddp(batch(rank, 2, 4)).square().mean().backward()
            assert torch.equal(flat_parameters(ddp.module), before)
            assert wire.step == 1
            optimizer.zero_grad()
            ddp(batch(rank, 1, 4)).square().mean().backward()
            optimizer.step()
            assert wire.step == 2


def test_gradients_that_are_kept_over_a_step_raise_on_all_ranks() -> None:
    assert run_ranks(gradients_kept_over_a_step, 3) == [None] * 3


def micro_batches(rank: int, zero: bool, set_to_none: bool, after_forward: bool, views: bool) -> torch.Tensor:
    torch.manual_seed(0)
    ddp = DDP(mlp(width=8, layers=3), gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    if zero:
        thinwire.attach(ddp, ZeRO(), optimizer=optimizer)
    for step in range(4):
        with ddp.no_sync():
            for micro in range(2):
                if micro == 0 and not after_forward:
                    optimizer.zero_grad(set_to_none)
                loss = ddp(batch(rank, 3 * step + micro, 8)).square().mean()
                if micro == 0 and after_forward:
                    optimizer.zero_grad(set_to_none)
                loss.backward()
        ddp(batch(rank, 3 * step + 2, 8)).square().mean().backward()
        if step != 1:  # the loop leaves a step out, as after a bad loss
            optimizer.step()
    return flat_parameters(ddp.module)


def accumulation(rank: int, world_size: int) -> None:
    for views in (False, True):
        for set_to_none in (False, True):
            for after_forward in (False, True):
                ways = set_to_none, after_forward, views
                plain, sharded = (micro_batches(rank, zero, *ways) for zero in (False, True))
                assert torch.allclose(plain, sharded, atol=1e-7), ways


def test_micro_batches_under_zero_have_the_numbers_of_plain_ddp() -> None:
    assert run_ranks(accumulation, 2) == [None] * 2


def guards(rank: int, world_size: int) -> None:
    for check in (unscaled_gradients, other_changes, parts_of_optimizers, saved_on_one_rank, unfrozen):
        check(rank)


def test_wrong_numbers_under_zero_raise_and_right_ones_do_not() -> None:
    assert run_ranks(guards, 2) == [None, None]
