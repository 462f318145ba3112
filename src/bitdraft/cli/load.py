"""Verbs about servers: bench serve."""

import asyncio
import json
import os
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from ..errors import UsageError
from .app import bench
from .options import Json
from .terminal import interruptible, out, progress_bars

if TYPE_CHECKING:
    from ..measure.load_config import LoadConfig, Server
    from ..measure.load_run import Results

KEY = "BITDRAFT_API_KEY"


@bench.command("serve", epilog="Example: bitdraft bench serve --lengths 128/64 --concurrency 1,4 -o load")
def bench_serve(
    url: Annotated[str, typer.Argument(help="The server's root, without /v1.")] = "http://127.0.0.1:8000",
    server: Annotated[
        list[str] | None, typer.Option("--server", help="NAME=URL of a server to compare; may be repeated.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Input/output tokens, with commas: 2000/200,128/64.")] = "128/64",
    concurrency: Annotated[str, typer.Option(help="Requests at a time, with commas: 1,4,8. Empty: none.")] = "1,4",
    rate: Annotated[str, typer.Option(help="Requests a second that arrive at random times, with commas.")] = "",
    trace: Annotated[
        str, typer.Option(help="CSV of arrivals: TIMESTAMP, ContextTokens, GeneratedTokens, as the Azure traces.")
    ] = "",
    trace_speed: Annotated[float, typer.Option(help="Replay the trace so many times as fast.")] = 1.0,
    requests: Annotated[int, typer.Option(help="Requests of each load and round; at least two for each place.")] = 8,
    rounds: Annotated[int, typer.Option(help="Times that each load is run; three or more give intervals.")] = 3,
    no_compare: Annotated[
        bool, typer.Option("--no-compare", help="Run servers as they are; else those that draft also without, in turn.")
    ] = False,
    workload: Annotated[str, typer.Option(help="Where texts are from: a built-in workload or a file.")] = "chat-en",
    model: Annotated[str, typer.Option(help="Model to ask for; none: the server's first.")] = "",
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    natural_stop: Annotated[
        bool, typer.Option("--natural-stop", help="Let outputs end by themselves; else all tokens are asked for.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Draws arrivals and texts.")] = 0,
    ttft: Annotated[float, typer.Option(help="Seconds until the first token that count as good.")] = 2.0,
    timeout: Annotated[float, typer.Option(help="Seconds without a word from the server.")] = 600.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder for results and reports.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    as_json: Json = False,
) -> None:
    """Measure an OpenAI-compatible server under load: with drafts and without, or several servers side by side."""
    from ..measure.load_config import LoadConfig

    if endpoint not in ("chat", "completions"):
        raise UsageError(f"--endpoint is {endpoint!r}. Expected chat or completions.")
    config = LoadConfig(
        servers=_servers(url, server or []),
        lengths=tuple(part.strip() for part in lengths.split(",") if part.strip()),
        concurrency=tuple(int(n) for n in _numbers(concurrency, "--concurrency")),
        rates=_numbers(rate, "--rate"),
        trace=trace,
        trace_speed=trace_speed,
        requests=requests,
        rounds=rounds,
        compare=not no_compare,
        workload=workload,
        model=model,
        endpoint=cast(Literal["chat", "completions"], endpoint),
        natural_stop=natural_stop,
        temperature=temperature,
        seed=seed,
        ttft_bound=ttft,
        timeout=timeout,
    )
    _bench(config, output, resume, as_json)


def _bench(config: "LoadConfig", output: Path | None, resume: bool, as_json: bool) -> None:
    from ..measure.load_run import Results, run_load

    results = Results(output, config, resume)
    try:
        with (
            interruptible("What was measured is kept; --resume goes on." if output else "Nothing is kept without -o."),
            progress_bars() as bars,
        ):
            asyncio.run(run_load(config, results, perf_counter, bars, os.environ.get(KEY, "")))
    finally:
        if results.answers:
            _show(config, results, output, as_json)


def _show(config: "LoadConfig", results: "Results", output: Path | None, as_json: bool) -> None:
    from ..measure.load_report import load_json, publish_load, render_load, summarize_load

    summary = summarize_load(config, results.answers)
    written = publish_load(output, summary) if output else []
    if as_json:
        print(json.dumps(load_json(summary), ensure_ascii=False))
        return
    render_load(summary, out)
    if written:
        out.print(f"\nwritten: {', '.join(map(str, written))}", highlight=False, soft_wrap=True)


def _servers(url: str, named: list[str]) -> "tuple[Server, ...]":
    from ..measure.load_config import Server

    found = []
    for text in named:
        name, equals, address = text.partition("=")
        if not (name and equals and address):
            raise UsageError(f"--server {text!r}. Expected NAME=URL, such as ours=http://127.0.0.1:8000.")
        found.append(Server(name, _root(address)))
    return tuple(found) or (Server("server", _root(url)),)


def _root(url: str) -> str:
    root = url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")):
        raise UsageError(f"the server's address is {url!r}. Expected a URL, such as http://127.0.0.1:8000.")
    return root


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f"{option} is {text!r}. Expected numbers with commas, such as 1,4,8.") from None
