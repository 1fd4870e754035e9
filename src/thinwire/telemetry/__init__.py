"""Step records of training, sent to the console, JSONL files, TensorBoard or Weights & Biases.

Example::

    wire = thinwire.attach(ddp, thinwire.BF16())
    with telemetry.watch(ddp, wire, telemetry.Console(every=10), telemetry.JsonLines("steps.jsonl")) as watch:
        ...  # train as before
        watch.log(loss=loss)  # in each step, if you want it in the log
"""

from thinwire.telemetry.sinks import Console, JsonLines, Sink, TensorBoard, WandB
from thinwire.telemetry.watch import Watch, as_audit_row, as_row, watch

__all__ = ["Console", "JsonLines", "Sink", "TensorBoard", "WandB", "Watch", "as_audit_row", "as_row", "watch"]


def __dir__() -> list[str]:
    return sorted(__all__)
