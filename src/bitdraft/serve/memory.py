"""How much memory serving a pair takes, before anything is loaded.

Weights of target and draft, keys and values of both, and the rows of logits that a step holds: each is counted, and
what does not fit is refused with the table, not found out by the system's killer of processes.

Letters: K drafted tokens, V vocabulary.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UsageError
from ..formats import KVFormat, Recipe
from ..models.config import ModelConfig
from ..quantize.load import Source, kv_format_of
from .load import Opened

_BLOCK = 16
_DRAFT_WEIGHTS, _DRAFT_KV = "draft weights", "draft keys and values"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SHARE = 0.5
"""Of what weights and logits leave, how much keys and values get where nobody says."""
_PROGRAM = 300 << 20
"""The libraries and the program themselves."""


def parse_size(text: str) -> int:
    """Bytes of a size such as '2GB', '512MiB' or '1000000'.

    Raises:
        UsageError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if not match or match[2].upper() not in _UNITS:
        raise UsageError(f"a size of {text!r}. Expected a number with a unit, such as 2GB, 512MB or 1.5GiB.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that a program can still take: what the system says, or less where a control group limits it.

    Returns:
        None where the system does not say.
    """
    found = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    group = root / "sys/fs/cgroup"
    try:
        limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        found.append(limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


@dataclass(frozen=True)
class MemoryPlan:
    """What serving takes, in bytes.

    Attributes:
        parts: by name.
        available: what there is; None where the system does not say.
        context: tokens of one request, prompt and output.
        kv_tokens: tokens that each model's cache holds.
    """

    parts: dict[str, int]
    available: int | None
    context: int
    kv_tokens: int

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    def rows(self) -> list[tuple[str, str]]:
        """The table: what, and how much."""
        found = [(name, megabytes(size)) for name, size in self.parts.items()]
        found.append(("all", megabytes(self.total)))
        found.append(("available", "unknown" if self.available is None else megabytes(self.available)))
        return found

    def check(self) -> None:
        """Refuse what does not fit.

        Raises:
            UsageError: with the table.
        """
        if self.available is not None and self.total > self.available:
            table = "; ".join(f"{name} {size}" for name, size in self.rows())
            raise UsageError(
                f"this takes {megabytes(self.total)} of memory and {megabytes(self.available)} are available: {table}. "
                "Choose a smaller --kv-memory, --max-batch or --max-model-len, a format with fewer bits, or a smaller "
                "draft."
            )


def megabytes(size: int) -> str:
    """A size for people."""
    return f"{size / 1e6:,.0f} MB"


def weight_bytes(source: Source, recipe: Recipe) -> int:
    """About what a model's weights take in a recipe."""
    config = source.checkpoint.config
    bits = 0.0
    for name, (rows, columns) in config.linear_shapes().items():
        its = recipe.format_of(name).bits_per_weight
        bits += rows * columns * (source.checkpoint.stored_bits if its is None else its)
        if name != "lm_head":  # which keeps no inputs in 16 bits
            bits += rows * recipe.outliers * 16
    if not config.tied_head:
        its = recipe.format_of("lm_head").bits_per_weight
        embedding = config.vocab_size * config.hidden_size
        bits += embedding * (source.checkpoint.stored_bits if its is None else its)
    return int(bits / 8)


def kv_bytes(config: ModelConfig, kv: KVFormat) -> float:
    """Bytes of the keys and values of one token in all layers."""
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return numbers * kv.bits_per_number(config.head_dim) / 8


def logit_bytes(vocab: int, batch: int, draft_length: int, *, model_draft: bool) -> int:
    """Bytes of a step's logits and of the distributions made of them: the target's of K + 1 rows, the draft's of K."""
    rows = 2 * (draft_length + 1) + (2 * draft_length if model_draft else 0)
    return rows * batch * vocab * 4


def plan_memory(
    opened: Opened,
    *,
    kv: str | None,
    draft_kv: str | None,
    max_batch: int,
    max_rows: int,
    draft_length: int,
    max_model_len: int | None,
    kv_memory: int | None,
    available: int | None,
) -> MemoryPlan:
    """Share memory out between weights, logits, and keys and values.

    Args:
        opened: the pair.
        kv, draft_kv: formats of keys and values, None for the default.
        max_batch: requests that run at once.
        max_rows: rows of a step with chunks of prompts, see `Engine`.
        draft_length: longest block.
        max_model_len: tokens of one request; None for as many as the model and the cache hold.
        kv_memory: bytes for keys and values of both models; None for what `max_batch` full contexts need, or half of
            what is left if that is less.
        available: bytes that there are; None for not known.

    Raises:
        UsageError: not even the cache of one request fits.
    """
    config = opened.target.checkpoint.config
    parts = {"target weights": weight_bytes(opened.target, opened.target_recipe)}
    per_token = kv_bytes(config, kv_format_of(opened.target, opened.target_recipe, kv))
    draft_per_token = 0.0
    if opened.draft:
        parts[_DRAFT_WEIGHTS], draft_per_token = _draft_bytes(opened, draft_kv)
    vocab = max(config.vocab_size, opened.target.tokenizer.vocab_size)
    # Without a draft as well: clients' predictions are drafts.
    parts["logits of a step"] = logit_bytes(vocab, max_batch, draft_length, model_draft=opened.draft is not None)
    parts["activations of a step"] = max_rows * 4 * (8 * config.hidden_size + 3 * config.mlp_size)
    parts["the program"] = _PROGRAM
    longest = min(max_model_len or config.context_length, config.context_length)
    room = kv_memory
    if room is None and available is not None:
        room = max(int((available - sum(parts.values())) * _SHARE), 0)
    tokens = max_batch * longest
    if room is not None:
        tokens = min(tokens, int(room / (per_token + draft_per_token)))
    tokens = tokens // _BLOCK * _BLOCK
    context = longest if max_model_len else min(longest, tokens)
    if context < 2 * _BLOCK or tokens < context:
        needed = int((max_model_len or 2 * _BLOCK) * (per_token + draft_per_token))
        raise UsageError(
            f"keys and values of one request of {max_model_len or 2 * _BLOCK} tokens take {megabytes(needed)}, and "
            f"{megabytes(room or 0)} are there for them. Choose a larger --kv-memory, a smaller --max-model-len, or "
            "--kv with fewer bits."
        )
    parts["target keys and values"] = int(tokens * per_token)
    if opened.draft:
        parts[_DRAFT_KV] = int(tokens * draft_per_token)
    return MemoryPlan(parts, available, context, tokens)


def plan_draft(plan: MemoryPlan, opened: Opened, draft_kv: str | None, available: int | None) -> MemoryPlan:
    """The plan with another draft in place of the present one, which stays until the other is there.

    Args:
        plan: what serving takes with the present draft.
        opened: the target with the other one.
        draft_kv: format of its keys and values, None for the default.
        available: bytes that there are beside what is used; None for not known.

    Raises:
        UsageError: they do not hold the other draft.
    """
    parts = {name: size for name, size in plan.parts.items() if name not in (_DRAFT_WEIGHTS, _DRAFT_KV)}
    if opened.draft:
        weights, per_token = _draft_bytes(opened, draft_kv)
        more = {_DRAFT_WEIGHTS: weights, _DRAFT_KV: int(plan.kv_tokens * per_token)}
        needed = sum(more.values())
        if available is not None and needed > available:
            raise UsageError(
                f"the draft takes {megabytes(needed)} and {megabytes(available)} are available while the present one "
                "is still there. Choose a smaller one, fewer bits, or let none draft first."
            )
        parts |= more
    return replace(plan, parts=parts)


def _draft_bytes(opened: Opened, draft_kv: str | None) -> tuple[int, float]:
    """Of the draft's weights, and of the keys and values of one token."""
    assert opened.draft
    assert opened.draft_recipe
    kv = kv_format_of(opened.draft, opened.draft_recipe, draft_kv)
    return weight_bytes(opened.draft, opened.draft_recipe), kv_bytes(opened.draft.checkpoint.config, kv)
