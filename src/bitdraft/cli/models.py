"""Verbs about models and formats: pull, formats."""

from typing import Annotated

import typer

from .app import app
from .options import Json
from .terminal import interruptible, print_table, progress_bars


@app.command(epilog="Example: bitdraft pull smollm2-135m")
def pull(
    names: Annotated[list[str] | None, typer.Argument(help="Names from the registry; none lists them.")] = None,
    as_json: Json = False,
) -> None:
    """Fetch models by name, check their SHA-256, and say where they lie."""
    from ..models import hub
    from ..models.registry import KNOWN_MODELS

    if not names:
        rows = [(m.name, f"{m.size / 1e6:.0f} MB", "; else ".join(map(str, m.sources))) for m in KNOWN_MODELS.values()]
        print_table("models", ("name", "size", "from"), rows, as_json)
        return
    with interruptible("Nothing half-fetched is kept."), progress_bars() as bars:
        paths = [(name, str(hub.resolve(name, progress=bars))) for name in names]
    print_table("models", ("name", "path"), paths, as_json)


@app.command(epilog="Example: bitdraft formats")
def formats(as_json: Json = False) -> None:
    """List the number formats, with their bits per weight and what inputs are rounded to."""
    from ..formats import FORMATS, get_format

    rows = []
    for name in FORMATS:
        f = get_format(name)
        bits = "as stored" if f.bits_per_weight is None else f"{f.bits_per_weight:.2f}"
        group = "as stored" if f.kind == "stored" else str(f.group_size or "channel")
        rows.append((name, bits, f.weights, f.activation, group, f.head))
    print_table("formats", ("format", "bits a weight", "weights", "activations", "group", "head"), rows, as_json)
