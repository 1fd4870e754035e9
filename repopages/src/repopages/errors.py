"""The errors of repopages, which the command prints as one line.

RepopagesError        a build that failed                         exit code 1
├── OptionError       a value that an option cannot take          exit code 2
└── UnavailableError  a package that is missing on this machine   exit code 3
"""

import click


class RepopagesError(click.ClickException):
    """The base of every exception raised by repopages."""


class OptionError(RepopagesError):
    """A value that an option cannot take."""

    exit_code = 2


class UnavailableError(RepopagesError):
    """A package that is not installed here."""

    exit_code = 3
