"""Step records of real training, to wherever one looks: console, JSONL, TensorBoard, Weights & Biases.

Example::

    wire = thinwire.attach(ddp, thinwire.BF16())
    with telemetry.watch(ddp, wire, telemetry.Console(every=10), telemetry.JsonLines("steps.jsonl")):
        ...  # train as before
"""

from thinwire.telemetry.sinks import Console, JsonLines, Sink, TensorBoard, WandB
from thinwire.telemetry.watch import Watch, as_audit_row, as_row, watch

__all__ = ["Console", "JsonLines", "Sink", "TensorBoard", "WandB", "Watch", "as_audit_row", "as_row", "watch"]
