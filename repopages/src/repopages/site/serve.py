"""A site on this machine, which follows the repository's files."""

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from repopages.errors import OptionError, RepopagesError
from repopages.reading.repository import Repository

_SECONDS = 1.0


class _Handler(SimpleHTTPRequestHandler):
    """Files of the site, always fresh and without a line for each request."""

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


def serve(
    path: str,
    port: int,
    build: Callable[[Path], None],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Build a site, serve it on 127.0.0.1, and build it again after a change, until Ctrl-C.

    Args:
        path: The repository.
        port: Port of the server, 0 for any free one.
        build: Builds the site in a folder.
        include: Patterns of files to include.
        exclude: Patterns of files to leave out.
        say: Prints a line.

    Raises:
        OptionError: If the port is taken.
    """
    with tempfile.TemporaryDirectory(prefix="repopages-") as folder:
        out = Path(folder)
        try:
            server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, directory=folder))
        except OSError as error:
            raise OptionError(
                f"port={port} cannot be used ({error.strerror}): pass another --port"
            ) from error
        with server, contextlib.suppress(KeyboardInterrupt):
            state = _state(path, include, exclude)
            build(out)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            say(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it)")
            try:
                while True:
                    time.sleep(_SECONDS)
                    now = _state(path, include, exclude)
                    if now != state:
                        state = now
                        _build_again(build, out, say)
            finally:
                server.shutdown()


def _build_again(build: Callable[[Path], None], out: Path, say: Callable[[str], None]) -> None:
    """Build after a change. An error is shown, and the last site stays."""
    try:
        build(out)
    except RepopagesError as error:
        say(f"Error: {error.message}")


def _state(path: str, include: Sequence[str], exclude: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the time and the size of each file."""
    try:
        repository = Repository.open(path, include, exclude)
    except OptionError:
        return {}  # the folder is gone for now
    found = {}
    for name in repository.files:
        with contextlib.suppress(OSError):
            state = os.lstat(repository.root / name)
            found[name] = (state.st_mtime_ns, state.st_size)
    return found
