"""`python -m thinwire` is the same as `thinwire`."""

import sys


def main() -> None:
    """Start the command line, or say what it needs."""
    try:
        from thinwire.cli.main import cli
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(f"thinwire's command line needs {error.name}: pip install 'thinwire[cli]'")
    cli(prog_name="thinwire")


if __name__ == "__main__":
    main()
