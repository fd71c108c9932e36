"""`headrace plan`: what fits where, and how fast it would be. `add_arguments` and `run` are it."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
