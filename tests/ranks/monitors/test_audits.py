"""Audits: what compression costs, told by parameter, and what follows from it."""

import logging
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp, own


def train(ddp: DDP, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        for parameter in ddp.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.1)


def figures(rank: int, world_size: int) -> None:
    """The errors are what anybody can compute who has both means."""
    program = thinwire.TwoShot(thinwire.Quantize(bits=4))
    ddp, plain = DDP(mlp(layers=3), bucket_cap_mb=0.002), DDP(mlp(layers=3))
    wire = thinwire.attach(ddp, program, audit_every=2)
    for step in range(2):
        for one in (ddp, plain):
            one.zero_grad()
            one(batch(rank, step)).square().mean().backward()
    (audit,) = wire.audits()
    assert audit.step == 1
    off, total = 0.0, 0.0
    for (name, got), want in zip(ddp.module.named_parameters(), plain.parameters(), strict=True):
        if got.dim() == 1:
            assert name not in audit.parameters  # exact anyway
            continue
        assert got.grad is not None
        assert want.grad is not None
        error = float((got.grad - want.grad).norm() / want.grad.norm())
        assert audit.parameters[name].error == pytest.approx(error, rel=1e-3)
        assert error > 0.01
        off, total = off + float((got.grad - want.grad).norm() ** 2), total + float(want.grad.norm() ** 2)
    assert audit.error == pytest.approx((off / total) ** 0.5, rel=1e-3)
    first, second = (record.bytes_by_kind for record in wire.stats().records)
    matrices = sum(4 * one.numel() for one in ddp.parameters() if one.dim() == 2)
    assert "Audit" not in first
    assert second["Audit"] >= 2 * matrices * (world_size - 1) // world_size
    assert second["Audit"] < 1.1 * 2 * matrices * (world_size - 1) // world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_audit_compares_with_the_exact_mean_and_is_metered(world_size: int) -> None:
    run_ranks(figures, world_size)


def residual_norms(rank: int, world_size: int) -> tuple[float, dict[str, float], dict[str, Any]]:
    ddp = DDP(mlp(layers=3))
    wire = thinwire.attach(ddp, thinwire.TopK(0.1), audit_every=3)
    train(ddp, rank, 0, 3)
    (audit,) = wire.audits()
    norms = {name: one.residual for name, one in audit.parameters.items()}
    return audit.residual, norms, own(wire.state_dict())["memory"]


def test_residuals_are_those_of_all_ranks() -> None:
    found = run_ranks(residual_norms, 2)
    total, norms, _ = found[0]
    squares = {
        name: sum(float(memory[name]["residual"].norm() ** 2) for _, _, memory in found) for name in norms
    }
    assert norms == pytest.approx({name: square**0.5 for name, square in squares.items()}, rel=1e-4)
    assert total == pytest.approx(sum(squares.values()) ** 0.5, rel=1e-4)


def nothing_changes(rank: int, world_size: int) -> None:
    """Audits look and do not touch."""
    results = []
    for every in (0, 1):
        ddp = DDP(mlp(), bucket_cap_mb=0.002)
        thinwire.attach(ddp, thinwire.Int4(stochastic=True), audit_every=every)
        train(ddp, rank, 0, 4)
        results.append(flat_parameters(ddp.module))
    assert torch.equal(*results)


def test_training_with_audits_is_training_without_them() -> None:
    run_ranks(nothing_changes, 3)


def excessive(rank: int, world_size: int, on_excess: Any) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    ddp = DDP(mlp(), bucket_cap_mb=0.002)
    wire = thinwire.attach(ddp, thinwire.TopK(0.01), audit_every=2, max_error=0.5, on_excess=on_excess)
    try:
        train(ddp, rank, 0, 4)
    except thinwire.AuditError as error:
        said.append(str(error))
    (audit, *_) = wire.audits()
    assert audit.parameters[audit.worst].error > 0.5
    return [repr(wire.program), audit.action, audit.worst, *said]


def test_a_warning_says_why() -> None:
    program, action, worst, *said = run_ranks(excessive, 2, "warn")[0]
    assert program == "TopK(ratio=0.01)"
    assert action == "warned"
    assert len(said) == 2
    assert said[0].startswith(f"audit at step 1: the compressed mean of {worst!r} has a relative error of ")
    assert "max_error=0.5" in said[0]


def test_all_ranks_fall_back_to_a_safer_program() -> None:
    for program, action, _, *said in run_ranks(excessive, 2, thinwire.Exact()):
        assert program == "Exact()"
        assert action == "fell back to Exact()"
        assert "; fell back to Exact()" in said[0]


def test_all_ranks_raise() -> None:
    for _, action, worst, *said in run_ranks(excessive, 2, "raise"):
        assert action == "raised"
        assert f"{worst!r} has a relative error of" in said[-1]
        assert "give that parameter a rule, or raise max_error" in said[-1]


def resumed(rank: int, world_size: int) -> None:
    """A job that fell back resumes with the same lines of code."""

    def job() -> tuple[DDP, thinwire.Wire]:
        ddp = DDP(mlp())
        options: dict[str, Any] = {"audit_every": 2, "max_error": 0.5, "on_excess": thinwire.Int8()}
        return ddp, thinwire.attach(ddp, thinwire.TopK(0.01), **options)

    ddp, wire = job()
    train(ddp, rank, 0, 3)
    model, state = ddp.module.state_dict(), wire.state_dict()
    saved = {name: tensor.clone() for name, tensor in model.items()}
    train(ddp, rank, 3, 5)
    again, other = job()
    again.module.load_state_dict(saved)
    other.load_state_dict(state)
    assert other.program == thinwire.Int8()
    train(again, rank, 3, 5)
    assert torch.equal(flat_parameters(ddp.module), flat_parameters(again.module))


def test_a_job_that_fell_back_resumes() -> None:
    run_ranks(resumed, 2)


def of_models(rank: int, world_size: int) -> None:
    ddp = DDP(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    diloco = thinwire.DiLoCo(period=2, program=thinwire.TopK(0.01), fragments=2)
    options: dict[str, Any] = {"audit_every": 2, "max_error": 0.5, "on_excess": thinwire.Exact()}
    wire = thinwire.attach(ddp, diloco, optimizer=optimizer, **options)
    for step in range(8):
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
    first = wire.audits()[0]
    assert first.purpose == "models"
    assert first.action == "fell back to Exact()"
    assert isinstance(wire.program, thinwire.DiLoCo)
    assert wire.program.program == thinwire.Exact()


def test_exchanges_of_models_are_audited_and_fall_back() -> None:
    run_ranks(of_models, 2)


def refused(rank: int, world_size: int) -> None:
    ddp = DDP(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"audit_every": -1}, "audit_every=-1 must be a whole number"),
        ({"max_error": 0.5}, r"max_error=0.5 needs audits"),
        ({"audit_every": 5, "max_error": 0}, "max_error=0 must be a positive number"),
        ({"audit_every": 5, "on_excess": "stop"}, "on_excess='stop' must be 'warn', 'raise' or a program"),
        ({"skip_overflows": True}, "needs the optimizer whose steps to skip"),
        ({"skip_overflows": "yes"}, "skip_overflows='yes' must be True, False, or None"),
        ({"scaler": 3}, "scaler=3 must be the torch.amp.GradScaler"),
        ({"rules": [("head", thinwire.Exact())]}, "'head' is never used"),
        ({"rules": [("0.*", thinwire.AcrossNodes(thinwire.Int8(), node_size=2))]}, "does not divide the 1"),
        ({"on_excess": thinwire.AcrossNodes(thinwire.Int8(), node_size=2)}, "does not divide the 1 ranks"),
    ]
    for options, message in bad:
        with pytest.raises(thinwire.OptionError, match=message):
            thinwire.attach(ddp, thinwire.Int8(), **options)
    with pytest.raises(thinwire.OptionError, match="each rank has the means of its own parameters only"):
        thinwire.attach(ddp, thinwire.ZeRO(), optimizer=optimizer, audit_every=5)
    with pytest.raises(thinwire.OptionError, match=r"cannot skip steps that ZeRO\(interleaved=True\) takes"):
        thinwire.attach(ddp, thinwire.ZeRO(interleaved=True), optimizer=optimizer, skip_overflows=True)
    thinwire.attach(ddp, thinwire.Int8(), audit_every=5)


def test_bad_options_are_refused() -> None:
    run_ranks(refused, 1)
