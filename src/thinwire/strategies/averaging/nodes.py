"""Detection of the ranks on this rank's node."""

import os
import socket
from datetime import timedelta

from thinwire.engine.comm.rendezvous import StoreRendezvous


def ranks_on_this_node(rendezvous: StoreRendezvous, limit: timedelta) -> tuple[int, ...]:
    """Return the ranks on this rank's node. Collective.

    A node is identified by torchrun's GROUP_RANK, or else by its host name. Nodes may differ in size.
    """
    own = os.environ.get("GROUP_RANK") or socket.gethostname()
    nodes = rendezvous.gather("nodes", own, limit)
    return tuple(rank for rank, node in enumerate(nodes) if node == own)
