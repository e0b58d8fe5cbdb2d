"""KVGeometry: the shape of a key-value cache, and what it costs uncompressed (Eq. 7)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVGeometry:
    """The layers that qevict manages, all of one shape.

    Attributes:
        layers: number of managed layers (L); sliding-window and other layers that keep their own cache are left out.
        kv_heads: key-value heads of a layer (H).
        query_heads: query heads of a layer (Q), a multiple of `kv_heads`.
        head_dim: dimension of a head (D), the same for keys and values.
        element_bytes: bytes of one stored full-precision element (c_f): 2 for bf16 and fp16, 4 for fp32.
    """

    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    element_bytes: int

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "query_heads", "head_dim", "element_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it has to be a whole number of at least 1")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"{self.query_heads} query heads cannot share {self.kv_heads} KV heads evenly")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    def full_bytes(self, tokens: int) -> int:
        """Bytes of `tokens` uncompressed tokens in all managed layers: Eq. 7, 2 L H d S c_f."""
        return self.layers * self.token_bytes * tokens
