"""Lightning's Trainer with thinwire: one callback.

torchrun --standalone --nproc-per-node 2 examples/train_lightning.py --program "PowerSGD(rank=4)"
"""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Subset

from examples import tiny
from thinwire.integrations.lightning import ThinwireCallback


class Module(LightningModule):
    """The tiny model, its loss, its optimizer and its data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.model()

    def training_step(self, rows: torch.Tensor, batch: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = tiny.loss_of(self.inner(rows), rows)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and a scheduler that is stepped with it."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> Any:
        """Return this rank's batches from the present step on, as Lightning does not skip those before."""
        done = self.trainer.global_step * self.trainer.accumulate_grad_batches
        size, rank = self.trainer.world_size, self.trainer.global_rank
        rows = tiny.Rows()
        batches = range(done * size + rank, len(rows) // 8, size)
        return DataLoader(
            Subset(rows, [8 * batch + row for batch in batches for row in range(8)]), batch_size=8
        )


def train(
    options: tiny.Options, logger: Any = False, callbacks: Sequence[Any] = (), **more: Any
) -> dict[str, Any]:
    """Train to `options.steps`, and return what it has led to on this rank."""
    module = Module()
    thin = ThinwireCallback(tiny.program(options))
    if options.save_at:
        every = options.save_at
        callbacks = [*callbacks, ModelCheckpoint(options.folder, every_n_train_steps=every, save_top_k=-1)]
    trainer = Trainer(
        accelerator="cpu",
        devices=int(torch.distributed.get_world_size()) if torch.distributed.is_initialized() else 2,
        strategy="ddp",
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip or None,
        precision="bf16-mixed" if options.bf16 else None,
        callbacks=[thin, *callbacks],
        logger=logger,
        log_every_n_steps=2,
        enable_checkpointing=bool(options.save_at),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **more,
    )
    if options.compiled:
        module.inner.compile(backend="eager")  # dynamo cannot trace a training_step that calls self.log
    latest = str(max(options.folder.glob("*.ckpt"))) if options.resume else None
    trainer.fit(module, ckpt_path=latest)
    assert thin.wire is not None
    return tiny.result(thin.wire, module.inner)


if __name__ == "__main__":
    tiny.show(train(tiny.parsed(__doc__)))
