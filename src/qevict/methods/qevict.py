"""QEvict itself, as one of the methods."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from qevict.cache import QEvictCache
from qevict.codecs import PromptCodec
from qevict.config import RECONSTRUCTION, Budget, QEvictConfig
from qevict.methods.base import Kind, MeasuredCache, OwnCache, Properties

_NOT_SETTINGS = {"budget", "store_dtype", "allow_untested"}


@dataclass(frozen=True)
class QEvict(OwnCache):
    """Three tiers: full precision, recoverable low-bit, evicted.

    Attributes:
        config: the settings; budget and storage dtype are given where a cache is made.
        preset: what to call a configuration that is not told as changes to the default. "paper" is told as changes to
            `at_matched_bytes`; any other name stands for the configuration as it is.
    """

    config: QEvictConfig = field(default_factory=QEvictConfig)
    preset: str = ""

    name: ClassVar[str] = "qevict"
    paper: ClassVar[str] = "QEvict (arXiv 2608.05326)"
    source: ClassVar[str] = "this project's default; qevict-paper: section 5 and appendix B.5"
    kind: ClassVar[Kind] = "hybrid"
    properties: ClassVar[Properties] = Properties(True, True, True, True)

    @classmethod
    def at_matched_bytes(cls) -> QEvict:
        """The paper's settings with everything charged that they leave uncharged, so that no step passes the budget."""
        return cls(QEvictConfig.paper(reserve_growth=True, dormant="slots"), preset="paper")

    @property
    def base_label(self) -> str:
        """`qevict`, or `qevict-paper`."""
        return f"{self.name}-{self.preset}" if self.preset else self.name

    def changes(self) -> dict[str, Any]:
        """Fields of the configuration that are not those of `base_label`."""
        if self.preset not in ("", "paper"):
            return {}
        usual = (QEvict.at_matched_bytes() if self.preset else QEvict()).settings()
        return {name: value for name, value in self.settings().items() if value != usual[name]}

    @property
    def observed_queries(self) -> int | None:
        """As many as initialise the scores; all where a codec is fitted to them."""
        queries = self.config.prompt_queries
        fitted = any(isinstance(codec, PromptCodec) for codec in self.config.codecs())
        return None if queries == "all" or callable(self.config.prompt_scorer) or fitted else queries

    @property
    def needs_scores(self) -> bool:
        """Whether its caches are filled from a trace with the scores of a second reading."""
        return self.config.prompt_scorer == RECONSTRUCTION

    def settings(self) -> dict[str, Any]:
        """The configuration's fields, without what is given where a cache is made."""
        fields = {f.name: getattr(self.config, f.name) for f in dataclasses.fields(self.config)}
        return {name: value for name, value in fields.items() if name not in _NOT_SETTINGS}

    def with_settings(self, **changes: Any) -> QEvict:
        """A copy with some of the configuration's fields changed.

        Raises:
            ValueError: if there is no such field, or a value is not allowed.
        """
        known = self.settings()
        for name in changes:
            if name not in known:
                raise ValueError(f"{self.name} has no setting {name!r}; it has {', '.join(known)}")
        return dataclasses.replace(self, config=self.config.replace(**changes))

    def cache(
        self,
        model: PreTrainedModel,
        budget: Budget,
        *,
        max_new_tokens: int | None,
        store_dtype: torch.dtype | None,
        allow_untested: bool,
    ) -> MeasuredCache:
        """A `QEvictCache`."""
        config = self.config.replace(budget=budget, store_dtype=store_dtype, allow_untested=allow_untested)
        return QEvictCache(model, config, max_new_tokens=max_new_tokens)
