"""Decode attention over the tiers. `reference` is the definition; faster kernels have its signature and its results."""

from qevict.kernels.reference import Attended, History, TierView, attend, prompt_mass

__all__ = ["Attended", "History", "TierView", "attend", "prompt_mass"]
