"""Number formats, and the recipes that say how a model is brought into one."""

from .base import FORMATS, Format, get_format
from .kv import KV_FORMATS, KVFormat, get_kv_format
from .recipe import METHODS, OUTLIERS, Method, Recipe

__all__ = [
    "FORMATS",
    "KV_FORMATS",
    "METHODS",
    "OUTLIERS",
    "Format",
    "KVFormat",
    "Method",
    "Recipe",
    "get_format",
    "get_kv_format",
]
