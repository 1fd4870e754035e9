"""When, over whom and in which parts models are averaged; and when a training step is over."""

import weakref
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import thinwire
from thinwire import DiLoCo, Hierarchical, LocalSGD, SparseLoCo
from thinwire.models.ddp.model import DDPModel
from thinwire.programs.description import describe
from thinwire.strategies.averaging.anchors import Anchors, split_evenly
from thinwire.strategies.averaging.diloco import pseudo_gradients
from thinwire.strategies.averaging.policy import Averaging
from thinwire.strategies.averaging.training_steps import TrainingSteps


def ANY(value: Any) -> Any:  # noqa: N802 - hides a wrong type from the type checker
    return value


SHAPES = {"a": torch.Size((2, 3)), "b": torch.Size((3,))}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LocalSGD(period=0), "period=0 must be a whole number, at least 1"),
        (lambda: LocalSGD(period=ANY(2.5)), "period=2.5 must be a whole number"),
        (lambda: LocalSGD(period=True), "period=True must be a whole number"),
        (lambda: LocalSGD(4, warmup_steps=-1), "warmup_steps=-1 must be a whole number, at least 0"),
        (
            lambda: LocalSGD(4, buffers=ANY("median")),
            "buffers='median' is not one of 'mean', 'rank0', 'local'",
        ),
        (lambda: LocalSGD(4, optimizer_state=ANY("sum")), "optimizer_state='sum' is not one of"),
        (lambda: LocalSGD(4, within=0), "within=0 must be at least 1"),
        (lambda: LocalSGD(4, within=ANY("rack")), "within='rack' does not describe groups of ranks"),
        (lambda: LocalSGD(4, within=[[0, 1], [1]]), "every rank in exactly one list"),
        (lambda: LocalSGD(4, within=[[0, 2]]), "every rank in exactly one list"),
        (lambda: LocalSGD(4, gradients=ANY("bf16")), "gradients='bf16' is not a program"),
        (lambda: Hierarchical({}), "must map periods to groups, at least one"),
        (lambda: Hierarchical({0: 2, 4: None}), "period=0 must be a whole number, at least 1"),
        (lambda: Hierarchical({4: 2, 2: None}), "2 after 4 does not rise"),
        (lambda: Hierarchical({2: 4, 4: 2}), "2 after 4 does not rise"),
        (lambda: Hierarchical({2: 2, 4: 2}), "2 after 2 does not rise"),
        (lambda: Hierarchical({2: None, 4: 4}), "None, all ranks, can only be the last level"),
        (lambda: DiLoCo(period=-3), "period=-3 must be a whole number, at least 1"),
        (lambda: DiLoCo(4, fragments=5), "fragments=5 exceeds period=4"),
        (lambda: DiLoCo(4, fragments=0), "fragments=0 must be a whole number, at least 1"),
        (lambda: DiLoCo(4, overlap=4), "overlap=4 must be below period=4"),
        (lambda: DiLoCo(4, mixing=1), "mixing=1 must be at least 0 and below 1"),
        (lambda: DiLoCo(4, outer=ANY(torch.zeros)), "must make an optimizer from parameters"),
        (lambda: DiLoCo(4, outer=partial(ANY(torch.optim.SGD), speed=1)), "TypeError"),
        (lambda: DiLoCo(4, program=ANY(thinwire.Quantize(bits=8))), "is not a program"),
    ],
)
def test_wrong_options(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        make()
    assert isinstance(caught.value, thinwire.OptionError)


@pytest.mark.parametrize(
    ("policy", "world_size", "said"),
    [
        (LocalSGD(4, within=3), 2, "within=3 exceeds the 2 ranks"),
        (Hierarchical({2: 3, 4: None}), 2, r"levels\[2\]=3 exceeds the 2 ranks"),
        (Hierarchical({2: 2, 4: 3}), 4, "must be all 4 ranks"),
        (Hierarchical({2: "node"}), 4, "must be all 4 ranks"),
        (DiLoCo(4, fragments=3), 2, "fragments=3 exceeds the model's 2 parameters that train"),
    ],
)
def test_options_that_do_not_fit(policy: Averaging, world_size: int, said: str) -> None:
    with pytest.raises(thinwire.OptionError, match=said):
        policy.check(SHAPES, world_size)


def test_a_process_group_is_the_same_text_on_every_rank() -> None:
    assert "0x" not in repr(LocalSGD(4, within=ANY(torch.distributed.ProcessGroup)(0, 1)))


@given(st.data())
def test_every_fragment_has_one_turn_in_each_period_and_no_two_share_one(data: st.DataObject) -> None:
    period = data.draw(st.integers(1, 40))
    policy = DiLoCo(period, fragments=data.draw(st.integers(1, period)))
    turns = [[average.fragment for average in policy.due(step)] for step in range(1, 2 * period + 1)]
    assert max(map(len, turns)) == 1
    assert sorted(chain(*turns[:period])) == list(range(policy.fragments))
    assert turns[:period] == turns[period:]
    assert turns[period - 1] == [policy.fragments - 1], "the last fragment ends the period"


def test_the_widest_group_whose_turn_it_is_averages() -> None:
    policy = Hierarchical({2: 2, 4: 4, 8: 8})
    among = [[average.among for average in policy.due(step)] for step in range(1, 9)]
    assert among == [[], [2], [], [4], [], [2], [], [None]]


@given(st.dictionaries(st.text(), st.integers(0, 1000), min_size=1, max_size=30), st.data())
def test_fragments_hold_everything_once_and_are_of_about_one_size(
    sizes: dict[str, int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    fragments = split_evenly(sizes, count)
    assert sorted(chain(*fragments)) == sorted(sizes)
    assert len(fragments) == count
    assert all(fragments)
    totals = [sum(sizes[name] for name in names) for names in fragments]
    assert max(totals) - min(totals) <= max(sizes.values())


def test_anchors_of_half_precision_parameters_keep_what_those_round_off() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    anchors = Anchors({"p": parameter}, [["p"]], partial(torch.optim.SGD, lr=1.0))
    for _ in range(16):
        anchors.step(0, {"p": torch.full((3,), 0.001)})
        parameter.data.copy_(anchors["p"])
        (gone,) = pseudo_gradients(anchors, {"p": parameter}, 0).values()
        assert torch.equal(gone, torch.zeros(3)), "nobody has moved"
    torch.testing.assert_close(anchors["p"], torch.full((3,), 1 - 0.016))


class Hooks(DDPModel):
    """The hooks of a model that is not distributed."""

    def __init__(self, module: nn.Module) -> None:
        self._ddp = weakref.ref(ANY(module))

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.ddp().named_parameters())


class Watched:
    """A small model, its optimizers and the steps that were counted."""

    def __init__(self, *optimizers: Any) -> None:
        self.model: Any = nn.Linear(2, 2)
        self.optimizers = [make(self.model.parameters()) for make in optimizers]
        self.begun = self.ended = self.late = 0
        self.rounds = TrainingSteps(ANY(Hooks(self.model)), self.optimizers, self)

    def begin(self) -> None:
        self.begun += 1

    def end(self) -> None:
        self.ended += 1

    def stepped_late(self) -> None:
        self.late += 1

    def backward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.ones(1, 2)).square().sum()
        loss.backward()
        self.rounds.backward()
        return loss


SGD = partial(torch.optim.SGD, lr=0.01)


def test_a_step_ends_with_the_optimizer() -> None:
    watched = Watched(SGD)
    for step in range(3):
        watched.backward()
        assert watched.ended == step
        watched.optimizers[0].step()
        assert watched.ended == step + 1
    assert watched.begun == 3


def test_a_skipped_step_ends_with_the_next_forward_that_trains() -> None:
    watched = Watched(SGD)
    watched.backward()
    with torch.no_grad():
        watched.model(torch.ones(1, 2))
    assert watched.ended == 0, "an evaluation ends nothing"
    watched.backward()
    assert watched.ended == 1
    watched.optimizers[0].step()
    assert watched.ended == 2


def test_a_step_ends_when_all_optimizers_have_stepped() -> None:
    watched = Watched(SGD, SGD)
    watched.backward()
    watched.optimizers[1].step()
    assert watched.ended == 0
    watched.optimizers[0].step()
    assert watched.ended == 1
    watched.backward()
    watched.optimizers[0].step()
    watched.backward()
    assert watched.ended == 2, "the second optimizer skipped"


def test_a_closure_is_part_of_its_step() -> None:
    watched = Watched(partial(torch.optim.LBFGS, lr=0.1, max_iter=4))

    def closure() -> torch.Tensor:
        watched.optimizers[0].zero_grad()
        return watched.backward()

    watched.optimizers[0].step(closure)
    watched.optimizers[0].step(closure)
    assert watched.ended == 2


def test_a_forward_between_backward_and_step_counts_the_step_once() -> None:
    watched = Watched(SGD)
    for step in range(1, 4):
        watched.backward()
        watched.model(torch.ones(1, 2))
        watched.optimizers[0].step()
        assert watched.ended == watched.late == step


def test_a_step_that_raises_is_over_with_the_next_forward() -> None:
    watched = Watched(SGD)

    def closure() -> torch.Tensor:
        watched.backward()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        watched.optimizers[0].step(closure)
    assert watched.ended == 0
    watched.backward()
    assert watched.ended == 1
    watched.optimizers[0].step()
    assert watched.ended == 2


def test_a_scaler_that_finds_an_overflow_ends_the_step_at_once() -> None:
    """Also with unscale_, and with an optimizer that knows scalers; gradients are what torch leaves."""
    both: list[dict[str, Any]] = [{}, {"fused": True}]
    for options in both:
        for unscale in (False, True):
            watched = Watched(partial(torch.optim.SGD, lr=0.1, **options))
            plain: Any = nn.Linear(2, 2)
            plain.load_state_dict(watched.model.state_dict())
            theirs = torch.optim.SGD(plain.parameters(), lr=0.1, **options)
            scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
            for step in range(4):
                for model, optimizer, scaler in (
                    (watched.model, watched.optimizers[0], scalers[0]),
                    (plain, theirs, scalers[1]),
                ):
                    optimizer.zero_grad()
                    scaler.scale(model(torch.ones(1, 2)).square().sum()).backward()
                    if model is watched.model:
                        watched.rounds.backward()
                    if step == 1:
                        next(model.parameters()).grad[0, 0] = torch.inf
                    if unscale:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                    if optimizer is not theirs:
                        assert watched.ended == step + 1
                assert torch.equal(watched.model.weight, plain.weight)
                assert watched.model.weight.grad is not None
    plain_again = Watched(SGD)
    plain_again.rounds.remove()
    assert not hasattr(plain_again.optimizers[0], "_step_supports_amp_scaling")


def test_an_optimizer_that_never_steps_is_noticed() -> None:
    watched = Watched(SGD)
    for _ in range(10):
        watched.backward()
    with pytest.warns(UserWarning, match="none of the optimizers passed to attach has stepped"):
        watched.backward()
    assert watched.ended == 10


def test_accumulation_without_no_sync_is_noticed_once() -> None:
    """A loop that leaves out steps, and clears their gradients before or after its forward, is not meant."""
    for set_to_none in (True, False):
        watched = Watched(SGD)
        for step in range(8):
            if set_to_none:
                loss = watched.model(torch.ones(1, 2)).square().sum()
                watched.optimizers[0].zero_grad()
                loss.backward()
                watched.rounds.backward()
            else:
                watched.optimizers[0].zero_grad(set_to_none=False)
                watched.backward()
            if step % 2:
                watched.optimizers[0].step()
        assert watched.ended == 8
    watched = Watched(SGD, SGD)
    with pytest.warns(UserWarning, match=r"several backward passes.*ddp.no_sync") as caught:  # noqa: PT031
        for step in range(12):
            watched.backward()
            if step % 3 == 2:
                for optimizer in watched.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    assert len(caught) == 1


def test_hooks_end_with_the_model() -> None:
    watched = Watched(SGD)
    optimizer, parameters = watched.optimizers[0], list(watched.model.parameters())
    watched.model = None
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert watched.ended == 0


def test_sparse_loco_is_a_diloco_that_prints_as_written() -> None:
    config = SparseLoCo(period=8, warmup_steps=3)
    assert isinstance(config, DiLoCo)
    assert repr(config) == "SparseLoCo(period=8, warmup_steps=3)"
    assert (config.period, config.warmup_steps) == (8, 3)
    assert "LargestEntries(ratio=0.25, block=4096, values='int2')), keep=1.0)" in describe(config)
    assert config.outer_loop.tuning is not None, "its outer optimizer is DiLoCo's"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 0}, "period=0 must be a whole number"),
        ({"period": 4, "ratio": 2}, "ratio=2 must be above 0"),
        ({"period": 4, "keep": 0}, "keep=0 must be above 0"),
        ({"period": 4, "overlap": 4}, "overlap=4 must be below period=4"),
    ],
)
def test_bad_options_of_sparse_loco_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(thinwire.OptionError, match=message):
        SparseLoCo(**options)


def test_the_default_outer_optimizer_follows_the_number_of_ranks() -> None:
    """Up to four ranks all alike. Beyond, lr / (1 - momentum) grows as sqrt(W)."""
    loop = DiLoCo(4).outer_loop
    assert loop.tuning is not None
    for world_size in (1, 2, 4, 9, 64):
        chosen = loop.tuning(world_size)
        assert chosen["lr"] == 0.8
        assert chosen["lr"] / (1 - chosen["momentum"]) == pytest.approx(0.8 * max(2, world_size**0.5))
    assert DiLoCo(4, outer=partial(torch.optim.SGD, lr=0.7)).outer_loop.tuning is None
