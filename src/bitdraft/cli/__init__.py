"""The command line: a verb for each thing that bitdraft does, and no logic of its own.

Figures go to standard output, progress and warnings to standard error. Exit codes: 0 done, 1 `doctor` found that the
compiled kernels do not run, 2 something given cannot be used, 130 interrupted (what was measured is kept; `--resume`
goes on).
"""

import sys

from rich.markup import escape

from ..errors import BitdraftError
from . import generate, load, machine, measure, models, serve
from .app import app
from .terminal import err

__all__ = ["app", "generate", "load", "machine", "main", "measure", "models", "serve"]


def main() -> None:
    """Run the command line; a user's mistake is one message and exit code 2, never a traceback."""
    try:
        app()
    except BitdraftError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
