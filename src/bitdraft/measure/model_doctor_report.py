"""A model's checkup for people: what it is, its errors by kind of layer and by depth, and what could be better."""

from collections.abc import Iterator
from statistics import mean

from rich.console import Console
from rich.table import Table

from .doctor import print_facts, print_finding
from .model_doctor import ModelCheckup
from .model_doctor_weights import Match, TensorFacts

_DEPTHS = 6
"""Layers that are shown, from the first to the last."""


def render_model(found: ModelCheckup, console: Console) -> None:
    """Print facts as tables, and below them what could be better."""
    print_facts(_rows(found), console)
    if any(t.match is not None for t in found.tensors):
        console.print()
        console.print(_by_part(found.tensors))
    for finding in found.findings:
        text = f"{finding.where}: {finding.what}. Costs: {_ended(finding.costs)} {_ended(finding.remedy)}"
        print_finding(finding.grave, text, console)
    if not found.findings:
        console.print("\n[green]All is well.[/]")


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith(".") else f"{sentence}."


def _rows(found: ModelCheckup) -> Iterator[tuple[str, str]]:
    yield "model", f"{found.model} ({found.stored_as})"
    yield "original", found.original or "none given: --against names one, and weights are compared with it"
    logits = found.logits
    if logits is None:
        yield f"on {found.text_tokens} tokens", "it does not run"
    elif logits.nll_original is None or logits.kl is None or logits.top1 is None:
        yield f"on {found.text_tokens} tokens", f"{logits.nll:.2f} nats a token"
    else:
        yield (
            f"on {found.text_tokens} tokens",
            f"KL {logits.kl:.4f} nats, {logits.top1:.0%} of likeliest tokens kept, {logits.nll:.2f} nats a token "
            f"({logits.nll_original:.2f} the original)",
        )
    if found.layers:
        step = max(1, -(-len(found.layers) // _DEPTHS))
        shown = {layer.layer: layer for layer in (*found.layers[::step], found.layers[-1])}.values()
        yield (
            "error of the stream",
            ", ".join(f"{layer.stream_error:.1%} behind layer {layer.layer}" for layer in shown),
        )
    if found.draft is not None and found.draft.acceptance is not None:
        before = found.draft.acceptance_original
        original = "" if before is None else f" ({before:.2f} the original)"
        yield f"as draft of {found.draft.target}", f"{found.draft.acceptance:.2f} accepted{original}"


def _by_part(tensors: tuple[TensorFacts, ...]) -> Table:
    """Errors by kind of layer: means over the layers, and the worst layer."""
    table = Table("layer", "inputs", "format", "weights", "its format", "outputs", "its format", "worst", box=None)
    parts: dict[str, list[tuple[TensorFacts, Match]]] = {}
    for tensor in tensors:
        if tensor.match is not None:
            parts.setdefault(tensor.name.rpartition(".")[2], []).append((tensor, tensor.match))
    for part, some in parts.items():
        first = some[0][0]
        worst, match = max(some, key=lambda pair: pair[1].error)
        outputs = [(m.output_error, m.output_expected) for _, m in some]
        own, expected = ([e for e in side if e is not None] for side in zip(*outputs, strict=True))
        table.add_row(
            part,
            str(first.inputs),
            "/".join(sorted({t.stored for t, _ in some})),
            f"{mean(m.error for _, m in some):.2%}",
            f"{mean(m.expected for _, m in some):.2%}",
            f"{mean(own):.2%}" if own else "",
            f"{mean(expected):.2%}" if expected else "",
            f"{match.error:.2%}, {worst.name.split('.')[2]}" if len(some) > 1 else "",
        )
    return table
