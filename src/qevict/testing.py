"""What every method has to do, as checks that a new one can be put through: `check_method(MyMethod())`.

Runs on tiny random models (MHA, GQA and MQA) in a few seconds; an AssertionError says what does not hold.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from qevict.budget import InfeasibleBudgetError
from qevict.compat import cache_argument
from qevict.config import Budget
from qevict.methods.base import Described, Method
from qevict.methods.cache import MethodCache, MethodLayer
from qevict.methods.registry import make_cache
from qevict.rope import Rope
from qevict.trace import PrefillTrace

_VOCABULARY = 128
_PROMPT = 150
_NEW = 8
_BUDGET = 0.5
# What a store may refer to and does not hold: constants, and what all rows and layers share.
_SHARED = (str, bytes, int, float, type, torch.dtype, torch.nn.Module, Rope)


def tiny_llama(kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A seeded random Llama of two layers and four query heads, whose attention is far from uniform."""
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(kv_heads)
        return LlamaForCausalLM(config).to(dtype).eval()


def check_method(method: Described) -> None:
    """Put a method through everything that users rely on.

    Settings are frozen; without a limit an eviction method is full KV; measured bytes are those of the storages and
    obey the budget at every step, in both scopes; a row of a left-padded batch is that row alone; rows can be chosen
    and permuted; drafted tokens can be undone; a cache filled from a trace is the one made in the model; more tokens
    than announced are taken; nothing is left behind on the model; every supported dtype works.

    Args:
        method: with settings that work on a prompt of 150 tokens.

    Raises:
        AssertionError: saying what does not hold.
    """
    check_settings(method)
    scoped = Budget(fraction=_BUDGET if method.takes_budget else 1.0, scope="prompt")
    limit = Budget(fraction=scoped.fraction)
    for kv_heads in (4, 2, 1):
        model = tiny_llama(kv_heads)
        if method.takes_budget:
            check_identity(method, model)
        check_bytes(method, model, limit)
    model = tiny_llama()
    if method.takes_budget:
        check_bytes(method, model, scoped)
        check_tight(method, model)
    check_unannounced_tokens(method, model, limit)
    check_leaves_nothing_behind(method, tiny_llama(), limit)
    if isinstance(method, Method):
        check_trace(method, model, limit)
        check_rows(method, model, limit)
        check_undo(method, model, scoped)
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny_llama(dtype=dtype)
        logits = _logits(model, _cache(method, model, limit), _ids(_PROMPT), _ids(_NEW, seed=9))
        _hold(bool(logits.isfinite().all()), method, f"gives logits that are not finite in {dtype}")


def check_tight(method: Described, model: PreTrainedModel) -> None:
    """A few tokens' bytes are obeyed, too, or refused."""
    for fraction in (0.3, 0.12, 0.03):
        with suppress(InfeasibleBudgetError):
            check_bytes(method, model, Budget(fraction=fraction))


def check_settings(method: Described) -> None:
    """Settings are a frozen dataclass that says who it is."""
    _hold(dataclasses.is_dataclass(method), method, "is no dataclass")
    frozen = getattr(type(method), "__dataclass_params__").frozen  # noqa: B009
    _hold(frozen, method, "is not frozen: @dataclass(frozen=True)")
    for name in ("name", "paper", "kind", "properties"):
        _hold(hasattr(method, name), method, f"does not declare {name}")
    _hold(copy.deepcopy(method) == method, method, "is not equal to its copy")


def check_identity(method: Described, model: PreTrainedModel) -> None:
    """Without a limit the tokens are those of the uncompressed cache."""
    ids = _ids(_PROMPT)
    full = _generate(model, DynamicCache(config=model.config), ids)
    ours = _generate(model, _cache(method, model, Budget(fraction=1.0)), ids)
    _hold(torch.equal(full, ours), method, f"with budget 1.0 generates {ours.tolist()}, full KV {full.tolist()}")


def check_bytes(method: Described, model: PreTrainedModel, limit: Budget) -> None:
    """Measured bytes are those of the storages, and obey the budget at every step.

    Raises:
        InfeasibleBudgetError: if the budget cannot hold what the method must keep, which is no fault.
    """
    cache = _cache(method, model, limit)
    for _ in _steps(model, cache, _ids(_PROMPT), _ids(_NEW, seed=9)):
        memory = cache.memory()
        _hold(memory.used <= memory.reserved, method, f"uses {memory.used} bytes of {memory.reserved} reserved")
        if memory.budget is not None and method.takes_budget:
            _hold(memory.overshoot == 0, method, f"holds {memory.reserved} bytes with a budget of {limit}: {memory}")
        if isinstance(cache, MethodCache):
            rows = [row.store for layer in cache.managed if isinstance(layer, MethodLayer) for row in layer.rows]
            held = held_bytes(rows)
            _hold(held <= memory.reserved, method, f"holds tensors of {held} bytes and reports {memory.reserved}")


def check_trace(method: Method, model: PreTrainedModel, limit: Budget) -> None:
    """A cache filled from a trace is the one that the model fills."""
    ids, new = _ids(_PROMPT), _ids(_NEW, seed=9)
    filled = _cache(method, model, limit)
    PrefillTrace.capture(model, ids, queries=method.observed_queries, hidden=method.needs_hidden).fill(filled)
    made = _cache(method, model, limit)
    expected = _logits(model, made, ids, new)
    got = torch.cat([_forward(model, filled, new[:, i : i + 1]) for i in range(new.shape[1])], dim=1)
    _hold(torch.equal(got, expected), method, f"differs between a trace and the model with a budget of {limit}")
    _hold(filled.memory() == made.memory(), method, "takes other bytes when filled from a trace")


def check_undo(method: Method, model: PreTrainedModel, limit: Budget) -> None:
    """Tokens that were drafted and cropped have never been there.

    Where generated tokens may be evicted, room for a draft is made for good, so `limit` is of scope "prompt".
    """
    ids, new = _ids(_PROMPT), _ids(_NEW, seed=9)
    plain, drafted = _cache(method, model, limit), _cache(method, model, limit)
    _forward(model, plain, ids)
    _forward(model, drafted, ids)
    for step in range(new.shape[1]):
        _forward(model, drafted, _ids(3, seed=step))
        drafted.crop(-3)
        _hold(drafted.get_seq_length() == plain.get_seq_length(), method, "counts tokens that were cropped")
        expected, got = (_forward(model, cache, new[:, step : step + 1]) for cache in (plain, drafted))
        _hold(torch.allclose(got, expected, atol=1e-4), method, "remembers tokens that were cropped")


def check_rows(method: Method, model: PreTrainedModel, limit: Budget) -> None:
    """Rows are independent: padding does not matter, and rows can be permuted, chosen and repeated."""
    rows = [_ids(length, seed=length) for length in (_PROMPT, _PROMPT - 31, _PROMPT - 12)]
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows])
    cache = _cache(method, model, limit)
    if method.one_row:
        try:
            _generate(model, cache, ids, mask)
        except ValueError:
            return
        raise AssertionError(f"{method.label} is defined for one sequence and takes a batch without a word")
    try:
        alone = [_generate(model, _cache(method, model, limit), row) for row in rows]
    except InfeasibleBudgetError:  # of the shorter rows
        return
    together = _generate(model, cache, ids, mask)
    for index, row in enumerate(alone):
        _hold(
            torch.equal(together[index], row[0]), method, f"gives row {index} of a padded batch other tokens than alone"
        )

    even = torch.cat([rows[0], _ids(_PROMPT, seed=5), _ids(_PROMPT, seed=6)])
    new = torch.cat([_ids(_NEW, seed=seed) for seed in (7, 8, 9)])
    plain, moved = _cache(method, model, limit), _cache(method, model, limit)
    _forward(model, plain, even)
    _forward(model, moved, even)
    moved.batch_select_indices(torch.tensor([2, 0]))
    moved.batch_repeat_interleave(2)
    moved.reorder_cache(torch.tensor([0, 2]))
    for step in range(new.shape[1]):
        expected = _forward(model, plain, new[:, step : step + 1])[[2, 0]]
        got = _forward(model, moved, new[[2, 0], step : step + 1])
        _hold(torch.allclose(got, expected, atol=1e-4), method, "mixes rows up when they are chosen or permuted")


def check_unannounced_tokens(method: Described, model: PreTrainedModel, limit: Budget) -> None:
    """Generating past what was announced works."""
    new = _ids(2 * _NEW, seed=3)
    logits = _logits(model, _cache(method, model, limit), _ids(_PROMPT), new)
    _hold(bool(logits.isfinite().all()), method, "gives logits that are not finite past the announced tokens")


def check_leaves_nothing_behind(method: Described, model: PreTrainedModel, limit: Budget) -> None:
    """Two runs in turn give the same, and the model, a fresh one, stays as it was for everybody else."""
    ids, new = _ids(_PROMPT), _ids(4, seed=9)
    before = _logits(model, DynamicCache(config=model.config), ids, new)
    attributes = _attributes(model)
    first = _logits(model, _cache(method, model, limit), ids, new)
    second = _logits(model, _cache(method, model, limit), ids, new)
    _hold(torch.equal(first, second), method, "gives another result when it is run again")
    after = _logits(model, DynamicCache(config=model.config), ids, new)
    _hold(torch.equal(before, after), method, "changes what the model computes with other caches")
    _hold(_attributes(model) == attributes, method, "leaves attributes or hooks behind on the model's modules")


def held_bytes(held: Any) -> int:
    """Bytes of the distinct tensor storages that can be reached from an object, its attributes and its elements."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    stack = [held]
    while stack:
        item = stack.pop()
        if id(item) in seen or item is None or isinstance(item, _SHARED):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set):
            stack.extend(item)
        else:
            stack.extend(vars(item).values() if hasattr(item, "__dict__") else ())
            stack.extend(getattr(item, name, None) for name in getattr(type(item), "__slots__", ()))
    return sum(storages.values())


def _cache(method: Described, model: PreTrainedModel, limit: Budget) -> Any:
    return make_cache(model, method, limit, max_new_tokens=_NEW)


def _ids(tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, _VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _forward(model: PreTrainedModel, cache: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, **cache_argument(cache)).logits
    return logits


def _steps(model: PreTrainedModel, cache: Any, ids: Tensor, new: Tensor) -> Iterator[Tensor]:
    """Logits after the prompt, then after each of the new tokens, fed one by one."""
    yield _forward(model, cache, ids)
    for step in range(new.shape[1]):
        yield _forward(model, cache, new[:, step : step + 1])


def _logits(model: PreTrainedModel, cache: Any, ids: Tensor, new: Tensor) -> Tensor:
    """Logits of the new tokens, fed one by one."""
    return torch.cat(list(_steps(model, cache, ids, new))[1:], dim=1)


def _generate(model: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=_NEW,
        do_sample=False,
        pad_token_id=0,
        **cache_argument(cache),
    )
    assert isinstance(output, torch.Tensor)
    return output[:, ids.shape[1] :]


def _attributes(model: PreTrainedModel) -> dict[str, list[str]]:
    """Names of everything on every module, hooks by their number."""
    found = {}
    for name, module in model.named_modules():
        hooks = [f"{key}: {len(value)}" for key, value in vars(module).items() if "hooks" in key and value is not None]
        found[name] = sorted([*vars(module), *hooks])
    return found


def _hold(holds: bool, method: Described, fault: str) -> None:
    if not holds:
        raise AssertionError(f"{method.label} {fault}")
