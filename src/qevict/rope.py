"""Rotary embedding as data: what a layer did to its keys, and how to undo and redo it at absolute positions.

Keys are quantised before the rotation, where a channel's range over a window is small (paper, section 4.3), and rotated
again after dequantisation. `rope_for_layers` copies each layer's frequencies out of the model and checks them against
the model's own rotary function; a `Rope` never holds the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from qevict.architectures import attention_modules, decoder, describe, rope_parameters, text_config

Layout = Literal["half", "interleaved"]

_GROWTH = 1024  # table rows added at a time, so that decoding does not copy the tables at every step
_EIGHT = 8  # numbers that a kernel reads at once
_PROBE_POSITIONS = (0, 1, 2, 3, 5, 7)  # below every longrope switch
_APPLY = "apply_rotary_pos_emb"


class Rope:
    """One layer's rotary embedding.

    The pair p of channels turns at position t by the angle t * inv_freq[p] and is stretched by `scaling` (YaRN's m).
    The pairs fill the first `rotary_dim` channels, as (p, p + rotary_dim / 2) in the layout "half" and as
    (2p, 2p + 1) in "interleaved"; the channels behind them pass unchanged. With no frequencies it is the identity.

    cos and sin are rounded to `dtype`, as the model rounds them, so that `unrotate` inverts what the model did and not
    what it should have done. They are kept in tables that grow with the positions asked for, one pair for each device.
    """

    def __init__(
        self,
        inv_freq: Float[Tensor, " pairs"],
        *,
        scaling: float = 1.0,
        layout: Layout = "half",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.inv_freq = inv_freq.detach().to(torch.float32, copy=True)
        self.scaling = scaling
        self.layout = layout
        self.dtype = dtype
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._padded: tuple[Tensor, Tensor] | None = None

    @classmethod
    def identity(cls) -> Rope:
        """The rotary embedding of a layer that has none."""
        return cls(torch.empty(0))

    @property
    def rotary_dim(self) -> int:
        """How many leading channels turn."""
        return 2 * len(self.inv_freq)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the tables held now, on all devices."""
        held = [*self._tables.values(), *([] if self._padded is None else [self._padded])]
        return sum(table.nbytes for tables in held for table in tables)

    def tables(
        self, length: int, device: torch.device
    ) -> tuple[Float[Tensor, "positions pairs"], Float[Tensor, "positions pairs"]]:
        """cos and sin of positions 0 to at least `length` - 1 on `device`, scaled and rounded to `dtype`."""
        held = self._tables.get(device)
        rows = 0 if held is None else len(held[0])
        if held is None or rows < length:
            new = self._rows(rows, -(-length // _GROWTH) * _GROWTH, device)
            held = new if held is None else (torch.cat((held[0], new[0])), torch.cat((held[1], new[1])))
            self._tables[device] = held
        return held

    def padded_tables(
        self, length: int
    ) -> tuple[Float[Tensor, "padded_positions padded_pairs"], Float[Tensor, "padded_positions padded_pairs"]]:
        """`tables` for kernels: float32, on the CPU, in whole eights: behind each row pairs that do not turn."""
        held = self._padded
        if held is None or held[0].shape[0] - _EIGHT < length:
            cos, sin = self.tables(length, torch.device("cpu"))
            held = _padded(cos, 1.0), _padded(sin, 0.0)
            self._padded = held
        return held

    def rotate(
        self, keys: Float[Tensor, "*batch tokens dim"], positions: Int[Tensor, "*#batch tokens"]
    ) -> Float[Tensor, "*batch tokens dim"]:
        """Keys as the model rotates them, in float32.

        `positions` are absolute and broadcast over the leading dimensions: [batch, 1, tokens] for keys of shape
        [batch, kv_heads, tokens, head_dim]. Raises ValueError for negative positions.
        """
        cos, sin = self._at(positions, keys.device)
        return self._turn(keys, cos, sin)

    def unrotate(
        self, keys: Float[Tensor, "*batch tokens dim"], positions: Int[Tensor, "*#batch tokens"]
    ) -> Float[Tensor, "*batch tokens dim"]:
        """The inverse of `rotate`, in float32: keys as they were before the model rotated them."""
        cos, sin = self._at(positions, keys.device)
        # rounded and scaled, (cos, sin) is no longer a unit vector
        squared = cos * cos + sin * sin
        return self._turn(keys, cos / squared, -sin / squared)

    def paired_mean(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Both channels of a pair take the mean of the two; the others stay."""
        mean = x.clone()
        first, second = self._pairs(x)
        for part in self._pairs(mean):
            part.copy_((first + second) / 2)
        return mean

    def _rows(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        # the model's own order of operations: angles and scaling in float32, then the rounding
        angles = torch.arange(start, stop, device=device).float()[:, None] * self.inv_freq.to(device)
        return (angles.cos() * self.scaling).to(self.dtype), (angles.sin() * self.scaling).to(self.dtype)

    def _at(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        length = 0
        if positions.numel():
            lowest, highest = torch.stack(positions.aminmax()).tolist()
            if lowest < 0:
                raise ValueError(f"positions must not be negative, but the lowest is {lowest}.")
            length = highest + 1
        cos, sin = self.tables(length, device)
        positions = positions.to(device)
        return cos[positions].float(), sin[positions].float()

    def _turn(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = keys.to(torch.float32, copy=True)
        first, second = self._pairs(keys)
        turned_first, turned_second = self._pairs(turned)
        turned_first.copy_(first * cos - second * sin)
        turned_second.copy_(second * cos + first * sin)
        return turned

    def _pairs(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        turning = keys[..., : self.rotary_dim]
        if self.layout == "interleaved":
            return turning[..., 0::2], turning[..., 1::2]
        return turning[..., : self.rotary_dim // 2], turning[..., self.rotary_dim // 2 :]


def _padded(table: Float[Tensor, "positions pairs"], behind: float) -> Float[Tensor, "padded_positions padded_pairs"]:
    padding = (0, -table.shape[1] % _EIGHT, 0, _EIGHT)
    return torch.nn.functional.pad(table.float(), padding, value=behind).contiguous()


class TableRope(Rope):
    """A rotary embedding whose model holds finished tables of cos and sin, as GPT-J does, instead of frequencies."""

    def __init__(
        self,
        cos: Float[Tensor, "positions pairs"],
        sin: Float[Tensor, "positions pairs"],
        *,
        layout: Layout,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(torch.empty(0), layout=layout, dtype=dtype)
        self.cos = cos.detach().to(dtype, copy=True)
        self.sin = sin.detach().to(dtype, copy=True)

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[-1]

    def tables(
        self, length: int, device: torch.device
    ) -> tuple[Float[Tensor, "positions pairs"], Float[Tensor, "positions pairs"]]:
        """cos and sin of every position that the model knows; raises ValueError when `length` exceeds them."""
        if length > len(self.cos):
            raise ValueError(f"the model has rotary tables for {len(self.cos)} positions, and {length} were asked for.")
        if device not in self._tables:
            self._tables[device] = (self.cos.to(device), self.sin.to(device))
        return self._tables[device]


def rope_for_layers(model: PreTrainedModel) -> list[Rope]:
    """The rotary embedding of each decoder layer; layers that rotate alike share one object.

    Frequencies are copied from the model as it is now (a model cast to bfloat16 has rounded ones), for longrope those
    below its switch. Every rope is checked against the model's own rotary function.
    Raises ValueError when neither layout reproduces that function, when the model has several rotary modules or none
    where its config announces one, and for the type "dynamic".
    """
    config = text_config(model)
    if any(parameters.get("rope_type") == "dynamic" for parameters in rope_parameters(config)):
        raise ValueError(f"the {config.model_type} model's rope type is dynamic, whose tables change with the length.")
    architecture = describe(model)
    attentions = attention_modules(model)
    rotary = _rotary_module(model)
    identity = Rope.identity()
    shared: dict[str, Rope] = {}  # by layer type where each has its own tables (Gemma 3), else under ""
    ropes = []
    for index, layer_type in enumerate(architecture.layer_types):
        attention = attentions.get(index)
        # use_rope is SmolLM3's name for its layers without rotary embedding
        if rotary is None or attention is None or not getattr(attention, "use_rope", True):
            ropes.append(identity)
            continue
        key = layer_type if hasattr(rotary, f"{layer_type}_inv_freq") else ""
        if key not in shared:
            shared[key] = _checked(_candidates(model, rotary, key), attention)
        ropes.append(shared[key])
    return ropes


def _rotary_module(model: PreTrainedModel) -> nn.Module | None:
    """The decoder's one rotary module: that with frequencies, or (GPT-J) the first with a table of positions."""
    modules = list(decoder(model).modules())
    tabled = [module for module in modules if isinstance(getattr(module, "embed_positions", None), Tensor)]
    if tabled:
        return tabled[0]  # older GPT-Js hold the same table in every layer
    # a decoder's own module serves its layers, which may hold unused ones as well (Nemotron on 5.2)
    owned = [module for module in decoder(model).children() if _has_frequencies(module)]
    with_frequencies = owned or [module for module in modules if _has_frequencies(module)]
    if len(with_frequencies) > 1:
        raise ValueError(
            f"the {model.config.model_type} model has {len(with_frequencies)} rotary modules, and qevict cannot tell "
            "which layer uses which."
        )
    if not with_frequencies and rope_parameters(text_config(model)):
        raise ValueError(
            f"the {model.config.model_type} config has rope_parameters, but qevict finds no rotary module in the model "
            "(one with inv_freq)."
        )
    return with_frequencies[0] if with_frequencies else None


def _has_frequencies(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _candidates(model: PreTrainedModel, rotary: nn.Module, layer_type: str) -> tuple[list[Rope], Tensor, Tensor]:
    """The rotary module's data in both layouts, with the cos and sin that it makes at the probe positions."""
    dtype = cast(nn.Embedding, model.get_input_embeddings()).weight.dtype  # that of the activations
    table = getattr(rotary, "embed_positions", None)
    if isinstance(table, Tensor):
        sin, cos = table.detach().chunk(2, dim=-1)
        rows = list(_PROBE_POSITIONS)
        ropes: list[Rope] = [TableRope(cos, sin, layout=layout, dtype=dtype) for layout in get_args(Layout)]
        return ropes, cos[None, rows].to(dtype), sin[None, rows].to(dtype)
    prefix = f"{layer_type}_" if layer_type else ""
    device = cast(Tensor, getattr(rotary, f"{prefix}inv_freq")).device
    positions = torch.tensor([_PROBE_POSITIONS], device=device)
    activations = torch.zeros(1, len(_PROBE_POSITIONS), 1, dtype=dtype, device=device)
    with torch.no_grad():
        # before the frequencies are read: for longrope this call is what puts the short ones in place
        cos, sin = rotary(activations, positions, **({"layer_type": layer_type} if layer_type else {}))
    inv_freq = getattr(rotary, f"{prefix}inv_freq")
    scaling = float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
    ropes = [Rope(inv_freq, scaling=scaling, layout=layout, dtype=cos.dtype) for layout in get_args(Layout)]
    return ropes, cos, sin


def _checked(candidates: tuple[list[Rope], Tensor, Tensor], attention: nn.Module) -> Rope:
    """The candidate that does what the modeling file's own rotary function does with the model's cos and sin."""
    ropes, cos, sin = candidates
    apply = _own_function(attention)
    positions = torch.tensor(_PROBE_POSITIONS, device=cos.device)
    for rope in ropes:
        shape = (1, 1, len(_PROBE_POSITIONS), rope.rotary_dim)
        keys = torch.arange(1, 1 + shape[2] * shape[3], device=cos.device).float().sin().view(shape)
        if isinstance(rope, TableRope):  # GPT-J's takes one tensor of shape [batch, tokens, heads, head_dim]
            theirs = apply(keys.transpose(1, 2), sin.float(), cos.float()).transpose(1, 2)
        else:
            theirs = apply(keys, keys, cos.float(), sin.float())[1]
        # tables in 16 bits may differ by a rounding; a wrong layout differs by order 1
        tolerance = 1e-5 if rope.dtype == torch.float32 else 2e-2
        if theirs.shape == keys.shape and torch.allclose(theirs, rope.rotate(keys, positions), rtol=0, atol=tolerance):
            return rope
    raise ValueError(
        f"qevict cannot reproduce the rotary embedding of {type(attention).__name__}: its {_APPLY} is neither the "
        "half-split nor the interleaved rotation by the frequencies of the model's rotary module."
    )


def _own_function(attention: nn.Module) -> Callable[..., Any]:
    for base in type(attention).__mro__:
        function = getattr(sys.modules.get(base.__module__), _APPLY, None)
        if function is not None:
            return cast(Callable[..., Any], function)
    raise ValueError(
        f"qevict finds no {_APPLY} beside {type(attention).__name__} to check its rotary embedding against."
    )
