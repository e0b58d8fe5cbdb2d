"""What the CPU kernel does where a processor lacks an instruction, beside what it does where not."""

from __future__ import annotations

import numpy as np

from qevict.kernels import simd
from qevict.kernels.tiles import compiled


def test_every_float16_is_read_alike() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[~np.isnan(halves)]
    halves = halves[: len(halves) // 8 * 8].copy()
    one, other = np.empty((2, len(halves)), np.float32)

    @compiled
    def read(source: int, count: int, one: int, other: int) -> None:
        for i in range(0, count, 8):
            simd.store(one + 4 * i, simd.load_float16(source + 2 * i))
            simd.store(other + 4 * i, simd.load_float16_portably(source + 2 * i))

    read(halves.ctypes.data, len(halves), one.ctypes.data, other.ctypes.data)
    np.testing.assert_array_equal(one, halves.astype(np.float32))
    np.testing.assert_array_equal(other, one)


def test_levels_are_looked_up_alike() -> None:
    table = np.arange(8, dtype=np.float32) ** 2
    packed = np.array([0b11_010_001, 0b0_101_100_0, 0b111_110_1], np.uint8)  # 3-bit planes: 2 + 1
    packed = np.concatenate([packed, np.zeros(8, np.uint8)])
    one, other = np.empty((2, 8), np.float32)
    read = simd.codes[3]

    @compiled
    def look_up(source: int, table: int, one: int, other: int) -> None:
        index = read(source, source + 2, source)
        simd.store(one, simd.level_of_8(index, table))
        simd.store(other, simd.level_of_8_portably(index, table))

    look_up(packed.ctypes.data, table.ctypes.data, one.ctypes.data, other.ctypes.data)
    np.testing.assert_array_equal(other, one)
    assert set(one) <= set(table)
    assert len(set(one)) > 3
