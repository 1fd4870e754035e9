"""Lightning's `Trainer`: a callback that attaches when training starts."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn.parallel import DistributedDataParallel

from thinwire.attach import attach
from thinwire.checkpoint.gather import GatheredState
from thinwire.errors import AttachError, UnavailableError
from thinwire.integrations.metrics import Metrics
from thinwire.integrations.resume import expect_own_states, load_or_warn
from thinwire.models.ddp.unwrap import ddp_of
from thinwire.step.strategy import Attachable
from thinwire.strategies.schedule import Schedule
from thinwire.strategies.zero.zero import ZeRO
from thinwire.wire import Wire

__all__ = ["ThinwireCallback"]

logger = logging.getLogger("thinwire")


class ThinwireCallback(Callback):
    """A callback that exchanges the model's gradients, or models, with `program`.

    It attaches when training starts, with the strategy `"ddp"` on any device. All ranks' state is in the
    checkpoints of the trainer, and a resumed run loads it, with any number of processes. Every
    `log_every_n_steps` steps the figures of `Metrics` are sent to the trainer's loggers. Under `ZeRO`,
    `gradient_clip_val` is the norm over all ranks. The callback is moved before all others, so that at the
    end models are synchronised before a callback such as `WeightAveraging` replaces them.

    Args:
        program: A program, configuration or schedule, as for `thinwire.attach`.
        finalize: Whether to synchronise averaged models before each validation. If False, each rank validates
            its own model, and `ModelCheckpoint` saves rank 0's. At the end they are always synchronised.
        **options: Further options of `thinwire.attach`. The optimizers and the scaler are the trainer's.

    Example::

        Trainer(strategy="ddp", callbacks=[ThinwireCallback(thinwire.PowerSGD(rank=4))]).fit(model)
    """

    def __init__(self, program: Attachable | Schedule, *, finalize: bool = False, **options: Any) -> None:
        self.wire: Wire | None = None
        """The wire, from the start of training on."""
        self._program = program
        self._finalize = finalize
        self._options = options
        self._saved: Mapping[str, Any] | None = None
        self._state: GatheredState | None = None
        self._metrics: Metrics | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the DDP model, and load the state of the checkpoint that is resumed.

        Only now are model, optimizers and loops restored. Lightning has called `load_state_dict` before DDP
        existed.
        """
        ddp = _ddp_of(trainer)
        # First in the list: at the end of training, models are synchronised before WeightAveraging replaces
        # them.
        trainer.callbacks = [self, *(callback for callback in trainer.callbacks if callback is not self)]
        saved, self._saved = (self._saved if trainer.ckpt_path else None), None
        if saved is not None:
            expect_own_states(trainer.optimizers)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        options = {"scaler": scaler, **self._options}
        wire = attach(ddp, self._program, optimizer=trainer.optimizers, **options)
        if wire.attachment("attach").trains_locally:
            _check_weight_averaging(trainer)
        self._state = GatheredState(wire, **({} if scaler is None else {"scaler": scaler}))
        self.wire, self._metrics = wire, Metrics(wire)
        if isinstance(wire.program, ZeRO):
            _clip_by_wire(trainer.precision_plugin, wire)
        if trainer.ckpt_path:
            load_or_warn(wire, self._state, saved, str(trainer.ckpt_path))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Send the wire's figures to the trainer's loggers."""
        due = trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0
        figures = self._metrics() if due and self._metrics is not None else {}
        for logger in trainer.loggers if figures else ():
            logger.log_metrics(figures, step=trainer.global_step - 1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Synchronise averaged models, if configured."""
        fits = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if self._finalize and self.wire is not None and fits:
            self.wire.finalize()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Synchronise averaged models."""
        if self.wire is not None:
            self.wire.finalize()

    def state_dict(self) -> dict[str, Any]:
        """Return all ranks' state for the trainer's checkpoint. Lightning calls it on every rank."""
        return {} if self._state is None else self._state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until training starts."""
        self._saved = state_dict


def _check_weight_averaging(trainer: Any) -> None:
    """Raise UnavailableError if a callback averages models over steps while each rank has its own model."""
    stock = (WeightAveraging.should_update, EMAWeightAveraging.should_update)
    for callback in trainer.callbacks:
        averages = isinstance(callback, WeightAveraging) and type(callback).should_update in stock
        if averages or isinstance(callback, StochasticWeightAveraging):
            raise UnavailableError(
                f"{type(callback).__name__} would average each rank's own model, and models differ between"
                " the exchanges of averaged models: pass a subclass of WeightAveraging whose"
                " should_update(step_idx) is True after the steps that exchange models, as in"
                " (step_idx + 1) % period == 0"
            )


def _clip_by_wire(precision: Any, wire: Wire) -> None:
    """Make `gradient_clip_val` clip gradients under `ZeRO`, which are spread over all ranks."""
    by_value = type(precision).clip_grad_by_value

    def clip_grad_by_value(optimizer: Any, clip_val: float) -> None:
        by_value(precision, optimizer, clip_val)
        wire.clip_grad_norm_(math.inf)  # ZeRO then accepts the change

    precision.clip_grad_by_norm = lambda _, norm: wire.clip_grad_norm_(norm)
    precision.clip_grad_by_value = clip_grad_by_value


def _ddp_of(trainer: Any) -> DistributedDataParallel:
    """Return the trainer's DDP model, or raise AttachError with the reason why there is none."""
    strategy = trainer.strategy
    try:
        ddp = ddp_of(strategy.model)
    except AttachError as error:
        raise AttachError(
            f"attach needs DDP, and the trainer's strategy is {type(strategy).__name__}: use"
            ' Trainer(strategy="ddp", devices=2) or more devices or nodes. To shard the optimizer\'s state,'
            " use thinwire.ZeRO()"
        ) from error
    if getattr(strategy, "_ddp_comm_hook", None) is not None:
        logger.warning(
            "DDPStrategy(ddp_comm_hook=...) is ignored by Lightning on %s: thinwire exchanges gradients",
            strategy.root_device.type,
        )
    return ddp
