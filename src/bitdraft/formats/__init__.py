"""Number formats, and the recipes that say how a model is brought into one."""

from .base import FORMATS, Format, get_format
from .recipe import Recipe

__all__ = ["FORMATS", "Format", "Recipe", "get_format"]
