"""Write every form of a report beside its trace."""

import json
from pathlib import Path

import numpy as np

from ..attribution import attribution_json, attribution_markdown, load_attributions
from ..files import writable, write_atomically
from ..trace import Trace
from .html import render_html
from .markdown import render_markdown
from .summary import Summary, build_plan, summarize, to_json


def publish(folder: Path) -> tuple[Summary, list[Path]]:
    """Make report.html, report.md, report.json and plan.json from the trace in `folder`.

    Attributions, if there are any, go into report.md and report.json.

    The bootstrap draws from a fixed seed: the same trace gives the same report.

    Returns:
        the summary, and the files that were written.

    Raises:
        UsageError: there is no trace, a broken one, or one in which nothing was timed yet.
    """
    summary = summarize(Trace.load(folder), np.random.default_rng(0))
    found = load_attributions(folder, np.random.default_rng(0))
    record = to_json(summary) | {"attribution": {each.format: attribution_json(each) for each in found}}
    texts = {
        "report.html": render_html(summary),
        "report.md": "\n".join([render_markdown(summary), *(attribution_markdown(each) + "\n" for each in found)]),
        "report.json": json.dumps(record, indent=2, ensure_ascii=False) + "\n",
    }
    plan = build_plan(summary)
    with writable(folder):
        for name, text in texts.items():
            write_atomically(folder / name, text)
    plan.save(folder / "plan.json")
    return summary, [*(folder / name for name in texts), folder / "plan.json"]
