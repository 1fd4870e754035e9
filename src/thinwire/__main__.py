"""The entry point of `python -m thinwire`, the same as the command `thinwire`."""

from thinwire_command import main

if __name__ == "__main__":
    main()
