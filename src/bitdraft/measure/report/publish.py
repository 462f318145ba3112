"""Write every form of a report beside its trace."""

import json
from pathlib import Path

import numpy as np

from ..files import writable, write_atomically
from ..trace import Trace
from .html import render_html
from .markdown import render_markdown
from .summary import Summary, build_plan, summarize, to_json


def publish(folder: Path) -> tuple[Summary, list[Path]]:
    """Make report.html, report.md, report.json and plan.json from the trace in `folder`.

    The bootstrap draws from a fixed seed: the same trace gives the same report.

    Returns:
        the summary, and the files that were written.

    Raises:
        UsageError: there is no trace, a broken one, or one in which nothing was timed yet.
    """
    summary = summarize(Trace.load(folder), np.random.default_rng(0))
    texts = {
        "report.html": render_html(summary),
        "report.md": render_markdown(summary),
        "report.json": json.dumps(to_json(summary), indent=2, ensure_ascii=False) + "\n",
    }
    plan = build_plan(summary)
    with writable(folder):
        for name, text in texts.items():
            write_atomically(folder / name, text)
    plan.save(folder / "plan.json")
    return summary, [*(folder / name for name in texts), folder / "plan.json"]
