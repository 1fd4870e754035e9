"""Registers the shadow device when it is imported, for commands that take the name of a module."""

from tests.shadow.device import load

load()
