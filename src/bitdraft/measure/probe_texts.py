"""Probes from measurements: the texts that `bitdraft measure` kept, or new ones that the target writes now."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..errors import UsageError
from ..formats import Recipe
from ..models.kv import BLOCK_SIZE
from ..quantize.load import Progress, Source, load_model, open_source
from ..quantize.probe import AcceptanceProbe, ProbeText, TargetName, target_logits
from ..types import SamplingParams
from .texts import load_hidden, tokenise, write_texts
from .trace import Trace
from .workload import calibration_texts, load_workload


def probe_of_folder(
    folder: Path, workloads: Sequence[str] | None = None, progress: Progress | None = None
) -> AcceptanceProbe:
    """The texts of a finished measurement; neither model is run, and of the target only the head is read.

    Args:
        folder: what `bitdraft measure -o` wrote.
        workloads: what it was asked for, where files were among it: a trace knows them by name only.
        progress: called while the target is fetched.

    Raises:
        UsageError: no measurement there, one without texts, or prompts that have changed since.
    """
    trace = Trace.load(folder)
    target = TargetName(trace.run.target.name, trace.run.target_format)
    source = open_source(target.model, progress)
    prompts = [p for spec in workloads or trace.run.workloads for p in load_workload(spec, trace.run.prompts)]
    context = source.checkpoint.config.context_length
    ids = tokenise(prompts, source.tokenizer, trace.run.sampling.max_tokens, context)
    texts = []
    for key, text in sorted(trace.texts.items()):
        if len(ids.get(key, ())) != text.prompt_tokens:
            raise UsageError(
                f"{folder}: {key[0]} prompt {key[1]} had {text.prompt_tokens} tokens when it was measured, and has "
                f"{len(ids.get(key, ()))} now. The workload or the tokenizer has changed: measure again."
            )
        texts.append(ProbeText(*key, ids[key], text.ids, load_hidden(folder, key)))
    return AcceptanceProbe(texts, target, target_logits(source, Recipe.parse(target.recipe)))


def write_probe(
    target: Source,
    recipe: Recipe,
    workloads: Sequence[str],
    prompts: int,
    sampling: SamplingParams,
    clock: Callable[[], float],
    batch: int = 8,
    progress: Progress | None = None,
) -> AcceptanceProbe:
    """Let a target write the texts of a probe.

    Args:
        target: the target. recipe: what it runs in.
        workloads: built-in names or files. prompts: how many of each, at most.
        sampling: how it writes.
        clock: seconds.
        batch: texts that are written side by side.
        progress: called with (texts done, texts, what).

    Raises:
        UsageError: a workload that cannot be read, or prompts that are too long.
    """
    asked = [p for spec in workloads for p in load_workload(spec, None)[:prompts]]
    context = target.checkpoint.config.context_length
    ids = tokenise(asked, target.tokenizer, sampling.max_tokens, context)
    longest = max(len(tokens) for tokens in ids.values()) + sampling.max_tokens
    model = load_model(
        target,
        recipe,
        kv_tokens=batch * (-(-longest // BLOCK_SIZE) + 1) * BLOCK_SIZE,
        rng=np.random.default_rng(sampling.seed),
        calibration=[target.tokenizer.encode(text) for text in calibration_texts()],
        progress=progress,
    )
    texts = []
    written = write_texts(model, ids, sampling, tuple(target.tokenizer.eos_ids), batch, clock)
    for text, hidden_TD in written:
        key = (text.workload, text.index)
        texts.append(ProbeText(*key, ids[key], text.ids, hidden_TD))
        if progress:
            progress(len(texts), len(ids), "target writes")
    texts.sort(key=lambda text: (text.workload, text.index))
    return AcceptanceProbe(texts, TargetName(target.name, recipe.name), model.logits)
