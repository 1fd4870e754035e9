"""Parameters that are not plain: laid out otherwise, frozen on the way, ignored by DDP, sparse."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_gradients, mlp, own
from thinwire.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from thinwire.programs.program import ProgramFunction

ANY: Any = thinwire
LOSSY = thinwire.ErrorFeedback(thinwire.TwoShot(thinwire.Cast(torch.float16)))


def convolutions(layout: torch.memory_format) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    return model.double().to(memory_format=layout)  # type: ignore[call-overload, no-any-return]


def images(rank: int, step: int) -> torch.Tensor:
    return batch(rank, step, width=3 * 8 * 8).view(-1, 3, 8, 8).double()


def residuals(wire: thinwire.Wire) -> dict[str, torch.Tensor]:
    return {name: slots["residual"] for name, slots in own(wire.state_dict())["memory"].items()}


def laid_out(rank: int, world_size: int) -> None:
    """Two layouts of one model train alike, and a state of the one resumes the other.

    In double precision and without blocks: layouts change the order in which convolutions are summed up.
    """
    programs: list[thinwire.Program] = [
        LOSSY,
        thinwire.PowerSGD(rank=2, min_compression=0.5, warmup=0),
        thinwire.AcrossNodes(LOSSY, node_size=1),
    ]
    for program in programs:
        models = {
            layout: DDP(convolutions(layout)) for layout in (torch.contiguous_format, torch.channels_last)
        }
        assert not models[torch.channels_last].module[0].weight.is_contiguous()
        wires = {layout: thinwire.attach(ddp, program) for layout, ddp in models.items()}
        for step in range(3):
            for ddp in models.values():
                ddp.zero_grad()
                ddp(images(rank, step)).square().mean().backward()
            one, other = (flat_gradients(ddp.module) for ddp in models.values())
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
        states = [own(wire.state_dict())["memory"] for wire in wires.values()]
        for name, slots in states[0].items():
            for slot, kept in slots.items():
                assert kept.is_contiguous()
                torch.testing.assert_close(
                    kept, states[1][name][slot], rtol=0, atol=1e-9, msg=f"{name} {slot}"
                )


def test_residuals_are_in_the_order_of_the_parameter_whatever_its_memory_format() -> None:
    run_ranks(laid_out, 2)


def trained_in(rank: int, what: Any, layout: torch.memory_format) -> tuple[torch.Tensor, dict[str, Any]]:
    """The parameters in the order of their elements, and the residuals by name."""
    ddp = DDP(convolutions(layout), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    state = PowerSGDState(None, 2, start_powerSGD_iter=0, min_compression_rate=0.5)
    if what == "hook":
        ddp.register_comm_hook(state, powerSGD_hook)
    else:
        wire = thinwire.attach(ddp, what, optimizer=optimizer)
    for step in range(5):
        optimizer.zero_grad()
        ddp(images(rank, step)).square().mean().backward()
        optimizer.step()
    flat = torch.cat([one.detach().contiguous().flatten() for one in ddp.module.parameters()])
    if what == "hook":
        return flat, {name: {"residual": one} for name, one in state.error_dict.items()}
    return flat, own(wire.state_dict())["memory"]


def strategies_laid_out(rank: int, world_size: int) -> None:
    for what in (
        thinwire.ZeRO(LOSSY),
        thinwire.ZeRO(LOSSY, interleaved=True),
        thinwire.ZeRO(thinwire.PowerSGD(rank=2, min_compression=0.5, warmup=0)),
        thinwire.DiLoCo(2, program=LOSSY),
        "hook",
    ):
        (one, kept), (other, kept_there) = (
            trained_in(rank, what, layout) for layout in (torch.contiguous_format, torch.channels_last)
        )
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9, msg=f"{what}")
        assert kept.keys() == kept_there.keys(), what
        residual = 0.0
        for name, slots in kept.items():
            for slot, tensor in slots.items():
                there = kept_there[name][slot].reshape(-1)
                torch.testing.assert_close(tensor.reshape(-1), there, rtol=0, atol=1e-9, msg=f"{what} {name}")
                residual = max(residual, float(tensor.abs().max()))
        assert residual > 1e-7, (what, "there is something to compare")


def test_strategies_and_hooks_keep_residuals_in_the_order_of_the_parameter_too() -> None:
    run_ranks(strategies_laid_out, 2)


def frozen_on_the_way(rank: int, world_size: int) -> None:
    """A layer frozen after some steps keeps what was not sent of it, however gradients are zeroed."""
    for to_none, early in ((True, False), (False, False), (False, True)):
        model = mlp()
        ddp = DDP(model, find_unused_parameters=True)
        if early:  # between DDP and attach: DDP goes on with all that it was made with
            model[0].weight.requires_grad_(False)
        wire = thinwire.attach(ddp, thinwire.Int4())
        kept = []
        for step in range(4):
            if step == 2:
                model[4].weight.requires_grad_(False)
            ddp.zero_grad(set_to_none=to_none)
            ddp(batch(rank, step)).square().mean().backward()
            kept.append(residuals(wire))
        assert kept[1]["4.weight"].any()
        for later in kept[2:]:
            assert torch.equal(later["4.weight"], kept[1]["4.weight"])
        for name in ("2.weight", "6.weight", "8.weight"):
            assert not torch.equal(kept[2][name], kept[3][name]), name
        assert early is ("0.weight" not in kept[3])


def test_a_layer_frozen_mid_run_keeps_its_residual() -> None:
    run_ranks(frozen_on_the_way, 2)


class Rooted(nn.Module):
    """A parameter of the model itself, which DDP names with a dot in front where it looks what to ignore."""

    def __init__(self, ignore: list[str]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))
        self.body = mlp()
        DDP._set_params_and_buffers_to_ignore_for_model(self, ignore)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x * self.scale)
        return result


def ignored_at_the_root(rank: int, world_size: int) -> None:
    for ignore in (["scale"], [".scale"], ["scale", ".scale", "body.0.weight"]):
        plain, wired = DDP(Rooted(ignore)), DDP(Rooted(ignore))
        thinwire.attach(wired, thinwire.Exact(), check_every=1)
        for ddp in (plain, wired):
            ddp(batch(rank, 0)).square().mean().backward()
        assert torch.equal(flat_gradients(plain.module), flat_gradients(wired.module)), ignore


def test_parameters_of_the_model_itself_that_ddp_ignores() -> None:
    run_ranks(ignored_at_the_root, 2)


def sparse(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for program in (thinwire.Exact(), thinwire.Int8(), thinwire.LocalSGD(4)):
        with pytest.raises(thinwire.OptionError, match=r"0\.weight has sparse gradients.*sparse=False"):
            thinwire.attach(DDP(model), program, optimizer=optimizer)
    model[0].weight.requires_grad_(False)
    thinwire.attach(DDP(model), thinwire.Exact())


def test_sparse_gradients_are_refused_by_attach() -> None:
    run_ranks(sparse, 2)


def scaled(factor: float, note: object = None) -> ProgramFunction:
    def program(bucket: thinwire.Bucket, memory: thinwire.Memory) -> thinwire.Collectives[thinwire.Outcome]:
        outcome = yield from thinwire.Exact()(bucket, memory)
        return thinwire.Outcome(outcome.mean * factor if note is None else outcome.mean)

    return program


def functions(rank: int, world_size: int) -> None:
    """Functions in rules and stages, of one factory, at other addresses on every rank."""
    padding = [object() for _ in range(1000 * rank)]
    model = mlp(layers=2)
    plain, ddp = DDP(mlp(layers=2)), DDP(model)
    schedule = thinwire.Schedule({0: scaled(2.0), 1: scaled(3.0)})
    wire = thinwire.attach(ddp, schedule, rules=[("0.*", scaled(5.0)), ("2.bias", scaled(7.0))])
    for step, factor in enumerate((2.0, 3.0)):
        for one in (plain, ddp):
            one.zero_grad()
            one(batch(rank, step)).square().mean().backward()
        for name, factors in (("0.weight", 5.0), ("2.weight", factor), ("2.bias", 7.0)):
            got, exact = (one.module.get_parameter(name).grad for one in (ddp, plain))
            assert torch.equal(got, exact * factors), (step, name)
    assert wire.program is schedule.at(1)
    with pytest.raises(thinwire.MismatchError, match=r"factor=0\.0.* on rank 0, .*factor=1\.0.* on rank 1"):
        thinwire.attach(DDP(mlp()), thinwire.Exact(), rules=[("*", scaled(float(rank)))])
    for maker in (ANY.Int8, ANY.PowerSGD, ANY.LocalSGD):
        with pytest.raises(thinwire.OptionError, match=rf"by calling it, {maker.__name__}\(\)"):
            thinwire.attach(DDP(mlp()), maker)
    del padding


def test_programs_that_are_functions() -> None:
    run_ranks(functions, 2)
