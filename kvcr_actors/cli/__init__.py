"""The command line: `kvcr-actors`."""

from kvcr_actors.cli.app import main

__all__ = ["main"]
