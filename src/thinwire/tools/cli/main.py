"""The command `thinwire` with its subcommands, which `thinwire_command` finds in this folder."""

from thinwire_command import cli as cli
