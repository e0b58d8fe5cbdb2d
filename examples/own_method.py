"""A method of your own in 30 lines: keep the tokens whose values are long. Run it: python examples/own_method.py

To use it by name (qevict generate --method longvalues), declare it in your package's pyproject.toml:

    [project.entry-points."qevict.methods"]
    longvalues = "your_package:LongValues"
"""

from dataclasses import dataclass
from typing import ClassVar

from qevict.methods import Kept, LayerPrefill, Selector, best
from qevict.testing import check_method


@dataclass(frozen=True)
class LongValues(Selector):
    """The last `recent` tokens, and those with the longest values."""

    recent: int = 8

    name: ClassVar[str] = "longvalues"
    paper: ClassVar[str] = "an example"

    @property
    def least_tokens(self) -> int:
        return self.recent

    def keep(self, prefill: LayerPrefill, tokens: int) -> Kept:
        scores = prefill.values.float().norm(dim=-1)
        scores[:, -self.recent :] = float("inf")
        return best(scores, tokens)


if __name__ == "__main__":
    check_method(LongValues())
    print("LongValues does everything that a method has to.")
