"""Whether a calibration set is in the language of the traffic: scripts and kinds of characters, compared."""

import unicodedata
from collections import Counter
from collections.abc import Iterable

SCRIPTS = (
    "LATIN",
    "CJK",
    "HIRAGANA",
    "KATAKANA",
    "HANGUL",
    "CYRILLIC",
    "GREEK",
    "ARABIC",
    "HEBREW",
    "DEVANAGARI",
    "THAI",
)
"""First words of Unicode's names of letters; all other letters count as one more script."""

MOST_APART = 0.25
"""Share of the characters that would have to change for the two to agree, above which calibration misleads. English
prose and English programs differ by about 0.15, English and Chinese by 0.8."""

_READ = 20_000
"""Characters of each text that are looked at."""


def kinds(texts: Iterable[str]) -> dict[str, float]:
    """Shares of the characters that are not blank, by script in lower case, 'other letters', 'digits' and 'symbols'."""
    counts: Counter[str] = Counter()
    for text in texts:
        for character, count in Counter(text[:_READ]).items():
            if not character.isspace():
                counts[_kind(character)] += count
    total = max(counts.total(), 1)
    return {kind: count / total for kind, count in counts.most_common()}


def apart(a: Iterable[str], b: Iterable[str]) -> float:
    """Half the sum of the differences of the shares of `kinds`: 0 for the same mixture, 1 for none in common."""
    first, second = kinds(a), kinds(b)
    return sum(abs(first.get(kind, 0) - second.get(kind, 0)) for kind in first.keys() | second.keys()) / 2


def language_warning(calibration: list[str], workload: list[str]) -> str | None:
    """What to say when a calibration set is written in other characters than the traffic; None where it is not."""
    distance = apart(calibration, workload)
    if distance <= MOST_APART:
        return None
    return (
        f"the calibration set is {_described(kinds(calibration))}, the workload {_described(kinds(workload))}: "
        f"{distance:.0%} of the characters differ in kind (more than {MOST_APART:.0%}). What is rounded for the one "
        "may be rounded badly for the other. Calibrate with texts like the workload."
    )


def _kind(character: str) -> str:
    if character.isdigit():
        return "digits"
    if not character.isalpha():
        return "symbols"
    script = unicodedata.name(character, "").partition(" ")[0]
    return script.lower() if script in SCRIPTS else "other letters"


def _described(shares: dict[str, float]) -> str:
    parts = [
        f"{share:.0%} {kind.upper() if kind == 'cjk' else kind}" for kind, share in shares.items() if share >= 0.05
    ]
    return ", ".join(parts) or "empty"
