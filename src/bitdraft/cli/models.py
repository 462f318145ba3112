"""Verbs about models and formats: pull, formats, quantize, export."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from .app import app
from .budget import choose_formats, print_allocation
from .options import Json, Seed
from .terminal import err, interruptible, out, print_table, progress_bars

if TYPE_CHECKING:
    from ..quantize.allocate import Allocation
    from ..quantize.command import QuantizeReport


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
    from ..formats import FORMATS, METHODS, OUTLIERS, get_format

    rows = []
    for name in FORMATS:
        f = get_format(name)
        bits = "as stored" if f.bits_per_weight is None else f"{f.bits_per_weight:.2f}"
        group = "as stored" if f.kind == "stored" else str(f.group_size or "channel")
        rows.append((name, bits, f.weights, f.activation, group, f.head))
    print_table("formats", ("format", "bits a weight", "weights", "activations", "group", "head"), rows, as_json)
    if not as_json:
        out.print(
            "\nOptions after a format's name, where they fit: -g64, -g128, -asym, -ag32, -had, -h2 to -h8; then "
            f"-out{min(OUTLIERS)} to -out{max(OUTLIERS)} (inputs of a layer that are kept in 16 bits); then a method: "
            f"-rtn, -{', -'.join(name for name in METHODS if name != 'nearest')}.",
            highlight=False,
        )


@app.command(epilog="Example: bitdraft export smollm2-135m --type q8_0 -o smollm2-135m.gguf")
def export(
    model: Annotated[str, typer.Argument(help="Model to write: a name, a folder, a .gguf or a hub id.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write; it must not exist.")],
    kind: Annotated[str, typer.Option("--type", help="Type of the layers: q4_0, q4_1, q8_0, bf16 or f16.")] = "q8_0",
    as_json: Json = False,
) -> None:
    """Write a model, quantised or not, as a GGUF file for llama.cpp, and say what that did to its weights."""
    from ..models import hub
    from ..models.checkpoint import open_checkpoint
    from ..models.gguf_export import TYPES, export_gguf

    if kind not in TYPES:
        raise UsageError(f"--type is {kind!r}. Expected one of {', '.join(TYPES)}.")
    with interruptible("Nothing half-written is kept."), progress_bars() as bars:
        source = open_checkpoint(hub.resolve(model, progress=bars))
        result = export_gguf(source, output, kind, Path(model).stem, bars)
    errors = list(result.errors.values())
    mean = sum(errors) / len(errors) if errors else 0.0
    worst = max(result.errors, key=lambda name: result.errors[name]) if errors else None
    if as_json:
        found = {"file": str(output), "bytes": output.stat().st_size, "exact": len(result.exact)}
        print(
            json.dumps(
                found | {"rounded": len(errors), "mean_error": mean, "errors": result.errors}, ensure_ascii=False
            )
        )
        return
    out.print(f"{output}: {output.stat().st_size / 1e6:.0f} MB", highlight=False, soft_wrap=True)
    out.print(f"{len(result.exact)} matrices stand for the very same values as in {source.stored_as}", highlight=False)
    if worst:
        out.print(
            f"{len(errors)} were rounded anew: relative error {mean:.2%} in the mean, "
            f"{result.errors[worst]:.2%} at most ({worst})",
            highlight=False,
        )


@app.command(epilog="Example: bitdraft quantize smollm2-135m --format w4a16-asym --method awq -o smollm2-w4")
def quantize(
    model: Annotated[str, typer.Argument(help="Model to quantise: a name, a folder, a .gguf or a hub id.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write; must not be there.")],
    format: Annotated[str, typer.Option("--format", help="Format, see `bitdraft formats`.")] = "w4a16-asym",
    method: Annotated[
        str | None,
        typer.Option(help="How to round: nearest, clip, gptq, awq, awq-gptq, smooth or smooth-gptq."),
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(help="Texts for methods that need them: workloads or files, with commas.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Texts that are taken of each; all without it.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are read of the texts, at most.")] = 4096,
    workload: Annotated[
        str | None, typer.Option(help="What the model is for: warns if the texts are in another language.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Choose a format for every tensor within it: 4.25bits, 350MB or 12ms.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="With --budget: the model that this one drafts for.")] = None,
    report: Annotated[Path | None, typer.Option(help="With --budget: a measurement of the two, for --target.")] = None,
    kv: Annotated[
        str | None,
        typer.Option("--kv", help="Keys and values that the folder asks for: fp8, with scales from the texts."),
    ] = None,
    seed: Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    as_json: Json = False,
) -> None:
    """Bring a model into a format and write it as a folder that other programs load, too."""
    from ..formats import Recipe
    from ..measure.texts import calibration_ids
    from ..measure.workload import calibration_texts, conversations, plain_text
    from ..quantize.calibrate import count_tokens
    from ..quantize.command import quantize_folder
    from ..quantize.load import open_source
    from ..quantize.mixed import save_allocation
    from ..quantize.scripts import language_warning

    if not budget and (target or report):
        raise UsageError("--target or --report without --budget, which they are for. Expected --budget, or neither.")
    recipe = Recipe.parse(f"{format}-{'rtn' if method == 'nearest' else method}" if method else format)
    said = conversations(calibration, samples) if calibration else calibration_texts()[:samples]
    if recipe.calibrated and workload:
        texts, expected = ([plain_text(body) for body in bodies] for bodies in (said, conversations(workload, None)))
        if warning := language_warning(texts, expected):
            err.print(f"[bold yellow]warning:[/] {warning}", highlight=False, soft_wrap=True)
    with interruptible("Finished layers are kept; --resume goes on."), progress_bars() as bars:
        source, chosen = open_source(model, bars), None
        ids = calibration_ids(said, source.tokenizer)
        if recipe.calibrated:
            count_tokens(ids, tokens)  # before minutes are spent on a budget
        if budget:
            chosen, recipe = choose_formats(source, budget, output, target, report, workload, recipe, seed, bars)
        made = quantize_folder(
            source, recipe, output, seed=seed, calibration=ids, tokens=tokens, kv=kv, resume=resume, progress=bars
        )
        if chosen:
            save_allocation(chosen, output / "allocation.json")
    _print_quantized(made, chosen, as_json)


def _print_outliers(made: "QuantizeReport") -> None:
    rows = []
    for name, kept in made.outliers.items():
        columns = ", ".join(map(str, kept.columns[:6])) + (", ..." if len(kept.columns) > 6 else "")
        rows.append((name.removeprefix("model.layers."), columns, f"{kept.removed:.0%}", f"{kept.nbytes / 1e3:.0f}"))
    headings = ("linear layer", f"{len(kept.columns)} inputs in 16 bits", "of its error removed", "kB")
    print_table("outliers", headings, rows, False)


def _print_quantized(made: "QuantizeReport", chosen: "Allocation | None", as_json: bool) -> None:
    if as_json:
        print(json.dumps(made.as_json(), ensure_ascii=False))
        return
    if chosen:
        print_allocation(chosen)
    errors = [(name, f"{error:.4f}") for name, error in made.errors.items()]
    print_table("errors", ("linear layer", f"relative error of its {made.measured}"), errors, as_json)
    if made.outliers:
        _print_outliers(made)
    out.print(
        f"\n{made.recipe}, method {made.method}: {made.bits_per_weight:.2f} bits a weight in the layers, "
        f"{made.nbytes / 1e6:.1f} MB in all\nwritten: {made.folder}",
        highlight=False,
        soft_wrap=True,
    )
