"""Number formats, and the recipes that say how a model is brought into one."""

from .base import FORMATS, Format, get_format
from .recipe import METHODS, Method, Recipe

__all__ = ["FORMATS", "METHODS", "Format", "Method", "Recipe", "get_format"]
