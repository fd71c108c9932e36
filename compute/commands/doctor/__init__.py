"""`headrace doctor`: what of this machine helps or hinders. `add_arguments` and `run` are it."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
