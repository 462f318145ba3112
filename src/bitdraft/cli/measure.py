"""Verbs that answer which draft to use: measure, report."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from ..types import SamplingParams
from .app import app
from .options import KV, Json, MaxTokens, MinP, NoCache, Seed, Target, TargetFormat, Temperature, TopK, TopP
from .terminal import interruptible, out, progress_bars

if TYPE_CHECKING:
    from ..measure.config import MeasureConfig


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
    target_format: TargetFormat = "auto",
    kv: KV = None,
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
    attribute: Annotated[
        str | None, typer.Option(help="A draft format whose loss of acceptance is to be explained, part by part.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    no_cache: NoCache = False,
    as_json: Json = False,
) -> None:
    """Answer which draft precision and length to use for a target, here and for this traffic, or none at all."""
    from ..measure.config import MeasureConfig

    config = MeasureConfig(
        target=target,
        draft=draft,
        target_format=target_format,
        formats=_listed(formats),
        workloads=_listed(workload),
        prompts=prompts,
        draft_lengths=draft_lengths(k),
        sampling=SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
        ),
        batch=batch,
        rounds=rounds,
        confirm=confirm,
        confirm_prompts=confirm_prompts,
        kv=kv,
    )
    _measure(config, output, attribute, resume, not no_cache)
    _render(output, as_json)


@app.command(epilog="Example: bitdraft report demo")
def report(
    folder: Annotated[Path, typer.Argument(help="Folder that `bitdraft measure` wrote.")],
    as_json: Json = False,
) -> None:
    """Make the reports of a measured run again from its trace, without any model."""
    _render(folder, as_json)


def _measure(config: "MeasureConfig", output: Path, attribute: str | None, resume: bool, use_cache: bool) -> None:
    import numpy as np

    from ..formats import Recipe
    from ..measure.run import run
    from ..measure.swaps import attribute as explain

    if attribute:
        Recipe.parse(attribute)  # refuses before the long part
    with interruptible("What was measured is kept; --resume goes on."), progress_bars() as bars:
        run(config, output, resume=resume, use_cache=use_cache, command=_command_line(), progress=bars)
        if attribute:
            rng = np.random.default_rng(config.sampling.seed)
            explain(output, attribute, rng=rng, workloads=config.workloads, progress=bars)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def draft_lengths(text: str) -> tuple[int, ...]:
    """Read draft lengths: '1..8', '3' or '1,2,4'.

    Raises:
        UsageError: it is none of these, or a length is not from 1 to 64.
    """
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
    from ..measure.report import publish, render_terminal, to_json

    summary, files = publish(folder)
    if as_json:
        print(json.dumps(to_json(summary), ensure_ascii=False))
        return
    render_terminal(summary, out)
    out.print(f"\nwritten: {', '.join(map(str, files))}", highlight=False, soft_wrap=True)
