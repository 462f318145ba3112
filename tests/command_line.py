"""What the fixture `run` of the end-to-end tests is: a call of the command line."""

from collections.abc import Callable

Run = Callable[..., tuple[int, str, str]]
"""Arguments, and variables of the environment by name -> exit code, standard output, standard error in one line."""
