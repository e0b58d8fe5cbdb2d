"""What is done within a tile of 64 tokens: numbers to float32, keys to logits, weights and values to outputs.

Everything is at an address (see `simd`). A *row* is one query of one query head; the rows of a KV head share what is
read of its keys and values.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from numba import njit

from qevict.kernels import simd
from qevict.kernels.simd import (
    BFLOAT16,
    FLOAT32,
    add,
    add_wide,
    exp,
    load,
    load_one,
    load_one_wide,
    load_wide,
    maximum,
    multiply,
    multiply_add,
    multiply_add_wide,
    multiply_wide,
    splat,
    store,
    store_wide,
    subtract_product_wide,
)

TILE = 64
"""Tokens of a tile."""
BLOCK = 8
"""Numbers of a vector; also channels that are decoded together, and tokens whose values are."""
LINE = 64
"""Bytes of a cache line; a vector that lies in two takes twice as long."""
NOTHING = np.float32(-np.inf)
"""The logit of what is not seen."""

compiled = njit(nogil=True, fastmath={"contract"}, error_model="numpy")
inlined = njit(nogil=True, fastmath={"contract"}, error_model="numpy", forceinline=True)


# -- reading -----------------------------------------------------------------------------------------------------------


@compiled
@no_type_check
def convert(source, dtype, count, target):
    """`count` numbers of a storage (a multiple of 8) as float32."""
    if dtype == FLOAT32:
        for i in range(0, 4 * count, 32):
            store(target + i, load(source + i))
    elif dtype == BFLOAT16:
        for i in range(0, 2 * count, 16):
            store(target + 2 * i, simd.load_bfloat16(source + i))
    else:
        for i in range(0, 2 * count, 16):
            store(target + 2 * i, simd.load_float16(source + i))


# -- keys --------------------------------------------------------------------------------------------------------------


@inlined
@no_type_check
def add_products(keys, turns, cos, sin, queries, query_row, rows, logits, logits_row):
    """Turn eight channels of 64 keys, and add their products with the rows' queries to the rows' logits.

    Args:
        keys: 64 tokens a channel; four channels, then the four that turn with them.
        turns: for each of the four where its cosines and sines begin, in bytes from `cos` and `sin`.
        queries: the eight numbers of the first row; the next are `query_row` bytes apart.
        logits: the 64 of the first row; the next are `logits_row` bytes apart.
    """
    t0, t1, t2, t3 = turns
    channel = 4 * TILE
    for i in range(0, channel, 64):
        k = keys + i
        a0, b0 = turned(load_wide(k), load_wide(k + 4 * channel), cos + t0 + i, sin + t0 + i)
        a1, b1 = turned(load_wide(k + channel), load_wide(k + 5 * channel), cos + t1 + i, sin + t1 + i)
        a2, b2 = turned(load_wide(k + 2 * channel), load_wide(k + 6 * channel), cos + t2 + i, sin + t2 + i)
        a3, b3 = turned(load_wide(k + 3 * channel), load_wide(k + 7 * channel), cos + t3 + i, sin + t3 + i)
        for row in range(rows):
            target = logits + row * logits_row + i
            add_weighted(queries + row * query_row, a0, a1, a2, a3, b0, b1, b2, b3, target)


@inlined
@no_type_check
def turned(first, second, cos, sin):
    """Two channels of sixteen keys after a rotation by angles whose cosines and sines are at two addresses."""
    c, s = load_wide(cos), load_wide(sin)
    return subtract_product_wide(second, s, multiply_wide(first, c)), multiply_add_wide(
        first, s, multiply_wide(second, c)
    )


@inlined
@no_type_check
def add_weighted(factors, v0, v1, v2, v3, v4, v5, v6, v7, target):
    """Add to sixteen numbers eight vectors, each times a factor of its own."""
    x = multiply_add_wide(load_one_wide(factors), v0, load_wide(target))
    y = multiply_wide(load_one_wide(factors + 4), v1)
    x = multiply_add_wide(load_one_wide(factors + 8), v2, x)
    y = multiply_add_wide(load_one_wide(factors + 12), v3, y)
    x = multiply_add_wide(load_one_wide(factors + 16), v4, x)
    y = multiply_add_wide(load_one_wide(factors + 20), v5, y)
    x = multiply_add_wide(load_one_wide(factors + 24), v6, x)
    y = multiply_add_wide(load_one_wide(factors + 28), v7, y)
    store_wide(target, add_wide(x, y))


@compiled
@no_type_check
def product(x, y, dim):
    """Scalar product of two rows of float32."""
    sum_1 = sum_2 = splat(0.0)
    i, end = 0, 4 * dim
    while i + 32 < end:
        sum_1 = multiply_add(load(x + i), load(y + i), sum_1)
        sum_2 = multiply_add(load(x + i + 32), load(y + i + 32), sum_2)
        i += 64
    if i < end:
        sum_1 = multiply_add(load(x + i), load(y + i), sum_1)
    return simd.total(add(sum_1, sum_2))


# -- values ------------------------------------------------------------------------------------------------------------


@inlined
@no_type_check
def add_values(weights, weights_row, values, size, count, rows, outputs, outputs_row):
    """Add to `count` numbers of the rows' outputs the values of eight tokens, `size` bytes apart, by the rows' weights.

    Args:
        weights: the eight of the first row; the next are `weights_row` bytes apart.
        outputs: that of the first row; the next are `outputs_row` bytes apart.
    """
    whole = 4 * count & -64
    for i in range(0, whole, 64):
        v = values + i
        v0, v1, v2, v3 = load_wide(v), load_wide(v + size), load_wide(v + 2 * size), load_wide(v + 3 * size)
        v += 4 * size
        v4, v5, v6, v7 = load_wide(v), load_wide(v + size), load_wide(v + 2 * size), load_wide(v + 3 * size)
        for row in range(rows):
            target = outputs + row * outputs_row + i
            add_weighted(weights + row * weights_row, v0, v1, v2, v3, v4, v5, v6, v7, target)
    for i in range(whole, 4 * count, 32):
        for row in range(rows):
            target = outputs + row * outputs_row + i
            x = load(target)
            for token in range(BLOCK):
                x = multiply_add(load_one(weights + row * weights_row + 4 * token), load(values + token * size + i), x)
            store(target, x)


# -- weights -----------------------------------------------------------------------------------------------------------


@compiled
@no_type_check
def softmax(logits, count):
    """Weights exp(logit - maximum) in place of logits, a multiple of 8 of them; returns the maximum.

    Where all are NOTHING, so is the maximum, and the weights are 0.
    """
    highest = splat(NOTHING)
    for i in range(0, 4 * count, 32):
        highest = maximum(highest, load(logits + i))
    most = simd.largest(highest)
    shift = splat(-most)
    for i in range(0, 4 * count, 32):
        store(logits + i, splat(0.0) if most == NOTHING else exp(add(load(logits + i), shift)))
    return most


@inlined
@no_type_check
def scale_weights(weights, scales, count, target):
    """Products of weights and scales, a multiple of 8 of them."""
    for i in range(0, 4 * count, 32):
        store(target + i, multiply(load(weights + i), load(scales + i)))
