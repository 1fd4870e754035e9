"""Hugging Face Accelerate with thinwire: one line after `prepare`.

    torchrun --standalone --nproc-per-node 2 examples/train_accelerate.py --program "Int8()"

`accelerate launch --multi_gpu --num_processes 2 examples/train_accelerate.py` does the same, also without
GPUs.
"""

from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import thinwire.integrations.accelerate
from examples import tiny
from thinwire.integrations import Metrics


def train(options: tiny.Options, log_with: Any = None) -> dict[str, Any]:
    """Train to `options.steps`, and return what it has led to on this rank."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=options.accumulate,
        mixed_precision="bf16" if options.bf16 else "no",
        log_with=log_with,
    )
    accelerator.init_trackers("tiny")
    model: Any = tiny.model()
    if options.compiled:
        model = torch.compile(model, backend="eager")
    data = DataLoader(tiny.Rows(), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

    wire = thinwire.integrations.accelerate.attach(
        accelerator, model, tiny.program(options), optimizer=optimizer
    )
    metrics = Metrics(wire)

    if options.resume:
        accelerator.load_state(str(options.folder))
    for rows in accelerator.skip_first_batches(data, wire.step * options.accumulate):
        with accelerator.accumulate(model):
            loss = tiny.loss_of(model(rows), rows)
            accelerator.backward(loss)
            if options.clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), options.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        accelerator.log({"loss": loss.item(), **metrics()}, step=wire.step)
        if wire.step == options.save_at:
            accelerator.save_state(str(options.folder))
        if wire.step == options.steps:
            break
    wire.finalize()
    accelerator.end_training()
    return tiny.result(wire, accelerator.unwrap_model(model, keep_fp32_wrapper=False))


if __name__ == "__main__":
    tiny.show(train(tiny.parsed(__doc__)))
