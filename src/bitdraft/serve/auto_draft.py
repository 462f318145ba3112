"""`--draft auto`: a draft among the models that are on this machine already.

Fit to draft is what has the target's vocabulary and at most half its weights. The smallest one is taken: it costs
least, and whether it pays is then measured while serving (`--k auto`). Nothing is fetched.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import BitdraftError, UsageError
from ..models.hub import cache_folder
from ..models.registry import KNOWN_MODELS
from ..models.tokenizer import check_pair
from ..quantize.load import Source, open_source
from .load import NGRAM

AUTO_DRAFT = "auto"
"""In place of a draft's name: choose one."""
SHARE = 0.5
"""Of the target's weights, how many a draft may have."""


@dataclass(frozen=True)
class Chosen:
    """What drafts.

    Attributes:
        draft: a name for `open_source`, or 'ngram'.
        why: one line for people.
        refused: the other models, each with the reason.
    """

    draft: str
    why: str
    refused: tuple[tuple[str, str], ...]


def choose_draft(target: Source, folders: Sequence[Path], cache: Path | None = None) -> Chosen:
    """The smallest model that can draft for a target; n-grams where there is none.

    Args:
        target: the target.
        folders: model folders, or folders with model folders and .gguf files in them, beside the cache.
        cache: see `cache_folder`.

    Raises:
        UsageError: one of the folders is none.
    """
    weights = _weights(target)
    fit: list[tuple[int, str]] = []
    refused: list[tuple[str, str]] = []
    for name in _candidates(folders, cache):
        try:
            source = open_source(name)
            if source.path.resolve() == target.path.resolve():
                continue
            share = _weights(source) / weights
            if share > SHARE:
                refused.append((name, f"it has {share:.2f} of the target's weights; expected {SHARE} at most."))
                continue
            check_pair(target.tokenizer, source.tokenizer)
            fit.append((_weights(source), name))
        except BitdraftError as error:
            refused.append((name, str(error)))
    if not fit:
        return Chosen(NGRAM, f"--draft auto: none of {len(refused)} models can draft, so n-grams do.", tuple(refused))
    size, name = min(fit)
    why = (
        f"--draft auto: {name}, with {size / weights:.2f} of the target's weights, the smallest of {len(fit)} that fit."
    )
    return Chosen(name, why, tuple(refused))


def _candidates(folders: Sequence[Path], cache: Path | None) -> Iterator[str]:
    """Names of what lies in the cache and in the folders."""
    models = cache_folder(cache) / "models"
    for name, known in KNOWN_MODELS.items():
        file = models / name / f"{name}.gguf"
        if file.is_file() and file.stat().st_size == known.size:
            yield str(file) if cache else name
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"--draft-folder {folder} is no folder. Expected one with models in it.")
        for path in (folder, *sorted(folder.iterdir())):
            if (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file()):
                yield str(path)


def _weights(source: Source) -> int:
    return sum(rows * columns for rows, columns in source.checkpoint.config.linear_shapes().values())
