"""`headrace bench`: speed cold and speed warm, apart. `add_arguments` and `run` are the command."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
