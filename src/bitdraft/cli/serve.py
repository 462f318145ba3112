"""The verb that serves a model: serve."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from .app import app
from .options import KV, MinConfidence, NoCache, Target, TargetFormat
from .terminal import err, interruptible, progress_bars

if TYPE_CHECKING:
    from ..serve.start import ServeConfig


Draft = Annotated[
    str | None, typer.Option("--draft", help="Model that drafts, or ngram, or auto; none decodes plainly.")
]
DraftFolder = Annotated[
    list[Path] | None, typer.Option(help="Folder with models that --draft auto may choose; may be repeated.")
]
DraftFormat = Annotated[str, typer.Option(help="Format of the draft, likewise.")]
DraftKV = Annotated[str | None, typer.Option(help="Format of the draft's keys and values; none: as --kv.")]
PlanFile = Annotated[
    Path | None,
    typer.Option(help="plan.json of `bitdraft measure`: gives draft, formats, --kv, and acceptance for --k auto."),
]
K = Annotated[
    str, typer.Option("--k", help="Tokens drafted a step, at most; auto follows what is measured while serving.")
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
MaxBatch = Annotated[int, typer.Option(min=1, max=1024, help="Requests that run at once, at most.")]
MaxRows = Annotated[
    int,
    typer.Option(
        "--max-batched-tokens",
        min=16,
        max=8192,
        help="Tokens of prompts and outputs in a step, about: fewer let others' outputs flow while a prompt is read.",
    ),
]
MaxModelLen = Annotated[
    int | None, typer.Option(min=2, help="Tokens of prompt and output; none: as model and memory allow.")
]
KVMemory = Annotated[
    str | None, typer.Option(help="Memory for keys and values of both models, such as 2GB; none: from what is free.")
]
MaxQueue = Annotated[int, typer.Option(min=0, help="Requests that may wait; more get status 429.")]
MaxBody = Annotated[str, typer.Option(help="Longest body of a request.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that a request may take.")]
Drain = Annotated[float, typer.Option(min=0, help="Seconds that requests get to finish at SIGTERM.")]
Names = Annotated[list[str] | None, typer.Option(help="A name that clients may use for the model; may be repeated.")]
GenerationConfig = Annotated[
    str, typer.Option(help="Sampling defaults: auto reads the model's generation_config.json, none does not.")
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="BITDRAFT_API_KEY", help="What clients have to show; none asks for nothing.")
]
Origins = Annotated[list[str] | None, typer.Option(help="Web origin whose pages may call the server; may be repeated.")]
Lenient = Annotated[bool, typer.Option("--lenient", help="Ignore unknown fields instead of refusing them.")]
Admin = Annotated[
    bool,
    typer.Option("--admin", help="Let clients change the draft (POST /admin/draft): they name paths on this machine."),
]
NoPrefixCache = Annotated[bool, typer.Option("--no-prefix-cache", help="Compute every prompt from its first token.")]
NoVLLMMetrics = Annotated[
    bool, typer.Option("--no-vllm-metrics", help="Show speculation's counters under our own names only.")
]


@app.command(epilog="Example: bitdraft serve --target qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b --port 8000")
def serve(
    target: Target,
    draft: Draft = None,
    draft_folder: DraftFolder = None,
    target_format: TargetFormat = "auto",
    draft_format: DraftFormat = "auto",
    kv: KV = None,
    draft_kv: DraftKV = None,
    plan: PlanFile = None,
    k: K = "auto",
    confidence: MinConfidence = 0.0,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    max_batch: MaxBatch = 16,
    max_batched_tokens: MaxRows = 128,
    max_model_len: MaxModelLen = None,
    kv_memory: KVMemory = None,
    max_queue: MaxQueue = 256,
    max_body: MaxBody = "8MB",
    timeout: Timeout = 600,
    drain: Drain = 30,
    served_model_name: Names = None,
    generation_config: GenerationConfig = "auto",
    api_key: ApiKey = None,
    cors_origin: Origins = None,
    lenient: Lenient = False,
    admin: Admin = False,
    no_prefix_cache: NoPrefixCache = False,
    no_vllm_metrics: NoVLLMMetrics = False,
    no_cache: NoCache = False,
) -> None:
    """Serve a model to OpenAI's clients, with or without a draft: the answers are the same."""
    from ..serve.memory import parse_size
    from ..serve.settings import Settings
    from ..serve.start import ServeConfig

    config = ServeConfig(
        target, draft, target_format, draft_format, kv, draft_kv or kv, _draft_length(k), confidence, max_batch,
        max_batched_tokens, max_model_len,
        kv_memory=parse_size(kv_memory) if kv_memory else None,
        prefix_cache=not no_prefix_cache,
        generation_config=_reads_config(generation_config),
        settings=Settings(
            names=tuple(served_model_name or ()),
            lenient=lenient,
            api_key=_key(api_key),
            origins=tuple(cors_origin or ()),
            max_queue=max_queue,
            max_body=parse_size(max_body),
            timeout=timeout,
            drain=drain,
            admin=admin,
            vllm_metrics=not no_vllm_metrics,
        ),
        draft_folders=tuple(draft_folder or ()),
    )  # fmt: skip
    with interruptible("Nothing was served yet."):
        _run(_planned(config, plan), host, port, not no_cache)


def _reads_config(text: str) -> bool:
    if text not in ("auto", "none"):
        raise UsageError(f"--generation-config is {text!r}. Expected auto or none.")
    return text == "auto"


def _key(text: str | None) -> str | None:
    if text == "":
        raise UsageError("an empty --api-key. Expected a key, or no such option.")
    return text


def _run(config: "ServeConfig", host: str, port: int, use_cache: bool) -> None:
    from ..measure.workload import calibration_texts
    from ..serve.guard import log_to
    from ..serve.server import bind, serve
    from ..serve.start import load_service, open_and_plan

    with bind(host, port) as listening:
        with progress_bars() as bars:
            opened, plan = open_and_plan(config, bars, use_cache)
        for what, size in plan.rows():
            err.print(f"{what:>24} {size:>12}", highlight=False)
        plan.check()
        log_to()
        with progress_bars() as bars:
            service = load_service(config, opened, plan, calibration_texts(), bars)
        if opened.why:
            err.print(service.info()["draft"]["chosen"], highlight=False, soft_wrap=True)
        address = listening.getsockname()
        serve(
            service,
            listening,
            lambda: err.print(
                f"serving {', '.join(service.settings.names)} at http://{address[0]}:{address[1]}",
                highlight=False,
                soft_wrap=True,
            ),
        )


def _draft_length(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or not 0 <= int(text) <= 64:
        raise UsageError(f"--k is {text!r}. Expected auto, or a number of tokens from 0 to 64.")
    return int(text)


def _planned(config: "ServeConfig", path: Path | None) -> "ServeConfig":
    """What a plan decided takes the place of the options it covers."""
    if path is None:
        return config
    from ..measure.plan import Plan

    plan = Plan.load(path)
    planned = replace(config, target_format=plan.target_format, kv=plan.kv, draft_kv=plan.kv)
    if plan.draft_format is None or plan.default_k == 0:
        return replace(planned, draft=None)
    length = config.draft_length
    if length is None and not plan.acceptance:
        length = plan.default_k
    return replace(
        planned, draft=plan.draft, draft_format=plan.draft_format, draft_length=length, acceptance=plan.acceptance
    )
