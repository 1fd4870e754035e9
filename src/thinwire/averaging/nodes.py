"""Which ranks share a node."""

import os
import socket
from datetime import timedelta

from thinwire.wire.agree import Meeting


def ranks_on_this_node(meeting: Meeting, limit: timedelta) -> tuple[int, ...]:
    """The ranks on this one's node; every rank must ask at the same point.

    A node is what torchrun takes for one, by GROUP_RANK, or else a host's name. Nodes may differ in size.
    """
    own = os.environ.get("GROUP_RANK") or socket.gethostname()
    nodes = meeting.gather("nodes", own, limit)
    return tuple(rank for rank, node in enumerate(nodes) if node == own)
