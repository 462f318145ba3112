"""The command line's root, which verbs register with."""

from typing import Annotated

import typer

from .. import __version__
from .terminal import out

app = typer.Typer(
    help="Find, tune and serve the fastest lossless low-bit draft for a language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench = typer.Typer(help="Time the parts that everything else is made of.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        out.print(__version__, highlight=False)
        raise typer.Exit


@app.callback(epilog="Example: bitdraft --version")
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Find, tune and serve the fastest lossless low-bit draft for a language model."""
