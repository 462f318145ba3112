"""The verb that writes text: generate."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from ..types import SamplingParams
from .app import app
from .options import (
    KV,
    Json,
    MaxTokens,
    MinConfidence,
    MinP,
    NoCache,
    Seed,
    Target,
    TargetFormat,
    Temperature,
    TopK,
    TopP,
)
from .terminal import interruptible, out, progress_bars

if TYPE_CHECKING:
    from ..serve.generate import GenerateConfig


@app.command(epilog="Example: bitdraft generate --target smollm2-135m --draft ngram 'List the days of the week twice.'")
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads standard input.")],
    target: Target,
    draft: Annotated[
        str | None, typer.Option("--draft", help="Model that drafts, or ngram; none decodes plainly.")
    ] = None,
    target_format: TargetFormat = "auto",
    draft_format: Annotated[str, typer.Option(help="Format of the draft, likewise.")] = "auto",
    kv: KV = None,
    k: Annotated[int, typer.Option("--k", min=1, max=64, help="Tokens drafted a step, at most.")] = 4,
    confidence: MinConfidence = 0.0,
    plan: Annotated[
        Path | None, typer.Option(help="plan.json of `bitdraft measure`: gives draft, formats, --kv and --k.")
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
    from ..measure.workload import calibration_texts
    from ..serve.generate import GenerateConfig, collect, coloured, load, print_summary, summary

    config = GenerateConfig(target, draft, target_format, draft_format, k, confidence, context, kv)
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


def _planned(config: "GenerateConfig", path: Path | None) -> "GenerateConfig":
    """What a plan decided takes the place of the options it covers."""
    if path is None:
        return config
    from ..measure.plan import Plan

    plan = Plan.load(path)
    if plan.draft_format is None or plan.default_k == 0:
        return replace(config, draft=None, target_format=plan.target_format, kv=plan.kv)
    return replace(
        config,
        draft=plan.draft,
        target_format=plan.target_format,
        draft_format=plan.draft_format,
        draft_length=plan.default_k,
        kv=plan.kv,
    )
