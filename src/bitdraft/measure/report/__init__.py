"""A measurement, told: in the terminal, as one HTML file that opens offline, as Markdown and as JSON."""

from .html import render_html
from .markdown import render_markdown
from .publish import publish
from .summary import Summary, build_plan, summarize, to_json
from .table import render_terminal

__all__ = [
    "Summary",
    "build_plan",
    "publish",
    "render_html",
    "render_markdown",
    "render_terminal",
    "summarize",
    "to_json",
]
