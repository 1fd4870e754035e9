"""Hugging Face `transformers.Trainer`: a callback that attaches when training begins."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from thinwire.attach import attach
from thinwire.checkpoint.gather import GatheredState
from thinwire.errors import AttachError
from thinwire.integrations.accelerate import check_ddp, clip_by_wire
from thinwire.integrations.metrics import Metrics
from thinwire.integrations.resume import expect_own_states, load_or_warn
from thinwire.models.ddp.unwrap import ddp_of
from thinwire.step.options import unwrapped
from thinwire.step.strategy import Attachable
from thinwire.strategies.schedule import Schedule
from thinwire.strategies.zero.zero import ZeRO
from thinwire.wire import Wire

__all__ = ["ThinwireCallback"]

FILE = "thinwire.pt"
"""The file in each `checkpoint-N` folder with all ranks' state."""


class ThinwireCallback(TrainerCallback):
    """A callback that exchanges the model's gradients, or models, with `program`.

    It attaches when training begins. Every checkpoint of the trainer gets all ranks' state, in the file
    `thinwire.pt`, and a resumed run loads it, with any number of processes. With every log of the training
    loss, the figures of `Metrics` are logged. Under `ZeRO`, `max_grad_norm` is the norm over all ranks.

    Args:
        program: A program, configuration or schedule, as for `thinwire.attach`.
        finalize: Whether to synchronise averaged models before the trainer evaluates or saves. If False,
            it evaluates each rank's own model, and saves rank 0's. At the end they are always synchronised.
        **options: Further options of `thinwire.attach`. The optimizer and the scaler are the trainer's.

    Example::

        Trainer(model, args, train_dataset=data, callbacks=[ThinwireCallback(thinwire.Int8())]).train()
    """

    def __init__(self, program: Attachable | Schedule, *, finalize: bool = False, **options: Any) -> None:
        self.wire: Wire | None = None
        """The wire, from the beginning of training on."""
        self._program = program
        self._finalize = finalize
        self._options = options
        self._trainer: Any = None
        self._state: GatheredState | None = None
        self._metrics: Metrics | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attach to the trainer's DDP model, and load the state of the checkpoint that is resumed."""
        trainer, checkpoint = _running()
        ddp, accelerator, optimizer = _prepared(trainer), trainer.accelerator, unwrapped(trainer.optimizer)
        path = None if checkpoint is None else Path(checkpoint) / FILE
        saved = None
        if path is not None and path.is_file():
            saved = torch.load(path, map_location="cpu", weights_only=True)
        if saved is not None:
            expect_own_states([optimizer])
        options = {"scaler": accelerator.scaler, **self._options}
        wire = attach(ddp, self._program, optimizer=optimizer, **options)
        extra = {} if accelerator.scaler is None else {"scaler": accelerator.scaler}
        self._trainer, self.wire, self._metrics = trainer, wire, Metrics(wire)
        self._state = GatheredState(wire, everywhere=args.save_on_each_node, **extra)
        if isinstance(wire.program, ZeRO):
            clip_by_wire(accelerator, trainer.model_wrapped, wire)
        if path is not None:
            load_or_warn(wire, self._state, saved, str(checkpoint))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Synchronise averaged models before the last evaluation, or before each, as configured."""
        last = state.global_step >= state.max_steps or control.should_training_stop
        if self.wire is not None and (
            last or (self._finalize and (control.should_evaluate or control.should_save))
        ):
            self.wire.finalize()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add all ranks' state to the checkpoint that the trainer has just written."""
        if self._state is None or args.save_only_model:
            return
        gathered = self._state.state_dict()
        if args.should_save:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
            unfinished = path.with_suffix(".unfinished")
            # Renamed when complete: a resumed run must not find half a file.
            torch.save(gathered, unfinished)
            unfinished.replace(path)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Log the wire's figures with the training loss."""
        if self._metrics is not None and "loss" in (logs or {}):
            figures = self._metrics()
            if figures:
                self._trainer.log(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Synchronise averaged models, unless the trainer has replaced them by its best one."""
        if self.wire is not None and not (args.load_best_model_at_end and state.best_model_checkpoint):
            self.wire.finalize()


def _running() -> tuple[Any, str | None]:
    """Return the trainer whose `train` is running, and the checkpoint that it resumes from."""
    # Callbacks receive the bare model, without the DDP model and the folder that is resumed. `Trainer.train`
    # calls `on_train_begin` and has both. The trainer cannot be an argument: it does not exist yet when its
    # callbacks are made.
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        found = frame.f_locals
        trains = frame.f_code.co_name == "train" and "resume_from_checkpoint" in found
        if trains and isinstance(found.get("self"), Trainer):
            return found["self"], found["resume_from_checkpoint"] or None
    raise AttachError(
        "on_train_begin was not called by Trainer.train(): pass the callback to a transformers.Trainer, as in"
        " Trainer(..., callbacks=[ThinwireCallback(program)])"
    )


def _prepared(trainer: Any) -> Any:
    """Return the trainer's DDP model, or raise AttachError with the reason why there is none."""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        kind = "deepspeed" if trainer.is_deepspeed_enabled else "fsdp"
        raise AttachError(
            f"attach needs DDP, and TrainingArguments has {kind}: leave it out, and use thinwire.ZeRO() to"
            " shard the optimizer's state"
        )
    if trainer.args.world_size == 1:
        raise AttachError(
            "the trainer has one process, and makes no DDP model: start the script with torchrun"
            " --nproc-per-node 2 or more, or leave thinwire out with one process"
        )
    check_ddp(trainer.accelerator)
    return ddp_of(trainer.model_wrapped)
