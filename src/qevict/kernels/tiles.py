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
def rotate(first, second, cos, sin):
    """Turn two channels of 64 keys, in place."""
    for i in range(0, 4 * TILE, 64):
        x, y = load_wide(first + i), load_wide(second + i)
        c, s = load_wide(cos + i), load_wide(sin + i)
        store_wide(first + i, subtract_product_wide(y, s, multiply_wide(x, c)))
        store_wide(second + i, multiply_add_wide(x, s, multiply_wide(y, c)))


@inlined
@no_type_check
def add_products(query, keys, logits):
    """Add to 64 logits the products of eight channels, `keys` 64 tokens a channel."""
    add_weighted(query, keys, 4 * TILE, 4 * TILE, logits)


@inlined
@no_type_check
def add_weighted(factors, vectors, row, size, sums):
    """Add to sums of `size` bytes eight vectors, `row` bytes apart, each times a factor. Sixteen numbers at a time."""
    f0, f1 = load_one_wide(factors), load_one_wide(factors + 4)
    f2, f3 = load_one_wide(factors + 8), load_one_wide(factors + 12)
    f4, f5 = load_one_wide(factors + 16), load_one_wide(factors + 20)
    f6, f7 = load_one_wide(factors + 24), load_one_wide(factors + 28)
    for i in range(0, size, 64):
        v = vectors + i
        x = multiply_add_wide(f0, load_wide(v), load_wide(sums + i))
        y = multiply_wide(f1, load_wide(v + row))
        x = multiply_add_wide(f2, load_wide(v + 2 * row), x)
        y = multiply_add_wide(f3, load_wide(v + 3 * row), y)
        x = multiply_add_wide(f4, load_wide(v + 4 * row), x)
        y = multiply_add_wide(f5, load_wide(v + 5 * row), y)
        x = multiply_add_wide(f6, load_wide(v + 6 * row), x)
        y = multiply_add_wide(f7, load_wide(v + 7 * row), y)
        store_wide(sums + i, add_wide(x, y))


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
def add_values(weights, values, row, count, output):
    """Add to `count` numbers of a row's output the values of eight tokens, `row` bytes apart, by their weights."""
    w0, w1, w2, w3 = load_one(weights), load_one(weights + 4), load_one(weights + 8), load_one(weights + 12)
    w4, w5, w6, w7 = load_one(weights + 16), load_one(weights + 20), load_one(weights + 24), load_one(weights + 28)
    whole = 4 * count & -64
    add_weighted(weights, values, row, whole, output)
    for i in range(whole, 4 * count, 32):
        v = values + i
        x = multiply_add(w0, load(v), load(output + i))
        y = multiply(w1, load(v + row))
        x = multiply_add(w2, load(v + 2 * row), x)
        y = multiply_add(w3, load(v + 3 * row), y)
        x = multiply_add(w4, load(v + 4 * row), x)
        y = multiply_add(w5, load(v + 5 * row), y)
        x = multiply_add(w6, load(v + 6 * row), x)
        y = multiply_add(w7, load(v + 7 * row), y)
        store(output + i, add(x, y))


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
