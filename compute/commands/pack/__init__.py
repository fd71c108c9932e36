"""`headrace pack`: an expert pack from a checkpoint. `add_arguments` and `run` are the command."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
