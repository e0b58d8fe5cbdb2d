"""From a sample to token ids, and how long a prompt is."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from qevict.bench.sample import Sample

_TURN_HERE = "<|the user's turn goes here|>"


def prompt_ids(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> tuple[list[int], list[int]]:
    """Token ids of the context with all that stands before it, and of the question with all that comes after it.

    The two are tokenized apart, so that a prompt is the same tokens whether or not the question is seen while the
    context is compressed. The user's turn is `context + question`; the answer prefix follows the template's opening of
    the assistant's turn. Without a chat template (or with `sample.chat` false) the tokenizer's own special tokens come
    first.
    """
    chat = sample.chat and tokenizer.chat_template is not None
    before, after = _around_turn(tokenizer) if chat else ("", "")
    head, tail = before + sample.context, sample.question + after + sample.answer_prefix
    return _ids(tokenizer, head, special=not chat), _ids(tokenizer, tail, special=not chat and not head)


def token_count(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> int:
    """Tokens that a sample takes in all: chat template, context, question, answer prefix and `max_new_tokens`.

    This is what RULER's lengths count.
    """
    context, question = prompt_ids(tokenizer, sample)
    return len(context) + len(question) + sample.max_new_tokens


def _around_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    messages = [{"role": "user", "content": _TURN_HERE}]
    rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    before, after = rendered.split(_TURN_HERE)
    return before, after


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids) if text else []
