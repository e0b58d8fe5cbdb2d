"""ZipCache: tokens that attention finds salient in more bits, the others in fewer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from qevict.budget import MemoryReport
from qevict.codecs import MinMaxCodec, WindowShape
from qevict.codecs.packing import pack, unpack
from qevict.methods.base import Allowance, Kind, LayerPrefill, Method, Properties
from qevict.methods.decoded import Decoded
from qevict.methods.store import POSITION_BYTES, Block, RowStore, TokenBuffer

LIMIT = 65504.0
"""Decoded values beyond it, the largest finite float16, are clamped."""
_PROBES_AT_A_TIME = 128


@dataclass(frozen=True)
class ZipCache(Method):
    """All tokens in codes, whose bits depend on the attention that a few probe queries give them.

    With A the attention of the probes, summed over the query heads of a KV head, the saliency of token i is
    `sum_k A[k, i] / n_i`, where n_i is the number of probes that can see it: early tokens are not salient merely for
    being seen by all. Probes are the last `recent` of the prompt's queries and as many of the others, drawn at random,
    as `drawn` says. The `share` highest-scored tokens of each KV head are salient.

    Salient tokens and the others are quantised apart, by min-max with float16 parameters: keys per channel over the
    tokens, values per token over the channels of all heads (the j-th tokens of all heads share a range), after each
    channel was divided by the square root of its largest magnitude ("channel-separable").

    Later tokens stay exact until there are `interval` of them. Then the `share` of these that the newest query attends
    to most become salient, and everything is compressed again, from what it decodes to, as in the authors' code.

    Differences from that code: probes are drawn with a seed and without repetition; salient tokens are kept in the
    order of the text, so that a bit a token tells them apart (theirs are in the order of their scores, with indices);
    constant channels are guarded; codes, parameters and bits are stored and counted.

    Attributes:
        bits, other_bits: of salient tokens and of the others.
        share: of the tokens that are salient; int((1 - share) * tokens) are not.
        recent, drawn: probes as shares of the prompt's tokens; at least one recent one.
        interval: tokens generated between two compressions.
        visible: n_i counts "probes" (the paper) or all "queries" (the authors' code).
        seed: of the draw; each layer has its own.

    Raises:
        ValueError: if a setting is not allowed.
    """

    bits: int = 4
    other_bits: int = 2
    share: float = 0.7
    recent: float = 0.05
    drawn: float = 0.05
    interval: int = 100
    visible: Literal["probes", "queries"] = "probes"
    seed: int = 0

    name: ClassVar[str] = "zipcache"
    paper: ClassVar[str] = "ZipCache (He et al., 2024, arXiv 2405.14256)"
    source: ClassVar[str] = "ThisisBillhe/ZipCache, zipcache_generation_demo.py (share 0.6); 0.7 in the QEvict paper"
    kind: ClassVar[Kind] = "quantization"
    properties: ClassVar[Properties] = Properties(low_bit_retention=True)

    def __post_init__(self) -> None:
        _ = self.codecs  # which checks the widths
        for name in ("share", "recent", "drawn"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a share, from 0 to 1")
        if self.recent + self.drawn > 1:
            raise ValueError(f"recent is {self.recent} and drawn {self.drawn}; together they are at most 1")
        if self.interval < 1:
            raise ValueError(f"interval is {self.interval}; it has to be at least 1")
        if self.visible not in ("probes", "queries"):
            raise ValueError(f"visible is {self.visible!r}; it is 'probes' or 'queries'")

    @property
    def observed_queries(self) -> int | None:
        """All: probes are drawn from them."""
        return None

    @property
    def codecs(self) -> tuple[MinMaxCodec, MinMaxCodec]:
        """Of the salient tokens and of the others."""
        return MinMaxCodec(self.bits, self.bits), MinMaxCodec(self.other_bits, self.other_bits)

    def compress(self, prefills: Sequence[LayerPrefill], allowance: Allowance) -> list[RowStore]:
        """All tokens, in codes."""
        return [ZipStore(p, self, allowance.new_tokens, allowance.dtype) for p in prefills]

    def variants(self) -> Iterator[Method]:
        """Fewer and fewer salient tokens."""
        for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0):
            yield replace(self, share=share)

    def probes(self, prefill: LayerPrefill) -> Int[Tensor, " probes"]:
        """Which queries are looked at, ascending."""
        tokens = prefill.tokens
        first_recent = min(int(tokens - self.recent * tokens), tokens - 1)
        generator = torch.Generator().manual_seed(self.seed + prefill.index)
        drawn = torch.randperm(first_recent, generator=generator)[: int(self.drawn * tokens)].sort().values
        return torch.cat([drawn, torch.arange(first_recent, tokens)]).to(prefill.keys.device)

    def saliency(self, prefill: LayerPrefill) -> Float[Tensor, "heads tokens"]:
        """Scores of the prompt's tokens."""
        probes, place = self.probes(prefill), torch.arange(prefill.tokens, device=prefill.keys.device)
        keys = prefill.keys.float()
        total = torch.zeros(keys.shape[:2], device=keys.device)
        for some in probes.split(_PROBES_AT_A_TIME):
            logits = torch.einsum("hgqd,htd->hgqt", prefill.query[:, :, some].float(), keys) * prefill.scaling
            weights = logits.masked_fill_(place > some[:, None], -torch.inf).softmax(dim=-1)
            total += weights.sum(dim=(1, 2))
        seen_by = prefill.tokens - place
        if self.visible == "probes":
            seen_by = len(probes) - torch.searchsorted(probes, place)
        return total / seen_by

    def salient(self, scores: Float[Tensor, "heads tokens"]) -> Bool[Tensor, "heads tokens"]:
        """Which tokens of each head are salient; among equals, the later."""
        count = int((1 - self.share) * scores.shape[1] + 1e-9)  # 0.1 of 10 is one, whatever 1 - 0.9 is
        others = scores.argsort(dim=-1, stable=True)[:, :count]
        return torch.ones_like(scores, dtype=torch.bool).scatter(1, others, False)


class Part(NamedTuple):
    """Salient tokens or the others: as many in each head, all heads side by side in one window."""

    salient: bool
    codec: MinMaxCodec
    shape: WindowShape
    packed: UInt8[Tensor, " bytes"]


class Zipped:
    """Tokens in codes of two widths.

    Args:
        keys, values: in the order of the text; keys rotated.
        salient: which are salient, as many in each head.
        codecs: of the salient ones and of the others.
    """

    def __init__(
        self,
        keys: Float[Tensor, "heads tokens dim"],
        values: Float[Tensor, "heads tokens dim"],
        salient: Bool[Tensor, "heads tokens"],
        codecs: tuple[MinMaxCodec, MinMaxCodec],
    ) -> None:
        self.heads, self.tokens, self.dim = keys.shape
        self._salient = pack(salient.to(torch.uint8), 1)
        largest = values.float().abs().amax(dim=1, keepdim=True)
        self.channel_scale = torch.where(largest > 0, largest.sqrt(), 1).half().clamp(min=torch.finfo(torch.half).tiny)
        values = values.float() / self.channel_scale.float()
        self.parts: list[Part] = []
        for which, codec in zip((True, False), codecs, strict=True):
            chosen = salient == which
            count = int(chosen[0].sum())
            if count:
                side_by_side = (
                    x[chosen].view(self.heads, count, self.dim).transpose(0, 1).flatten(1)[None] for x in (keys, values)
                )
                shape = WindowShape(1, count, self.heads * self.dim)
                self.parts.append(Part(which, codec, shape, codec.encode(*side_by_side)))

    @property
    def salient(self) -> Bool[Tensor, "heads tokens"]:
        """Which tokens are salient."""
        return unpack(self._salient, 1, self.tokens).bool()

    def decode(self) -> tuple[Float[Tensor, "heads tokens dim"], Float[Tensor, "heads tokens dim"]]:
        """Keys and values in the order of the text."""
        salient = self.salient
        both = torch.empty(2, self.heads, self.tokens, self.dim, device=salient.device)
        for part in self.parts:
            chosen = salient == part.salient
            for side, x in zip(both, part.codec.decode(part.packed, part.shape), strict=True):
                side[chosen] = x[0].unflatten(1, (self.heads, self.dim)).transpose(0, 1).flatten(0, 1)
        return both[0], (both[1] * self.channel_scale.float()).clamp(-LIMIT, LIMIT)

    def memory(self) -> MemoryReport:
        """Codes and their parameters; the bits that tell salient tokens apart are parameters, too."""
        codes = sum(part.codec.layout(part.shape).code_bytes for part in self.parts)
        total = sum(part.packed.nbytes for part in self.parts) + self._salient.nbytes + self.channel_scale.nbytes
        return MemoryReport(codes=codes, parameters=total - codes, reserved=total)


class ZipStore(RowStore):
    """One row in one layer: tokens in codes, and up to `interval` exact ones behind them.

    Codes are made anew at every compression and take what they take; room is reserved for the exact tokens only.

    Args:
        prefill: the prompt.
        method: the settings.
        growth: tokens to come; None if unknown.
        dtype: of the exact ones.
    """

    observes = True

    def __init__(self, prefill: LayerPrefill, method: ZipCache, growth: int | None, dtype: torch.dtype) -> None:
        self.method = method
        salient = method.salient(method.saliency(prefill))
        self.zipped = Zipped(prefill.keys, prefill.values, salient, method.codecs)
        self.room = method.interval if growth is None else min(growth, method.interval)
        self.tail = TokenBuffer(prefill.keys[:, :0], prefill.values[:, :0], self.room, dtype)
        self.decoded = Decoded(dtype, kept=False)
        self.weights: list[Tensor] = []
        """Attention of the last forward's queries to the exact tokens, `[heads, queries, exact]`, where it matters."""

    def settle(self, coming: int) -> None:
        """Compress everything again as often as `interval` exact tokens are there."""
        self.fresh = 0
        while self.tail.used >= self.method.interval:
            self._compress(self.method.interval)
        self.weights = []
        self.tail.resize(max(self.room, self.tail.used))

    def _compress(self, count: int) -> None:
        scores = torch.cat(self.weights, dim=1)[:, -1, :count]
        self.weights = [weights[:, :, count:] for weights in self.weights]
        salient = torch.cat([self.zipped.salient, self.method.salient(scores)], dim=1)
        keys, values = self.zipped.decode()
        keys = torch.cat([keys, self.tail.keys[:, :count].float()], dim=1)
        values = torch.cat([values, self.tail.values[:, :count].float()], dim=1)
        self.zipped = Zipped(keys, values, salient, self.method.codecs)
        self.decoded.forget()
        self.tail.drop_first(count)

    def append(self, keys: Float[Tensor, "heads new dim"], values: Float[Tensor, "heads new dim"]) -> None:
        """Take in the tokens of a forward."""
        self.tail.append(keys, values)

    def observe(self, heads: slice, weights: Float[Tensor, "heads group some tokens"]) -> None:
        """Keep the attention to the exact tokens, summed over the query heads of a group, if they are due."""
        if self.tail.used >= self.method.interval:
            self.weights.append(weights[..., self.zipped.tokens :].sum(dim=1))

    def blocks(self) -> Iterator[Block]:
        """All heads."""
        exact = self.tail.keys, self.tail.values
        tokens = self.decoded.tokens(self.zipped.tokens, lambda start: self.zipped.decode(), exact)
        yield Block(slice(0, self.zipped.heads), *tokens)

    def keep_decoded(self, dtype: torch.dtype) -> None:
        """From now on decode no code twice, unless it was made anew."""
        self.decoded = Decoded(self.tail.keys.dtype, dtype)

    def undo(self, count: int) -> None:
        """Remove the last `count` tokens."""
        self.tail.shorten(count)
        self.fresh -= count
        if self.weights:
            self.weights = [torch.cat(self.weights, dim=1)[:, : self.fresh, : self.tail.used]]

    def memory(self) -> MemoryReport:
        """Exact tokens count as full precision; attention that waits for the next forward is the ledger. What a draft
        takes beyond the room is workspace."""
        token = self.tail.reserved_bytes // max(1, self.tail.capacity)
        beyond = max(0, self.tail.capacity - self.room) * token
        waiting = sum(weights.nbytes for weights in self.weights)
        return self.zipped.memory() + MemoryReport(
            full=self.tail.used_bytes - max(0, self.tail.used - self.room) * token,
            position=2 * POSITION_BYTES,  # tokens in codes, exact tokens
            ledger=waiting,
            reserved=2 * POSITION_BYTES + self.tail.reserved_bytes - beyond + waiting,
            workspace=beyond + self.decoded.nbytes,
        )
