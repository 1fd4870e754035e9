"""A wire's figures as numbers by name, for a framework's own logger."""

from thinwire.engine.meter import Stats
from thinwire.wire import Wire


class Metrics:
    """The figures of a wire since the previous call, on this rank.

        thinwire/bytes_per_step     bytes that this rank sent, exchanges of models included
        thinwire/exposed_seconds    time per step that backward waited for the network
        thinwire/compression        bytes of plain DDP over those sent; absent where nothing was sent
        thinwire/overflows          steps that were skipped since attach, because a gradient was non-finite

    Args:
        wire: The wire that `attach` returned.

    Example::

        metrics = thinwire.integrations.Metrics(wire)
        ...
        accelerator.log({"loss": loss.item(), **metrics()}, step=step)
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._before = wire.stats()

    def __call__(self) -> dict[str, float]:
        """Return the figures of the steps since the previous call; an empty dict if there were none."""
        before, now = self._before, self._wire.stats()
        if now.steps == before.steps:
            return {}
        self._before = now
        return _figures(before, now)


def _figures(before: Stats, now: Stats) -> dict[str, float]:
    steps, sent = now.steps - before.steps, now.bytes_sent - before.bytes_sent
    figures = {
        "thinwire/bytes_per_step": sent / steps,
        "thinwire/exposed_seconds": (now.exposed_seconds - before.exposed_seconds) / steps,
        "thinwire/overflows": float(now.overflows),
    }
    if sent:
        figures["thinwire/compression"] = (now.ddp_bytes - before.ddp_bytes) / sent
    return figures
