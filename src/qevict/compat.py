"""The one place that knows the differences between Transformers releases (5.2 to 5.24) where a caller meets them.

The cache layers' own bridging is in their signatures: `get_mask_sizes` takes a length or cache positions,
`get_max_length` has its older name beside it, `crop` takes both of its meanings, and `update` ignores extras.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import GenerationMixin

_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_ARGUMENT = "cache" if "cache" in _PARAMETERS else "past_key_values"
"""The name under which models and `generate` take a cache."""


def cache_argument(cache: Any) -> dict[str, Any]:
    """Keyword arguments that hand `cache` to a model or to `generate`."""
    return {CACHE_ARGUMENT: cache}
