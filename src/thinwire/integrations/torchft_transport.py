"""The addresses of a torchft replica, and the transport of states to newcomers.

Safety: torchft's own transport unpickles a peer's bytes, and listens on all interfaces. This one loads
tensors and plain values only, and listens on one address.
"""

import copy
import hmac
import http.client
import ipaddress
import logging
import secrets
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torchft.checkpointing import CheckpointTransport
from torchft.checkpointing._serialization import _streaming_load, _streaming_save

from thinwire.checkpoint.validate import check_count
from thinwire.errors import OptionError, StateError, WireError

KEY = "thinwire"
"""The key of thinwire's state in that of a manager."""

logger = logging.getLogger("thinwire")

_BACKLOG = 128
_CHUNK = 1 << 20


def reachable_host(host: str | None, lighthouse: str) -> str:
    """Return the name or address by which other replicas reach this host.

    Args:
        host: The user's choice. None: the address from which this host reaches the lighthouse.
        lighthouse: The lighthouse's address.

    Raises:
        OptionError: The lighthouse's address is not valid, or other hosts cannot reach `host`.
        WireError: The lighthouse's name does not resolve, or no network leads to it.
    """
    own, other = _route(lighthouse)
    if host is None:
        return own
    with listening(host) as probe:
        found = probe.getsockname()[0]
    address = ipaddress.ip_address(found.partition("%")[0])
    # A lighthouse at an address of this host may serve a job on this host alone.
    if address.is_unspecified or (address.is_loopback and own != other):
        raise OptionError(
            f"host={host!r} is {found} on this host, which other hosts cannot reach: pass its address in"
            f" their network, or leave host out, which takes {own}, the address that reaches the lighthouse"
        )
    return host


def _route(lighthouse: str) -> tuple[str, str]:
    """Return this host's address on the way to the lighthouse, and the lighthouse's."""
    try:
        url = urlsplit(lighthouse)
        name, port = url.hostname, url.port
    except ValueError:
        name = port = None
    if not name or not port:
        raise OptionError(
            f"lighthouse={lighthouse!r} is not an address: pass one such as 'http://host:29510'"
        )
    try:
        family, *_, address = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0]), str(probe.getpeername()[0])
    except OSError as error:
        raise WireError(
            f"the lighthouse at {lighthouse} cannot be reached ({error}): check its address and the network"
        ) from error


def listening(host: str) -> socket.socket:
    """Return a socket that listens at a free port of `host` only.

    Raises:
        OptionError: `host` is not an address of this host.
    """
    try:
        # IPv4 first: it works on hosts that have a name in both, and no IPv6.
        family, *_, address = min(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM))
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OptionError(
            f"host={host!r} is not an address of this host ({error}): pass the one by which other replicas"
            " reach it, or leave host out, which takes the address that reaches the lighthouse"
        ) from error


def store_at(host: str) -> dist.TCPStore:
    """Return a store that listens on `host` only. torch's listen on all interfaces."""
    server = listening(host)
    port = server.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def in_url(host: str) -> str:
    """Return a host as a part of a URL, in which IPv6 addresses have brackets."""
    return f"[{host}]" if ":" in host else host


class StateTransport(CheckpointTransport[dict[str, Any]]):
    """A server of this replica's state, and a client that loads a peer's safely.

    torchft's manager asks for a state with `recv_checkpoint`, which names the peer by the peer's `metadata`.

    Args:
        host: The address of this host to listen on.
        limit: The time after which a silent connection fails.
    """

    def __init__(self, host: str, limit: timedelta) -> None:
        self.limit = limit.total_seconds()
        self._staged: tuple[int, Mapping[str, Any]] | None = None
        self._changed = threading.Condition()
        # Only replicas that ask the manager learn it. A process that finds the port receives nothing.
        self._secret = f"/{secrets.token_urlsafe(16)}"
        self._server = _Server(listening(host), self)
        port = self._server.socket.getsockname()[1]
        self._address = f"http://{in_url(host)}:{port}{self._secret}/"
        threading.Thread(target=self._server.serve_forever, name="thinwire_states", daemon=True).start()

    def metadata(self) -> str:
        """Return the address from which a replica reads this one's state."""
        return self._address

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        """Offer a state to the replicas that ask for this step."""
        # They may still read it while training continues. thinwire's own part is a copy already, and the rest
        # is copied here.
        user = state_dict["user"]
        copies = {key: value if key == KEY else copy.deepcopy(value) for key, value in user.items()}
        with self._changed:
            self._staged = step, {**state_dict, "user": copies}
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Stop offering a state. Transfers in progress continue."""
        with self._changed:
            self._staged = None

    def shutdown(self, wait: bool = True) -> None:
        """Stop the server."""
        stopping = threading.Thread(target=self._server.stop, daemon=True)
        stopping.start()
        if wait:
            stopping.join()

    def state_at(self, path: str) -> Mapping[str, Any] | None:
        """Return the state that a path asks for, when it is offered, or None."""
        prefix, _, step = path.rpartition("/")
        if not hmac.compare_digest(prefix.encode(), self._secret.encode()):
            return None
        with self._changed:  # a newcomer may ask before this replica has prepared its state
            self._changed.wait_for(lambda: self._staged and str(self._staged[0]) == step, self.limit)
            return self._staged[1] if self._staged and str(self._staged[0]) == step else None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """Return a peer's state.

        Raises:
            WireError: The peer did not send all of it.
            StateError: It is not a state of thinwire, or has more than tensors and plain values.
        """
        url = urlsplit(metadata)
        if url.scheme != "http" or not url.hostname:
            raise StateError(f"a peer's state is at {metadata!r}, which is not an HTTP address")
        # Not urllib's opener, which would follow redirections, and proxies of the environment.
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=timeout.total_seconds())
        try:
            connection.request("GET", f"{url.path}{step}")
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise WireError(f"the peer at {url.netloc} does not offer its state of step {step} any more")
            return _loaded(response)
        except (OSError, http.client.HTTPException) as error:
            raise WireError(f"the state of the peer at {url.netloc} did not arrive: {error!r}") from error
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    """An HTTP server on a socket that listens already."""

    def __init__(self, server: socket.socket, transport: StateTransport) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.transport = server, transport

    def stop(self) -> None:
        """Serve no more requests, and close the socket."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed request."""
        logger.info("a state was not sent to %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """A request for a state."""

    server: _Server

    def setup(self) -> None:
        """Set the time limit of the connection."""
        self.request.settimeout(self.server.transport.limit)
        super().setup()

    def do_GET(self) -> None:
        """Send the state of the step in the path."""
        state = self.server.transport.state_at(self.path)
        if state is None:
            self.send_error(http.HTTPStatus.NOT_FOUND)
            return
        self.send_response(http.HTTPStatus.OK)
        self.end_headers()
        _streaming_save(state, self.wfile)

    def log_message(self, *args: Any) -> None:
        """Log a request, but not to stderr."""
        logger.debug(*args)


class _Whole:
    """A stream that raises ConnectionError where it ends too early.

    Otherwise a cut connection would look like a damaged state, which is not requested again.
    """

    def __init__(self, stream: http.client.HTTPResponse) -> None:
        self._stream = stream

    def read(self, count: int) -> bytearray:
        """Return this number of bytes."""
        found = bytearray(count)
        view, done = memoryview(found), 0
        while done < count:
            arrived = self._stream.readinto(view[done : done + _CHUNK])
            if not arrived:
                raise ConnectionError("the connection was closed")
            done += arrived
        return found

    def readline(self) -> bytes:
        """Return a line."""
        line = self._stream.readline(_CHUNK)
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection was closed")
        return line


def _loaded(stream: http.client.HTTPResponse) -> dict[str, Any]:
    """Return the state from a stream, without running code that it may contain."""
    try:
        state = _streaming_load(_Whole(stream), map_location="cpu", weights_only=True)
    except (OSError, http.client.HTTPException):
        raise
    except Exception as error:  # any: the bytes come from the peer
        raise StateError(
            f"the peer's state was not loaded, since it has more than tensors and plain values, or is damaged"
            f" ({str(error).partition('. ')[0].rstrip('.')}): functions registered with"
            " manager.register_state_dict_fn must return such values only. If a class is missing that you"
            " trust, call torch.serialization.add_safe_globals on all replicas"
        ) from error
    try:
        own, position = state["user"][KEY], state["torchft"]
        for name in ("step", "batches_committed"):
            check_count(name, position[name])
        if isinstance(own, Mapping) and isinstance(state, dict):
            return state
    except (KeyError, TypeError, AttributeError):
        pass
    raise StateError(
        "the peer's state has no part of thinwire: call thinwire.integrations.torchft.attach on all replicas"
    )
