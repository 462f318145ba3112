"""The command line: a verb for each thing that bitdraft does, and no logic of its own.

Figures go to standard output, progress and warnings to standard error. Exit codes: 0 done, 1 `doctor` found that the
compiled kernels do not run, 2 something given cannot be used, 130 interrupted (what was measured is kept; `--resume`
goes on).
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import __version__
from .errors import BitdraftError, UsageError
from .types import SamplingParams

if TYPE_CHECKING:
    from .serve.generate import GenerateConfig

app = typer.Typer(
    help="Find, tune and serve the fastest lossless low-bit draft for a language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench = typer.Typer(help="Time the parts that everything else is made of.", no_args_is_help=True)
app.add_typer(bench, name="bench")
out, err = Console(), Console(stderr=True)

Target = Annotated[
    str, typer.Option("--target", help="Model whose answers count: a name, a folder, a .gguf or a hub id.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output instead of text.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 1 keeps every token.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps every token.")]
MinP = Annotated[float, typer.Option(help="Drop tokens less likely than this share of the likeliest; 0 drops none.")]
Seed = Annotated[int, typer.Option(help="Names the random streams: the same seed gives the same output.")]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Neither read nor keep repacked weights on disk, beside the model.")
]
MinConfidence = Annotated[
    float, typer.Option(min=0, max=1, help="End a block after a token that the draft finds less likely than this.")
]
MaxTokens = Annotated[int, typer.Option(help="Output tokens at most.")]


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


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Turn Ctrl-C into a message and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"interrupted. {message}")
        raise typer.Exit(130) from None


@contextmanager
def progress_bars() -> Iterator[Callable[[int, int | None, str], None]]:
    """Bars on standard error, one for each label that is reported to the function that this yields."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err) as bars:
        tasks: dict[str, Any] = {}

        def report(done: int, total: int | None, label: str) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=done, total=total)

        yield report


@app.command(epilog="Example: bitdraft pull smollm2-135m")
def pull(
    names: Annotated[list[str] | None, typer.Argument(help="Names from the registry; none lists them.")] = None,
    as_json: Json = False,
) -> None:
    """Fetch models by name, check their SHA-256, and say where they lie."""
    from .models import hub
    from .models.registry import KNOWN_MODELS

    if not names:
        rows = [(m.name, f"{m.size / 1e6:.0f} MB", "; else ".join(map(str, m.sources))) for m in KNOWN_MODELS.values()]
        _print_table("models", ("name", "size", "from"), rows, as_json)
        return
    with interruptible("Nothing half-fetched is kept."), progress_bars() as bars:
        paths = [(name, str(hub.resolve(name, progress=bars))) for name in names]
    _print_table("models", ("name", "path"), paths, as_json)


@app.command(epilog="Example: bitdraft formats")
def formats(as_json: Json = False) -> None:
    """List the number formats, with their bits per weight and what inputs are rounded to."""
    from .formats import FORMATS, get_format

    rows = []
    for name in FORMATS:
        f = get_format(name)
        bits = "as stored" if f.bits_per_weight is None else f"{f.bits_per_weight:.2f}"
        group = "as stored" if f.kind == "stored" else str(f.group_size or "channel")
        rows.append((name, bits, f.activation, group, f.head))
    _print_table("formats", ("format", "bits a weight", "activations", "group", "head"), rows, as_json)


@app.command(
    epilog="Example: bitdraft measure --target qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b "
    "--formats bf16,fp8,w8a8,w4a16-awq --workload code,chat --prompts 50 --k 1..8 -o report"
)
def measure(
    target: Target,
    draft: Annotated[str, typer.Option("--draft", help="Model that drafts: a name, a folder, a .gguf or a hub id.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the report and its trace.")],
    formats: Annotated[str, typer.Option(help="Draft formats to compare, with commas; see `bitdraft formats`.")] = (
        "bf16,fp8,w8a8,w4a16-awq,w4a16"
    ),
    target_format: Annotated[str, typer.Option(help="Format of the target.")] = "bf16",
    workload: Annotated[
        str,
        typer.Option(
            help="Workloads, with commas: code, chat, chat-en, chat-zh, summarise, edit, maths, humaneval, or files."
        ),
    ] = "code,chat",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each workload.")] = 20,
    max_tokens: MaxTokens = 64,
    k: Annotated[str, typer.Option("--k", help="Draft lengths to compare: 1..8 or 1,2,4.")] = "1..8",
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    batch: Annotated[int, typer.Option(min=1, help="Texts generated side by side before anything is timed.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each prompt is run to confirm a prediction.")] = 2,
    confirm: Annotated[int, typer.Option(min=0, help="Best combinations of each workload to run end to end.")] = 2,
    confirm_prompts: Annotated[int, typer.Option(min=1, help="Prompts of each workload to run end to end.")] = 4,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    no_cache: NoCache = False,
    as_json: Json = False,
) -> None:
    """Answer which draft precision and length to use for a target, here and for this traffic, or none at all."""
    from .measure.config import MeasureConfig
    from .measure.run import run

    config = MeasureConfig(
        target=target,
        draft=draft,
        target_format=target_format,
        formats=_listed(formats),
        workloads=_listed(workload),
        prompts=prompts,
        draft_lengths=_lengths(k),
        sampling=SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
        ),
        batch=batch,
        rounds=rounds,
        confirm=confirm,
        confirm_prompts=confirm_prompts,
    )
    with interruptible("What was measured is kept; --resume goes on."), progress_bars() as bars:
        run(config, output, resume=resume, use_cache=not no_cache, command=_command_line(), progress=bars)
    _render(output, as_json)


@app.command(epilog="Example: bitdraft report demo")
def report(
    folder: Annotated[Path, typer.Argument(help="Folder that `bitdraft measure` wrote.")],
    as_json: Json = False,
) -> None:
    """Make the reports of a measured run again from its trace, without any model."""
    _render(folder, as_json)


@app.command(epilog="Example: bitdraft generate --target smollm2-135m --draft ngram 'List the days of the week twice.'")
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads standard input.")],
    target: Target,
    draft: Annotated[
        str | None, typer.Option("--draft", help="Model that drafts, or ngram; none decodes plainly.")
    ] = None,
    target_format: Annotated[str, typer.Option(help="Format of the target.")] = "bf16",
    draft_format: Annotated[str, typer.Option(help="Format of the draft.")] = "bf16",
    k: Annotated[int, typer.Option("--k", min=1, help="Tokens drafted a step, at most.")] = 4,
    confidence: MinConfidence = 0.0,
    plan: Annotated[
        Path | None, typer.Option(help="plan.json of `bitdraft measure`: gives draft, formats and --k.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the prompt as it stands, without the chat template.")
    ] = False,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="End the output before this string; may be repeated.")] = None,
    seed: Seed = 0,
    context: Annotated[int, typer.Option(min=2, help="Tokens of prompt and output together, at most.")] = 4096,
    no_cache: NoCache = False,
    as_json: Json = False,
) -> None:
    """Generate text, showing which tokens were drafted, corrected or free."""
    from .measure.workload import calibration_texts
    from .serve.generate import GenerateConfig, collect, coloured, load, print_summary, summary

    config = GenerateConfig(target, draft, target_format, draft_format, k, confidence, context)
    sampling = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=tuple(stop or ()),
        seed=seed,
        max_tokens=max_tokens,
    )
    with interruptible("Nothing is kept."):
        with progress_bars() as bars:
            generator = load(_planned(config, plan), calibration_texts(), bars, not no_cache)
        ids = generator.prompt_ids(sys.stdin.read() if prompt == "-" else prompt, raw=raw)
        started = perf_counter()
        emissions = generator.run(ids, sampling)
        text, tokens = collect(emissions if as_json else coloured(generator.tokenizer, emissions, out))
    figures = summary(generator.records, tokens, perf_counter() - started)
    if as_json:
        print(json.dumps({"text": text, "output": tokens, **figures}, ensure_ascii=False))
    else:
        print_summary(figures, out)


@app.command(epilog="Example: bitdraft doctor")
def doctor(as_json: Json = False) -> None:
    """Say what this machine offers, what of it is in use, and what to do about the rest; exit code 1 if it is slow."""
    from .measure.doctor import examine, render_checkup

    found = examine(os.environ)
    if as_json:
        print(json.dumps(found.as_json(), ensure_ascii=False))
    else:
        render_checkup(found, out)
    if not found.well:
        raise typer.Exit(1)


@bench.command("kernels", epilog="Example: bitdraft bench kernels")
def bench_kernels(
    seconds: Annotated[float, typer.Option(min=0, help="Time to spend on timing; preparing takes some more.")] = 20.0,
    as_json: Json = False,
) -> None:
    """Time each fused operation, beside the most that this machine reads and computes in a second."""
    from .measure import kernels

    with interruptible("Nothing is kept."), progress_bars() as bars:
        result = kernels.bench_kernels(perf_counter, seconds, bars)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        kernels.render_kernels(result, out)


@bench.command("step", epilog="Example: bitdraft bench step smollm2-135m --format w4a8")
def bench_step(
    model: Annotated[str, typer.Argument(help="Model to time: a name, a folder, a .gguf or a hub id.")],
    format: Annotated[str, typer.Option("--format", help="Format to time it in.")] = "bf16",
    seconds: Annotated[float, typer.Option(min=0, help="Time to spend on timing, at most.")] = 60.0,
    no_cache: NoCache = False,
    as_json: Json = False,
) -> None:
    """Time a model's steps by rows, context and sequences: what verifying and drafting cost here."""
    from .measure import steps
    from .measure.workload import calibration_texts

    with interruptible("Nothing is kept."), progress_bars() as bars:
        result = steps.bench_step(model, format, calibration_texts(), perf_counter, seconds, bars, not no_cache)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        steps.render_steps(result, out)


def _planned(config: "GenerateConfig", path: Path | None) -> "GenerateConfig":
    """What a plan decided takes the place of the options it covers."""
    if path is None:
        return config
    from .measure.plan import Plan

    plan = Plan.load(path)
    if plan.draft_format is None or plan.default_k == 0:
        return replace(config, draft=None, target_format=plan.target_format)
    return replace(
        config,
        draft=plan.draft,
        target_format=plan.target_format,
        draft_format=plan.draft_format,
        draft_length=plan.default_k,
    )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _lengths(text: str) -> tuple[int, ...]:
    """Draft lengths: '1..8', '3' or '1,2,4'."""
    try:
        if ".." in text:
            low, high = (int(part) for part in text.split(".."))
            lengths = tuple(range(low, high + 1))
        else:
            lengths = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        lengths = ()
    if not lengths or lengths[0] < 1 or lengths[-1] > 64:
        raise UsageError(f"--k is {text!r}. Expected draft lengths from 1 to 64, such as 1..8 or 1,2,4.")
    return lengths


def _command_line() -> str:
    return shlex.join(["bitdraft", *sys.argv[1:]])


def _render(folder: Path, as_json: bool) -> None:
    """Write the reports beside the trace and print the matrix, or the figures as JSON."""
    from .measure.report import publish, render_terminal, to_json

    summary, files = publish(folder)
    if as_json:
        print(json.dumps(to_json(summary), ensure_ascii=False))
        return
    render_terminal(summary, out)
    out.print(f"\nwritten: {', '.join(map(str, files))}", highlight=False, soft_wrap=True)


def _print_table(what: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({what: [dict(zip(headings, row, strict=True)) for row in rows]}, ensure_ascii=False))
        return
    table = Table(*headings, box=None, header_style="bold")
    for row in rows:
        table.add_row(*row)
    out.print(table)


def main() -> None:
    """Run the command line; a user's mistake is one message and exit code 2, never a traceback."""
    try:
        app()
    except BitdraftError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
