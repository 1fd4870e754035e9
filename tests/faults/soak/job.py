"""One rank's training: a model, an optimizer, a wire, and how they are saved and loaded."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.faults.soak.episode import Episode, Overflow, Swap
from tests.faults.soak.model import Model, data, flat, uses_all
from tests.faults.soak.programs import Drawn, Hook, averages
from tests.faults.soak.states import digest, not_finite, place, unscaled
from thinwire.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook


@dataclass(frozen=True)
class Report:
    """What a rank's training led to."""

    steps: int
    parameters: torch.Tensor
    own_parameters: torch.Tensor
    parts: dict[str, Any]
    digests: dict[str, str]
    not_finite: list[str]


class Job:
    """Made collectively. `calm`: nobody sleeps; `settled`: DDP has its final buckets from the first step."""

    def __init__(
        self, episode: Episode, rank: int, begin: int, *, calm: bool, settled: bool, bucket_mb: float
    ) -> None:
        self.episode, self.rank = episode, rank
        model = Model(
            normed=episode.normed,
            sleepiness=0.0 if calm else episode.sleepiness,
            sleeper=Random(f"{episode.seed} {rank}"),
        )
        if episode.precision == "bf16 model":
            model.to(torch.bfloat16)
        self.ddp = DDP(model, bucket_cap_mb=bucket_mb, find_unused_parameters=episode.unused)
        if settled:
            self._loss(0, 0).backward()
            self.ddp.zero_grad()
        self.optimizer = _optimizer(episode, self.ddp)
        self.scaler = _scaler(episode)
        self.program = episode.program_at(begin)
        self.wire: thinwire.Wire | None = None
        self.hook_state: Any = None
        if isinstance(self.program, Hook):
            self._register(PowerSGDState(None, start_powerSGD_iter=self.program.start))
        else:
            self.wire = thinwire.attach(self.ddp, self.program, optimizer=self.optimizer)

    @property
    def model(self) -> Model:
        """Without DDP around it."""
        model = self.ddp.module
        assert isinstance(model, Model)
        return model

    @property
    def steps(self) -> int:
        """How many steps have communicated."""
        return self.hook_state.iter if self.wire is None else self.wire.step

    def swap(self, program: Drawn) -> None:
        """Another program; ranks whose scales may have parted take new scalers, as the README says."""
        assert self.wire is not None
        assert not isinstance(program, Hook)
        self.wire.swap(program)
        if averages(self.program) and not averages(program):
            self.scaler = _scaler(self.episode)
        self.program = program

    def train(self, step: int, blow: Callable[[str], None]) -> None:
        """One step, with all that the episode has in store for it; `blow` is told where in it we are."""
        blow("before")
        self.model.trap = lambda: blow("backward")
        for event in self.episode.events:
            if isinstance(event, Swap) and event.step == step:
                self.swap(event.program)
        bad = [event for event in self.episode.events if isinstance(event, Overflow) and event.step == step]
        before, scale = flat(self.model), self.scaler.get_scale()
        self.backward(step, bad[0].value if bad and bad[0].rank == self.rank else 1.0)
        blow("after")
        self.update()
        if bad and not averages(self.program):
            assert torch.equal(flat(self.model), before), f"step {step} overflowed and changed parameters"
            assert self.scaler.get_scale() == scale / 2, f"the scaler did not notice at step {step}"

    def backward(self, step: int, factor: float = 1.0) -> None:
        """Forward and backward, in two micro-batches where the episode accumulates."""
        self.optimizer.zero_grad()
        parts = 2 if step in self.episode.accumulating else 1
        for part in range(parts):
            last = part == parts - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                loss = self._loss(step, part) * (factor if last else 1.0)
                self.scaler.scale(loss).backward()

    def update(self) -> None:
        """The optimizer's step."""
        if self.episode.clipped:
            self.scaler.unscale_(self.optimizer)
            if self.wire is None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            else:
                self.wire.clip_grad_norm_(0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def leave_out(self) -> None:
        """What a step that overflows does: nothing, but the scale falls."""
        state = self.scaler.state_dict()
        self.scaler.load_state_dict({**state, "scale": state["scale"] / 2, "_growth_tracker": 0})

    def parts(self) -> dict[str, Any]:
        """All that is saved."""
        wire = _opened(self.hook_state) if self.wire is None else self.wire.state_dict()
        return {
            "wire": wire,  # first: it ends what is under way
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def save(self, folder: str, step: int, world_size: int) -> None:
        """A checkpoint of this rank, whole or not at all."""
        path = place(folder, step, self.rank, world_size)
        torch.save({**self.parts(), "hook": self.hook_state}, f"{path}.part")
        os.replace(f"{path}.part", path)

    def load(self, folder: str, step: int, saved_by: int, *, own: bool) -> None:
        """This rank's own checkpoint; or those of all ranks of another number of them."""
        ranks = [self.rank] if own else range(saved_by)
        paths = [place(folder, step, rank, saved_by) for rank in ranks]
        saved = [torch.load(path, weights_only=True) for path in paths]
        self.model.load_state_dict(saved[0]["model"])
        states = [one["optimizer"] for one in saved]
        sharded = not own and isinstance(self.program, thinwire.ZeRO)
        self.optimizer.load_state_dict(thinwire.merge_optimizer_states(states) if sharded else states[0])
        self.scaler.load_state_dict(saved[0]["scaler"])
        if self.wire is None:
            state = saved[0]["hook"]
            for name in PowerSGDState.__slots__[1:]:
                setattr(self.hook_state, name, getattr(state, name))
        else:
            self.wire.load_state_dict(saved[0]["wire"] if own else [one["wire"] for one in saved])

    def report(self) -> Report:
        """The end: where this rank is, and where all are."""
        parts, own = self.parts(), flat(self.model)
        if self.wire is not None:
            self.wire.finalize()
        return Report(
            steps=self.steps,
            parameters=flat(self.model),
            own_parameters=own,
            parts=parts,
            digests={name: digest(unscaled(part)) for name, part in parts.items()},
            not_finite=not_finite([parts, flat(self.model)]),
        )

    def _register(self, state: PowerSGDState) -> None:
        assert isinstance(self.program, Hook)
        self.hook_state = state
        self.ddp.register_comm_hook(state, batched_powerSGD_hook if self.program.batched else powerSGD_hook)

    def _loss(self, step: int, part: int) -> torch.Tensor:
        x = data(self.rank, step, part)
        whole = not self.episode.unused or uses_all(self.rank, step, part)
        kind = self.episode.precision
        half = torch.bfloat16 if kind == "bf16 autocast" else torch.float16
        with torch.autocast("cpu", dtype=half, enabled=kind.endswith("autocast")):
            output = self.ddp(x.to(torch.bfloat16) if kind == "bf16 model" else x, whole)
        loss: torch.Tensor = (output.float() - x[:, :4]).square().mean()
        return loss


def _optimizer(episode: Episode, ddp: DDP) -> torch.optim.Optimizer:
    if episode.adam:
        return torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    return torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)


def _scaler(episode: Episode) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5, enabled=episode.scaled)


def _opened(state: PowerSGDState) -> dict[str, Any]:
    return {"errors": state.error_dict, "factors": state.q_memory_dict, "iter": state.iter}
