"""What a user can get wrong ends in one sentence that says what was given, what is allowed and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driver import TIGHT, endless, forward, generate, prompt

from qevict import Budget, QEvictCache, QEvictConfig
from tiny import tiny_model

pytestmark = pytest.mark.contract


def test_budget_too_small_states_the_three_numbers() -> None:
    model = endless()
    cache = QEvictCache(model, TIGHT.replace(budget=Budget(tokens=10)))
    sentence = (
        r"^a budget of 5,120 bytes cannot hold the 15 protected tokens \(sinks, recent tokens and their growth between "
        r"routing events\), which take 7,[0-9]{3} bytes beside 320 bytes of the codec's parameters; raise the budget "
        r"or lower sink_tokens, .*"
    )
    with pytest.raises(ValueError, match=sentence):
        forward(model, cache, prompt(60))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"window_size": 0}, "window_size is 0; it has to be a whole number of at least 1"),
        ({"sink_tokens": -1}, "sink_tokens is -1; it has to be a whole number of at least 0"),
        ({"recent_tokens": -4}, "recent_tokens is -4; it has to be a whole number of at least 1"),
        ({"quantized_fraction": 1.5}, "quantized_fraction is 1.5; it has to be from 0 to 1"),
        ({"budget": -0.2}, "budget fraction is -0.2; it has to be above 0 and at most 1"),
        ({"store_dtype": torch.float64}, "store_dtype is torch.float64; it has to be None or one of"),
    ],
)
def test_wrong_settings(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        QEvictConfig(**wrong)


@pytest.mark.parametrize("name", ["max_new_tokens", "prompt_tokens"])
@pytest.mark.parametrize("value", [-1, True])
def test_wrong_announcements(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}; it has to be a whole number of at least 0"):
        QEvictCache(endless(), TIGHT, **{name: value})


@pytest.mark.parametrize("tokens", [0, -3, True])
def test_wrong_extension(tokens: Any) -> None:
    with pytest.raises(ValueError, match=r"tokens is .*; it has to be a whole number of at least 1"):
        QEvictCache(endless(), TIGHT).extend(tokens)


def test_fraction_without_announcement() -> None:
    with pytest.raises(ValueError, match=r"a budget of 0\.2 of full KV is a share of prompt .* give max_new_tokens="):
        QEvictCache(endless(), 0.2)


def test_empty_prompt() -> None:
    model = endless()
    with pytest.raises(ValueError, match="a forward needs at least one token; got an empty prompt"):
        forward(model, QEvictCache(model, TIGHT), prompt(60)[:, :0])


def test_untested_model_type_names_the_way_out() -> None:
    model = tiny_model("llama")
    model.config.model_type = "ministry"
    with pytest.raises(ValueError, match=r"was not tested with ministry models: .* or pass allow_untested=True"):
        QEvictCache(model, TIGHT)


def test_refused_model_type_and_layers() -> None:
    model = tiny_model("llama")
    model.config.attn_logit_softcapping = 50.0
    with pytest.raises(ValueError, match=r"cannot manage this llama model: its layers cap the attention logits"):
        QEvictCache(model, TIGHT)
    with pytest.raises(ValueError, match="its rotary embedding has the type dynamic"):
        QEvictCache(tiny_model("llama", rope="dynamic"), TIGHT)


@pytest.mark.parametrize("announced", [{}, {"max_new_tokens": 10, "prompt_tokens": 30}])
def test_no_layer_to_manage(announced: dict[str, int]) -> None:
    model = endless("mistral", sliding_window=16)
    with pytest.raises(ValueError, match="has no layer to manage in this mistral model: its layers are sliding"):
        forward(model, QEvictCache(model, TIGHT, **announced), prompt(60))


def test_a_sliding_layer_managed_as_full_never_passes_its_window() -> None:
    model = endless("mistral", sliding_window=48)
    cache = QEvictCache(model, TIGHT, max_new_tokens=8)
    forward(model, cache, prompt(40))
    with pytest.raises(ValueError, match=r"attends to the last 48 tokens only .* 52 tokens need a new cache"):
        cache.extend(12)
    for step in range(8):
        forward(model, cache, prompt(1, seed=step))
    with pytest.raises(ValueError, match=r"attends to the last 48 tokens only .* 49 tokens need a new cache"):
        forward(model, cache, prompt(1))
    cache.reset()
    with pytest.raises(ValueError, match=r"attends to the last 48 tokens only .* 60 tokens need a new cache"):
        forward(model, cache, prompt(60))


def test_wrong_model_dtype() -> None:
    with pytest.raises(ValueError, match=r"the model's dtype is torch.float64; float32, bfloat16 and float16 are"):
        QEvictCache(tiny_model("llama", dtype=torch.float64), TIGHT)


def test_cache_of_another_model() -> None:
    model, other = endless(), endless()
    QEvictCache(other, TIGHT)
    with pytest.raises(ValueError, match="was made for another model than the LlamaAttention that uses it; make one"):
        forward(other, QEvictCache(model, TIGHT), prompt(60))


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_implementation_set_back(implementation: str, family: str) -> None:
    model = endless(family)
    cache = QEvictCache(model, TIGHT)
    model.set_attn_implementation(implementation)
    with pytest.raises(RuntimeError, match=r"does not call its attention function; .* call qevict.attach\(model\)"):
        forward(model, cache, prompt(60))


def test_attaching_again_mends_an_implementation_set_back() -> None:
    from qevict import attach

    model, ids = endless(), prompt(60)
    expected = forward(model, QEvictCache(model, TIGHT), ids)
    cache = QEvictCache(model, TIGHT)
    model.set_attn_implementation("sdpa")
    attach(model)
    assert torch.equal(forward(model, cache, ids), expected)


@pytest.mark.parametrize("tokens", [30, 60, 90])
def test_a_full_cache_given_another_prompt(tokens: int) -> None:
    model = endless()
    cache = QEvictCache(model, TIGHT)
    generate(model, cache, prompt(60), 8)
    with pytest.raises(ValueError, match=r"reset\(\)"):
        forward(model, cache, prompt(tokens, seed=1), attention_mask=torch.ones(1, tokens, dtype=torch.long))
    assert cache.get_seq_length() == 67


def test_another_batch_size() -> None:
    model = endless()
    cache = QEvictCache(model, TIGHT)
    forward(model, cache, prompt(60, batch=2))
    with pytest.raises(ValueError, match=r"holds a batch of 2 rows and was given 3; use reset\(\)"):
        forward(model, cache, prompt(1, batch=3))


def test_4d_mask() -> None:
    model = endless()
    with pytest.raises(ValueError, match=r"takes a 2-D padding mask \[batch, tokens\]; got a mask of shape"):
        forward(model, QEvictCache(model, TIGHT), prompt(8), attention_mask=torch.zeros(1, 1, 8, 8))


@pytest.mark.parametrize("start", [59, 61])
def test_positions_that_do_not_follow(start: int) -> None:
    model = endless()
    cache = QEvictCache(model, TIGHT)
    forward(model, cache, prompt(60))
    with pytest.raises(ValueError, match=rf"row 0 continues at positions \[{start}.*the cache ends before position 60"):
        forward(model, cache, prompt(2), position_ids=torch.tensor([[start, start + 1]]))
    with pytest.raises(ValueError, match="positions have to be consecutive"):
        forward(model, cache, prompt(2), position_ids=torch.tensor([[60, 62]]))


def test_prompt_positions_with_a_gap() -> None:
    model = endless()
    positions = torch.cat([torch.arange(30), torch.arange(31, 61)])[None]
    with pytest.raises(ValueError, match="positions have to be consecutive"):
        forward(model, QEvictCache(model, TIGHT), prompt(60), position_ids=positions)


def test_a_row_of_nothing_but_padding() -> None:
    model = endless()
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1] = 0
    with pytest.raises(ValueError, match="row 1 of the batch has no tokens: its attention mask is all zeros"):
        generate(model, QEvictCache(model, TIGHT), {"input_ids": prompt(60, 2), "attention_mask": mask}, 2)


@pytest.mark.parametrize("announced", [{"prompt_tokens": 90}, {}])
def test_phi3_beyond_its_original_length(announced: dict[str, int]) -> None:
    model = endless("phi3", original_max_position_embeddings=64)
    with pytest.raises(ValueError, match=r"changes its rotary embedding at 64 tokens .* but 100 tokens were announced"):
        forward(model, QEvictCache(model, TIGHT, max_new_tokens=10, **announced), prompt(90))


def test_phi3_going_on_beyond_its_original_length() -> None:
    """generate() drops the user's cache there; the next use of the cache says so instead of going on."""
    model = endless("phi3", original_max_position_embeddings=64)
    cache = QEvictCache(model, TIGHT)
    tokens = generate(model, cache, prompt(60), 10)
    assert cache.get_seq_length() == 64
    with pytest.raises(ValueError, match="changes its rotary embedding at 64 tokens"):
        forward(model, cache, tokens[:, -1:])


def test_chunked_prefill_without_announcement() -> None:
    model = endless()
    cache = QEvictCache(model, TIGHT.replace(budget=0.5), max_new_tokens=10)
    chunks = prompt(160).split(40, dim=1)
    with pytest.raises(ValueError, match=r"pass the 50 that the budget of 0.5 of full KV was derived from; .* prompt"):
        [forward(model, cache, chunk) for chunk in chunks]


def test_a_turn_that_was_not_announced() -> None:
    model = endless()
    cache = QEvictCache(model, TIGHT.replace(budget=0.5), max_new_tokens=10)
    forward(model, cache, prompt(60))
    with pytest.raises(ValueError, match=r"100 tokens after 60 pass the 70 that .* call extend\(tokens\) first"):
        forward(model, cache, prompt(100))


@pytest.mark.parametrize("shape", [(1, 4, 60), (1, 60), (1, 2, 59)])
def test_a_prompt_scorer_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    model = endless()
    cache = QEvictCache(model, TIGHT.replace(prompt_scorer=lambda *_: torch.zeros(shape)))
    with pytest.raises(ValueError, match=r"the prompt scorer returned .*\[batch, kv_heads, tokens\], here"):
        forward(model, cache, prompt(60))


@pytest.mark.parametrize("function", [lambda state, mass: state.sum(), lambda state, mass: 3.0])
def test_a_ranking_function_of_the_wrong_kind(function: Any) -> None:
    model = endless()
    with pytest.raises(ValueError, match=r"the ranking function returned .*; it has to return a tensor of"):
        forward(model, QEvictCache(model, TIGHT.replace(ranking=function)), prompt(60))
