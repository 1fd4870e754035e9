"""Step records of training, sent to the console, JSONL files, TensorBoard or Weights & Biases.

Example::

    wire = thinwire.attach(ddp, thinwire.BF16())
    with telemetry.watch(ddp, wire, telemetry.Console(every=10), telemetry.JsonLines("steps.jsonl")):
        ...  # train as before
"""

from thinwire.telemetry.sinks import Console, JsonLines, Sink, TensorBoard, WandB
from thinwire.telemetry.watch import Watch, as_audit_row, as_row, watch

__all__ = ["Console", "JsonLines", "Sink", "TensorBoard", "WandB", "Watch", "as_audit_row", "as_row", "watch"]


def __dir__() -> list[str]:
    return sorted(__all__)
