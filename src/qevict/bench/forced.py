"""What a compressed cache does to the next-token distribution, token by token of a forced text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from qevict.bench.decode import PeakMemory, force
from qevict.bench.forks import fork_forward
from qevict.methods.base import MeasuredCache


@dataclass
class Steps:
    """One cache against full KV; a step is a token of the forced text.

    Attributes:
        kl: KL(full KV || this cache) of the distributions of the token, in nats.
        nll: negative log-likelihood of the token, in nats.
        same: whether the two caches' most likely tokens are the same.
        memory: the most held at any step.
    """

    kl: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    memory: PeakMemory = field(default_factory=PeakMemory)


def against_full(
    model: PreTrainedModel,
    full: MeasuredCache,
    caches: Sequence[MeasuredCache],
    pending: Sequence[int],
    forced: Sequence[int],
) -> list[Steps]:
    """Force a text through full KV and other caches, all forks of one prompt, a token a forward.

    Args:
        pending: tokens of the prompt that the caches have not read. They are fed in one forward; its last logits are
            step 0's, the first that come from the compressed cache.
        forced: the text; its last token is scored and not fed.

    Returns:
        Steps of full KV itself, then of the caches in order.
    """
    rows = [full, *caches]
    steps = [Steps() for _ in rows]
    for taken, cache in zip(steps, rows, strict=True):
        taken.memory.see(cache.memory())

    def take(logits: Float[Tensor, "rows one vocabulary"], token: int) -> None:
        for taken, cache, (kl, nll, same) in zip(steps, rows, compare(logits[:, -1], token), strict=True):
            taken.kl.append(kl)
            taken.nll.append(nll)
            taken.same.append(same)
            taken.memory.see(cache.memory())

    take(fork_forward(model, rows, torch.tensor([list(pending)]).expand(len(rows), -1)), forced[0])
    fed = torch.tensor([list(forced[:-1])]).expand(len(rows), -1)
    if len(forced) > 1:
        for token, logits in zip(forced[1:], force(model, rows, fed, chunk=1), strict=True):
            take(logits, token)
    return steps


def compare(logits: Float[Tensor, "rows vocabulary"], token: int) -> list[tuple[float, float, bool]]:
    """KL(row 0 || row), negative log-likelihood of a token, and whether row 0's most likely token is the row's.

    Log-probabilities are taken, and summed, in float64.
    """
    reference = log_probabilities(logits[0])
    compared = []
    for row in logits:
        own = log_probabilities(row)
        compared.append((divergence(reference, own), -own[token].item(), bool(own.argmax() == reference.argmax())))
    return compared


def log_probabilities(logits: Float[Tensor, " vocabulary"]) -> Float[Tensor, " vocabulary"]:
    """In float64, whatever the logits' dtype."""
    return logits.double().log_softmax(dim=-1)


def divergence(reference: Float[Tensor, " vocabulary"], other: Float[Tensor, " vocabulary"]) -> float:
    """KL(reference || other) in nats, of log-probabilities; tokens that the reference excludes add nothing."""
    terms = torch.where(reference == -torch.inf, 0.0, reference.exp() * (reference - other))
    return max(0.0, terms.sum().item())
