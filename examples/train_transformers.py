"""Hugging Face Trainer with thinwire: one callback.

torchrun --standalone --nproc-per-node 2 examples/train_transformers.py --program "Int8()"
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from examples import tiny
from thinwire.integrations.transformers import ThinwireCallback


class WithLoss(nn.Module):
    """The tiny model as the trainer wants it: from a batch to its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.model()

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of a batch by name."""
        return {"loss": tiny.loss_of(self.inner(rows), rows)}


def collate(rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make a batch of rows."""
    return {"rows": torch.stack(list(rows))}


def arguments(options: tiny.Options) -> TrainingArguments:
    """Return the trainer's own arguments, which know nothing of thinwire."""
    return TrainingArguments(
        output_dir=str(options.folder),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=options.accumulate,
        max_grad_norm=options.clip,
        bf16=options.bf16,
        torch_compile=options.compiled,
        torch_compile_backend="eager" if options.compiled else None,
        save_strategy="steps" if options.save_at else "no",
        save_steps=options.save_at or 1,
        logging_steps=2,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
    )


def train(options: tiny.Options, callbacks: Sequence[Any] = ()) -> dict[str, Any]:
    """Train to `options.steps`, and return what it has led to on this rank."""
    model = WithLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
    thin = ThinwireCallback(tiny.program(options))
    trainer = Trainer(
        model,
        arguments(options),
        data_collator=collate,
        train_dataset=tiny.Rows(),
        optimizers=(optimizer, scheduler),
        callbacks=[thin, *callbacks],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    assert thin.wire is not None
    return tiny.result(thin.wire, model.inner)


if __name__ == "__main__":
    tiny.show(train(tiny.parsed(__doc__)))
