"""The methods that QEvict is compared with, as caches on the same attention function. `base` says how to write one."""

from qevict.methods.base import Allowance, LayerPrefill, Method, Properties, Selector, best, everything
from qevict.methods.cache import MethodCache
from qevict.methods.registry import get_method, make_cache, method_names
from qevict.methods.store import ExactStore, Kept, RowStore

__all__ = [
    "Allowance",
    "ExactStore",
    "Kept",
    "LayerPrefill",
    "Method",
    "MethodCache",
    "Properties",
    "RowStore",
    "Selector",
    "best",
    "everything",
    "get_method",
    "make_cache",
    "method_names",
]
