"""The entry point of `python -m repopages`, the same as the command `repopages`."""

from repopages.cli import main

if __name__ == "__main__":
    main()
