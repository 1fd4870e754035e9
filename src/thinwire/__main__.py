"""`python -m thinwire` is the same as `thinwire`."""

import signal
import sys


def main() -> None:
    """Start the command line, or say what it needs."""
    try:
        from thinwire.cli.main import cli
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(f"thinwire's command line needs {error.name}: pip install 'thinwire[cli]'")
    for number in (signal.SIGTERM, signal.SIGHUP):  # end in order, as on Ctrl-C; nohup's choice stands
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    cli(prog_name="thinwire")


if __name__ == "__main__":
    main()
