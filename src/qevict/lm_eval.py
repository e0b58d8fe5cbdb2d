"""lm-evaluation-harness on a compressed cache: the model `qevict` beside the harness's `hf`.

    python -m qevict.lm_eval --model qevict --model_args pretrained=smollm2-135m,budget=0.2 --tasks gsm8k

is the harness's own command with one more model: it finds no models of other packages by itself. In Python, importing
this module is enough: `lm_eval.simple_evaluate(model="qevict", model_args={"pretrained": ..., "budget": 0.2}, ...)`.
Needs pip install 'qevict[lm-eval]'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel

from qevict.bench.cells import Scope, capture
from qevict.bench.decode import FORCED_CHUNK
from qevict.bench.forks import fork_forward
from qevict.compat import cache_argument
from qevict.config import Budget
from qevict.methods import get_method, make_cache
from qevict.models import resolve
from qevict.trace import read_prompt

Request = tuple[Any, list[int], list[int]]
"""What the harness calls it by, the tokens of the context, those of the continuation."""


@register_model("qevict")
class QEvictLM(HFLM):
    """A causal model whose cache keeps what a method keeps; everything else is the harness's `hf`.

    Prompts are prefilled but for their last token, compressed, and the last token is fed to the compressed cache, which
    so gives every generated token, the first one included. Continuations are scored the same way: the context is
    compressed, then the continuation is forced, some tokens a forward.

    Args:
        pretrained: as for `hf`, or smollm2-135m.
        method: of the cache, by name (`qevict methods`).
        budget: 20%, 512tokens, 24MB, or (None) 0.2 where the method takes one; fractions are of the prompt and of all
            tokens that may follow.
        scope: "prompt" for a fraction of the prompt alone; see `Budget`.
        store_dtype: of full-precision storage, such as bfloat16; None is the model's.
        allow_untested: accept model types that no test of qevict covers.
        options: those of `hf`.

    Raises:
        ValueError: if method, budget or model cannot be supported. While it runs, if a prompt is too short for a
            fractional budget to hold what the method must keep; an absolute budget keeps short prompts whole.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel = "smollm2-135m",
        *,
        method: str = "qevict",
        budget: str | float | int | None = None,
        scope: Scope = "total",
        store_dtype: str | torch.dtype | None = None,
        allow_untested: bool = False,
        **options: Any,
    ) -> None:
        self._method = get_method(method)
        if budget is None:
            budget = 0.2 if self._method.takes_budget else 1.0
        self._budget = dataclasses.replace(Budget.parse(str(budget)), scope=scope)
        self._store_dtype = getattr(torch, store_dtype) if isinstance(store_dtype, str) else store_dtype
        self._allow_untested = allow_untested
        found = str(resolve(pretrained)) if isinstance(pretrained, str) else pretrained
        super().__init__(pretrained=found, backend="causal", **options)
        self._cache(1)  # what cannot be supported is refused now

    def _cache(self, new_tokens: int) -> Any:
        return make_cache(
            self.model,
            self._method,
            self._budget,
            max_new_tokens=new_tokens,
            store_dtype=self._store_dtype,
            allow_untested=self._allow_untested,
        )

    @torch.no_grad()
    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Generate from a compressed cache; rows are padded on the left."""
        cache = self._cache(1 + max_length - context.shape[1])
        if context.shape[1] > 1:
            mask = generation_kwargs.get("attention_mask", torch.ones_like(context))
            read_prompt(self.model, cache, context[:, :-1], mask[:, :-1])
        generated: Tensor = super()._model_generate(
            context, max_length, stop, **generation_kwargs, **cache_argument(cache)
        )
        return generated

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is what greedy decoding says."""
        scores: dict[int, tuple[float, bool]] = {}
        of_context: dict[tuple[int, ...], list[int]] = {}
        for number, (_name, context, continuation) in enumerate(requests):
            kept = context[-max(1, self.max_length + 1 - len(continuation)) :]
            of_context.setdefault(tuple(kept), []).append(number)
        at_once = self.batch_size if isinstance(self.batch_size, int) else 1
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Scoring continuations") as bar:
            for shared, numbers in of_context.items():
                continuations = [(number, requests[number][2]) for number in numbers]
                for number, score in self._scores(shared, continuations, at_once):
                    scores[number] = score
                    name = requests[number][0]
                    if name is not None:
                        self.cache_hook.add_partial("loglikelihood", name, score)
                    bar.update()
        return [scores[number] for number in range(len(requests))]

    @torch.no_grad()
    def _scores(
        self, context: Sequence[int], continuations: Sequence[tuple[int, list[int]]], at_once: int
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Scores of numbered continuations of one context, which is prefilled once."""
        if len(context) < 2:
            raise ValueError(
                "a continuation without a context would be scored by the model alone: there is nothing to compress; "
                "choose tasks with contexts of at least 2 tokens"
            )
        trace = capture(self.model, context[:-1], [self._method])
        for start in range(0, len(continuations), at_once):
            rows = [
                _Continuation(number, [context[-1], *tokens[:-1]], tokens, trace.fill(self._cache(len(tokens))))
                for number, tokens in continuations[start : start + at_once]
            ]
            _force(self.model, rows)
            yield from ((row.number, (row.total, row.greedy)) for row in rows)

    def loglikelihood_rolling(self, requests: Iterable[Any], disable_tqdm: bool = False) -> NoReturn:
        """Refused.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "the perplexity of a whole text has no context to compress: its first tokens are scored before anything is "
            "kept; `qevict bench fidelity` measures the perplexity of what follows a compressed prompt"
        )


@dataclass
class _Continuation:
    """A continuation while it is forced.

    Attributes:
        fed: the context's last token, and all of its own but the last.
        expected: what each of them should be followed by.
        total: log-likelihood so far.
        greedy: whether every token so far was the likeliest.
    """

    number: int
    fed: list[int]
    expected: list[int]
    cache: Any
    total: float = 0.0
    greedy: bool = True


def _force(model: PreTrainedModel, rows: Sequence[_Continuation]) -> None:
    """Feed continuations together; each leaves when it is through."""
    for start in range(0, max(len(row.fed) for row in rows), FORCED_CHUNK):
        part = slice(start, start + FORCED_CHUNK)
        active = [row for row in rows if len(row.fed) > start]
        # Padding behind a row's last tokens is fed as well, when its cache has nothing left to say.
        tokens = pad_sequence([torch.tensor(row.fed[part]) for row in active], batch_first=True)
        logits = fork_forward(model, [row.cache for row in active], tokens, last_only=False)
        for row, own in zip(active, logits, strict=True):
            expected = torch.tensor(row.expected[part], device=own.device)
            scores = own[: len(expected)].float().log_softmax(dim=-1)
            row.total += float(scores.gather(1, expected[:, None]).sum())
            row.greedy &= bool((scores.argmax(dim=-1) == expected).all())


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
