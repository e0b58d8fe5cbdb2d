"""Which prompt tokens the eviction methods keep, from their definitions, one token at a time.

Everything is lists of Python floats; `attention[head][member][query][token]` are the probabilities of all queries.
"""

from __future__ import annotations

import math
from typing import Any

from qevict.methods.base import LayerPrefill

Row = list[float]


def attention(prefill: LayerPrefill) -> list[list[list[Row]]]:
    """Causal attention probabilities of every query of the prompt."""
    result = []
    for head, keys in enumerate(prefill.keys.tolist()):
        members = []
        for queries in prefill.query[head].tolist():
            rows = []
            for place, query in enumerate(queries):
                logits = [prefill.scaling * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
                powers = [math.exp(x - max(logits)) if t <= place else 0.0 for t, x in enumerate(logits)]
                rows.append([power / sum(powers) for power in powers])
            members.append(rows)
        result.append(members)
    return result


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def top(scores: Row, count: int) -> list[int]:
    """Ascending indices of the highest scores, the later of two equal ones first."""
    return sorted(sorted(range(len(scores)), key=lambda t: (scores[t], t), reverse=True)[:count])


def pooled(scores: Row, kernel: int, how: str) -> Row:
    """Maximum or average over the neighbours; beyond the ends there are zeros."""
    half, result = kernel // 2, []
    for place in range(len(scores)):
        near = [scores[t] if 0 <= t < len(scores) else 0.0 for t in range(place - half, place + half + 1)]
        result.append(max(near) if how == "max" else sum(near) / kernel)
    return result


def snapkv_votes(prefill: LayerPrefill, window: int, kernel: int, how: str) -> list[Row]:
    votes = []
    for members in attention(prefill):
        asking = [rows[-window:] for rows in members]
        earlier = range(prefill.tokens - window)
        average = [mean([row[t] for rows in asking for row in rows]) for t in earlier]
        votes.append(pooled(average, kernel, how))
    return votes


def snapkv_scores(prefill: LayerPrefill, window: int, kernel: int, how: str) -> list[Row]:
    return [row + [math.inf] * window for row in snapkv_votes(prefill, window, kernel, how)]


def snapkv(prefill: LayerPrefill, tokens: int, window: int, kernel: int, how: str) -> list[list[int]]:
    return [top(row, tokens) for row in snapkv_scores(prefill, window, kernel, how)]


def counts(scores: list[Row], total: int) -> list[int]:
    """How many of the best `total` of all heads each head has."""
    flat = [(score, head, t) for head, row in enumerate(scores) for t, score in enumerate(row)]
    chosen = sorted(flat, reverse=True)[:total]
    return [sum(1 for _, h, _ in chosen if h == head) for head in range(len(scores))]


def floor_budgets(scores: list[Row], tokens: int, alpha: float) -> list[int]:
    """kvpress's safeguard: the best share of each head does not compete."""
    safe = max(1, int(alpha * tokens)) if alpha > 0 else 0
    secured = [[math.inf if t in top(row, safe) else x for t, x in enumerate(row)] for row in scores]
    return counts(secured, tokens * len(scores))


def blend_budgets(scores: list[Row], tokens: int, alpha: float, window: int) -> tuple[list[float], int]:
    """The authors' safeguard before it is rounded, and what the rounded budgets have to add up to."""
    even = tokens - window
    numbers = counts([row[:-window] for row in scores], even * len(scores))
    return [window + (1 - alpha) * n + alpha * even for n in numbers], tokens * len(scores)


def output_norms(prefill: LayerPrefill) -> list[Row]:
    """L1 norm of W_o v, averaged over the group."""
    weight: Any = prefill.module.o_proj.weight.tolist()
    heads, group, dim = prefill.keys.shape[0], prefill.query.shape[1], prefill.keys.shape[2]
    result = []
    for head in range(heads):
        row = []
        for value in prefill.values[head].tolist():
            norms = []
            for member in range(group):
                start = (head * group + member) * dim
                norms.append(sum(abs(sum(line[start + d] * value[d] for d in range(dim))) for line in weight))
            row.append(mean(norms))
        result.append(row)
    return result


def two_stages(scores: Row, norms: Row, epsilon: float, first: int, budget: int) -> list[int]:
    early = top(scores, first)
    second = []
    for t, score in enumerate(scores):
        secured = t in early or score == math.inf
        second.append(math.inf if secured else (score + epsilon) * norms[t])
    return top(second, budget)


def defensive_scores(
    prefill: LayerPrefill, tokens: int, window: int, kernel: int, coverage: float, corrected: bool
) -> list[Row]:
    """Scores of all tokens; those that stay in any case just above the layer's best."""
    n = prefill.tokens - window
    asking = [[row for rows in members for row in rows[-window:]] for members in attention(prefill)]
    norms = output_norms(prefill)
    start = n if corrected else max(0, n - window)
    stop = prefill.tokens if corrected else n
    bias = mean([sum(row[start:stop]) for rows in asking for row in rows])
    scores, secured = [], []
    for head, rows in enumerate(asking):
        average = [mean([row[t] for row in rows]) for t in range(n)]
        falling = sorted(range(n), key=lambda t: (-average[t], t))
        reached, early = 0.0, set()
        for t in falling:
            reached += average[t] / sum(average)
            if reached >= coverage - bias or len(early) == tokens - window:
                break
            early.add(t)
        secured.append(early)
        worst = [0.0] * n
        for row in rows:
            smooth = pooled(row[:n], kernel, "avg")
            for t in range(n):
                worst[t] = max(worst[t], smooth[t] / sum(smooth) * sum(row[:n]))
        floor = mean(worst)
        shares = [norms[head][t] / sum(other[t] for other in norms) for t in range(n)]
        scores.append([max(worst[t], floor) * shares[t] for t in range(n)])
    above = max(max(row) for row in scores) * (1 + 1e-7)
    return [
        [above if t in early else x for t, x in enumerate(row)] + [above] * window
        for row, early in zip(scores, secured, strict=True)
    ]


def best_of_all(layers: list[list[Row]], tokens: int) -> list[list[list[int]]]:
    """The best of all heads of all layers."""
    flat = [(x, la, h, t) for la, rows in enumerate(layers) for h, row in enumerate(rows) for t, x in enumerate(row)]
    chosen = {entry[1:] for entry in sorted(flat, reverse=True)[: tokens * sum(len(rows) for rows in layers)]}
    return [
        [[t for t in range(len(row)) if (la, h, t) in chosen] for h, row in enumerate(rows)]
        for la, rows in enumerate(layers)
    ]


def chunkkv(prefill: LayerPrefill, tokens: int, window: int, kernel: int, how: str, chunk: int) -> list[int]:
    votes = snapkv_votes(prefill, window, kernel, how)
    largest = max(max(row) for row in votes)
    summed = [sum(row[t] if t < len(row) else largest + 1 for row in votes) for t in range(prefill.tokens)]
    chunks = [list(range(start, min(start + chunk, len(summed)))) for start in range(0, len(summed), chunk)]
    kept: list[int] = []
    for members in sorted(chunks, key=lambda members: -mean([summed[t] for t in members])):
        if len(kept) + len(members) <= tokens:
            kept += members
    return sorted(kept)


def received(prefill: LayerPrefill) -> list[Row]:
    """Attention that each token received, summed over queries and averaged over the group."""
    return [
        [sum(mean([rows[q][t] for rows in members]) for q in range(prefill.tokens)) for t in range(prefill.tokens)]
        for members in attention(prefill)
    ]


def heavy_and_recent(scores: Row, tokens: int, heavy: int) -> list[int]:
    recent = list(range(len(scores) - (tokens - heavy), len(scores)))
    return top(scores[: len(scores) - len(recent)], heavy) + recent


def last_attention(prefill: LayerPrefill) -> Row:
    """The last query's attention, averaged over all query heads."""
    weights = [rows[-1] for members in attention(prefill) for rows in members]
    return [mean([row[t] for row in weights]) for t in range(prefill.tokens)]


def key_norms(prefill: LayerPrefill) -> list[Row]:
    return [[-math.sqrt(sum(x * x for x in key)) for key in keys] for keys in prefill.keys.tolist()]


def expected_attention_scores(
    prefill: LayerPrefill, future: int, sinks: int, covariance: bool, value_norm: bool, epsilon: float
) -> list[Row]:
    """By rotating every prompt query to every future position; half-split rotation, as `prefills.make_rope` makes."""
    dim, freqs = prefill.keys.shape[2], prefill.rope.inv_freq.tolist()

    def turned(vector: Row, position: int) -> Row:
        half = dim // 2
        result = [0.0] * dim
        for p, freq in enumerate(freqs):
            a, b = vector[p], vector[p + half]
            cos, sin = math.cos(position * freq), math.sin(position * freq)
            result[p], result[p + half] = a * cos - b * sin, b * cos + a * sin
        return result

    end = prefill.first_position + prefill.tokens
    result = []
    for head, keys in enumerate(prefill.keys.tolist()):
        members = []
        for queries in prefill.query[head].tolist():
            ahead = []
            for t in range(sinks, prefill.tokens):
                bare = turned(queries[t], -(prefill.first_position + t))
                later = [turned(bare, end + step) for step in range(future)]
                ahead.append([mean([query[d] for query in later]) for d in range(dim)])
            m = [mean([query[d] for query in ahead]) for d in range(dim)]
            logits = []
            for key in keys[sinks:]:
                products = [sum((q[d] - m[d]) * key[d] for d in range(dim)) for q in ahead]
                spread = mean([x * x for x in products]) if covariance else 0.0
                logits.append(
                    prefill.scaling * sum(m[d] * key[d] for d in range(dim)) + prefill.scaling**2 * spread / 2
                )
            powers = [math.exp(x - max(logits)) for x in logits]
            members.append([power / sum(powers) for power in powers])
        scores = [mean([row[t] for row in members]) for t in range(prefill.tokens - sinks)]
        if value_norm:
            values = prefill.values[head].tolist()[sinks:]
            scores = [
                (x + epsilon) * math.sqrt(sum(v * v for v in value)) for x, value in zip(scores, values, strict=True)
            ]
        result.append([math.inf] * sinks + scores)
    return result
