"""Eight or sixteen float32 at once, for Numba: vector types and the few operations that the CPU kernel is made of.

LLVM turns its vector types into whatever the machine has. Loops written for its auto-vectoriser were up to ten times as
slow here: it gives up on codes of less than a byte, and on memory that it cannot tell apart. Memory is named by its
address (int64), in bytes. Vectors are loaded and stored at any multiple of 4 bytes, 16-bit ones at any of 2.
"""

from __future__ import annotations

from typing import Any, no_type_check

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from qevict.codecs.packing import plane_widths

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
"""How storages name their dtype to the kernel."""

_BYTE, _SHORT, _WORD, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_FLOATS, _WORDS, _SHORTS, _BYTES = (ir.VectorType(element, 8) for element in (_FLOAT, _WORD, _SHORT, _BYTE))
_WIDE_FLOATS, _WIDE_WORDS = (ir.VectorType(element, 16) for element in (_FLOAT, _WORD))
_ZERO = ir.Constant(_WORD, 0)
_HAS_FLOAT16 = get_host_cpu_features().get("f16c", False)
_HAS_LOOKUP = get_host_cpu_features().get("avx2", False)
_HAS_WIDE_LOOKUP = get_host_cpu_features().get("avx512f", False)
_FUSED = ("contract",)  # a product and a sum may become one instruction


class _Vector(types.Type):
    def __init__(self, name: str, llvm_type: Any) -> None:
        super().__init__(name)
        self.llvm_type = llvm_type


lanes, words = _Vector("float32x8", _FLOATS), _Vector("int32x8", _WORDS)
wide_lanes, wide_words = _Vector("float32x16", _WIDE_FLOATS), _Vector("int32x16", _WIDE_WORDS)
_i64, _f32 = types.int64, types.float32


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    @no_type_check
    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, numba_type.llvm_type)


@no_type_check
def _operation(signature, build):
    """An intrinsic of fixed types, its value what `build(builder, *arguments)` returns."""

    def codegen(context, builder, _, arguments):
        result = build(builder, *arguments)
        return context.get_dummy_value() if signature.return_type == types.void else result

    count = len(signature.args)
    if count == 4:
        return intrinsic(lambda typing, a, b, c, d: (signature, codegen))
    if count == 1:
        return intrinsic(lambda typing, a: (signature, codegen))
    if count == 2:
        return intrinsic(lambda typing, a, b: (signature, codegen))
    return intrinsic(lambda typing, a, b, c: (signature, codegen))


def _at(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _same(element: Any, value: int | float, count: int = 8) -> Any:
    return ir.Constant(ir.VectorType(element, count), [ir.Constant(element, value)] * count)


def _shuffled(builder: Any, vector: Any, order: list[int], other: Any = None) -> Any:
    """Elements of a vector, or of two behind one another, in another order."""
    index = ir.Constant(ir.VectorType(_WORD, len(order)), [ir.Constant(_WORD, i) for i in order])
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined) if other is None else other, index)


def _splat(builder: Any, x: Any, count: int = 8) -> Any:
    single = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), x, _ZERO)
    return _shuffled(builder, single, [0] * count)


def _load_bfloat16(builder: Any, address: Any) -> Any:
    bits = builder.zext(builder.load(_at(builder, address, _SHORTS), align=2), _WORDS)
    return builder.bitcast(builder.shl(bits, _same(_WORD, 16)), _FLOATS)


def _load_float16(builder: Any, address: Any) -> Any:
    halves = builder.load(_at(builder, address, _SHORTS), align=2)
    if _HAS_FLOAT16:
        return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), 8)), _FLOATS)
    return _from_float16(builder, builder.zext(halves, _WORDS))


def _from_float16(builder: Any, bits: Any) -> Any:
    """Exact, also for subnormal numbers and infinities, without the instructions that not every machine has."""
    sign = builder.shl(builder.and_(bits, _same(_WORD, 0x8000)), _same(_WORD, 16))
    magnitude = builder.shl(builder.and_(bits, _same(_WORD, 0x7FFF)), _same(_WORD, 13))
    # The exponent's bias differs by 112.
    scaled = builder.fmul(builder.bitcast(magnitude, _FLOATS), _same(_FLOAT, 2.0**112))
    exponent = builder.and_(bits, _same(_WORD, 0x7C00))
    finite = builder.icmp_unsigned("!=", exponent, _same(_WORD, 0x7C00))
    whole = builder.or_(magnitude, _same(_WORD, 0x7F800000))
    positive = builder.select(finite, builder.bitcast(scaled, _WORDS), whole)
    return builder.bitcast(builder.or_(positive, sign), _FLOATS)


def _product_sum(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.fadd(builder.fmul(x, y, flags=_FUSED), z, flags=_FUSED)


def _maximum(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _exp(builder: Any, x: Any) -> Any:
    """2**(n + f), n whole and |f| <= 0.5, by a polynomial for f; relative error below 2e-7, down to 2**-126."""
    power = builder.fmul(x, _same(_FLOAT, 1.4426950408889634))
    power = _maximum(builder, power, _same(_FLOAT, -126.0))
    # Adding 1.5 * 2**23 leaves the rounded number in the lowest bits.
    magic = _same(_FLOAT, 12582912.0)
    shifted = builder.fadd(power, magic)
    fraction = builder.fsub(power, builder.fsub(shifted, magic))
    result = _same(_FLOAT, 1.5353362e-4)
    for coefficient in (1.3398874e-3, 9.6184370e-3, 5.5503324e-2, 2.4022648e-1, 6.9314720e-1, 1.0):
        result = _product_sum(builder, result, fraction, _same(_FLOAT, coefficient))
    exponent = builder.shl(builder.bitcast(shifted, _WORDS), _same(_WORD, 23))
    return builder.bitcast(builder.add(builder.bitcast(result, _WORDS), exponent), _FLOATS)


def _reduced(builder: Any, x: Any, combine: Any) -> Any:
    for half in (4, 2, 1):
        x = combine(builder, x, _shuffled(builder, x, [(i + half) % 8 for i in range(8)]))
    return builder.extract_element(x, _ZERO)


def _prefetch(builder: Any, address: Any) -> None:
    pointer = _BYTE.as_pointer()
    declared = ir.FunctionType(ir.VoidType(), [pointer, _WORD, _WORD, _WORD])
    function = cgutils.get_or_insert_function(builder.module, declared, "llvm.prefetch.p0")
    to_read, keep, data = ir.Constant(_WORD, 0), ir.Constant(_WORD, 3), ir.Constant(_WORD, 1)
    builder.call(function, [builder.inttoptr(address, pointer), to_read, keep, data])


def _copy_short(builder: Any, source: Any, target: Any) -> None:
    builder.store(builder.load(_at(builder, source, _SHORT), align=2), _at(builder, target, _SHORT), align=2)


def _transpose(builder: Any, source: Any, row: Any, target: Any, target_row: Any) -> None:
    """Eight rows of eight numbers become columns: pairs, fours and halves of two rows change places."""
    rows = []
    for _ in range(8):
        rows.append(builder.load(_at(builder, source, _FLOATS), align=4))
        source = builder.add(source, row)
    for width in (1, 2, 4):
        first = [i if i // width % 2 == 0 else i - width + 8 for i in range(8)]
        second = [i + width if i // width % 2 == 0 else i + 8 for i in range(8)]
        for i in (i for i in range(8) if i // width % 2 == 0):
            x, y = rows[i], rows[i + width]
            rows[i], rows[i + width] = (_shuffled(builder, x, order, y) for order in (first, second))
    for x in rows:
        builder.store(x, _at(builder, target, _FLOATS), align=4)
        target = builder.add(target, target_row)


def _plane(builder: Any, address: Any, width: int, count: int) -> Any:
    """8 or 16 codes of a plane, `width` bits each; up to 3 bytes behind them are read."""
    if width == 8:
        packed = builder.load(_at(builder, address, ir.VectorType(_BYTE, count)), align=1)
        return builder.zext(packed, ir.VectorType(_WORD, count))
    in_word = 32 // width  # of a word of 4 bytes, if there are so many
    some = ir.VectorType(_WORD, max(1, count // in_word))
    packed = builder.load(_at(builder, address, some), align=1)
    shifts = ir.VectorType(_WORD, count)([i % in_word * width for i in range(count)])
    spread = builder.lshr(_shuffled(builder, packed, [i // in_word for i in range(count)]), shifts)
    return builder.and_(spread, _same(_WORD, (1 << width) - 1, count))


def _codes(bits: int, vectors: Any) -> Any:
    """As many codes as a vector has, whose parts of the first, second and third plane are at three addresses."""
    count = vectors.llvm_type.count

    def build(builder: Any, *addresses: Any) -> Any:
        codes, lowest = _same(_WORD, 0, count), 0
        for width, address in zip(plane_widths(bits), addresses, strict=False):
            part = builder.shl(_plane(builder, address, width, count), _same(_WORD, lowest, count))
            codes = builder.or_(codes, part)
            lowest += width
        return codes

    return _operation(vectors(_i64, _i64, _i64), build)


def _picked(builder: Any, index: Any, table: Any) -> Any:
    """Of a table of eight numbers those that the lowest three bits of an index say."""
    if not _HAS_LOOKUP:
        return _picked_portably(builder, index, table)
    declared = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS])
    function = cgutils.get_or_insert_function(builder.module, declared, "llvm.x86.avx2.permps")
    return builder.call(function, [table, index])


def _picked_portably(builder: Any, index: Any, table: Any) -> Any:
    """The same without the instruction that not every machine has."""
    index, result = builder.and_(index, _same(_WORD, 7)), ir.Constant(_FLOATS, ir.Undefined)
    for i in range(8):
        place = ir.Constant(_WORD, i)
        number = builder.extract_element(table, builder.extract_element(index, place))
        result = builder.insert_element(result, number, place)
    return result


def _level(builder: Any, index: Any, table: Any) -> Any:
    """Of 16 numbers at an address those of an index."""
    low, high = (
        builder.load(_at(builder, builder.add(table, ir.Constant(table.type, i)), _FLOATS), align=4) for i in (0, 32)
    )
    upper = builder.icmp_unsigned(">", index, _same(_WORD, 7))
    return builder.select(upper, _picked(builder, index, high), _picked(builder, index, low))


def _wide_level(builder: Any, index: Any, table: Any) -> Any:
    """The same of sixteen indices, which have four bits."""
    if not _HAS_WIDE_LOOKUP:
        halves = (_level(builder, _shuffled(builder, index, list(range(i, i + 8))), table) for i in (0, 8))
        first, second = halves
        return _shuffled(builder, first, list(range(16)), second)
    declared = ir.FunctionType(_WIDE_FLOATS, [_WIDE_FLOATS, _WIDE_WORDS])
    function = cgutils.get_or_insert_function(builder.module, declared, "llvm.x86.avx512.permvar.sf.512")
    return builder.call(function, [builder.load(_at(builder, table, _WIDE_FLOATS), align=4), index])


load = _operation(lanes(_i64), lambda b, a: b.load(_at(b, a, _FLOATS), align=4))
load_bfloat16 = _operation(lanes(_i64), _load_bfloat16)
load_float16 = _operation(lanes(_i64), _load_float16)
load_float16_portably = _operation(
    lanes(_i64), lambda b, a: _from_float16(b, b.zext(b.load(_at(b, a, _SHORTS), align=2), _WORDS))
)
load_one = _operation(lanes(_i64), lambda b, a: _splat(b, b.load(_at(b, a, _FLOAT), align=4)))
"""One float32, in all places."""
store = _operation(types.void(_i64, lanes), lambda b, a, x: b.store(x, _at(b, a, _FLOATS), align=4))
splat = _operation(lanes(_f32), _splat)
add = _operation(lanes(lanes, lanes), lambda b, x, y: b.fadd(x, y, flags=_FUSED))
multiply = _operation(lanes(lanes, lanes), lambda b, x, y: b.fmul(x, y, flags=_FUSED))
multiply_add = _operation(lanes(lanes, lanes, lanes), _product_sum)
"""x * y + z"""
maximum = _operation(lanes(lanes, lanes), _maximum)
exp = _operation(lanes(lanes), _exp)
get = _operation(_f32(_i64), lambda b, a: b.load(_at(b, a, _FLOAT), align=4))
get_int = _operation(_i64(_i64), lambda b, a: b.load(_at(b, a, ir.IntType(64)), align=8))
put_int = _operation(types.void(_i64, _i64), lambda b, a, x: b.store(x, _at(b, a, ir.IntType(64)), align=8))
put = _operation(types.void(_i64, _f32), lambda b, a, x: b.store(x, _at(b, a, _FLOAT), align=4))
total = _operation(_f32(lanes), lambda b, x: _reduced(b, x, lambda b, x, y: b.fadd(x, y)))
largest = _operation(_f32(lanes), lambda b, x: _reduced(b, x, _maximum))
codes = {bits: _codes(bits, words) for bits in range(1, 9)}
"""For each width a function of three addresses; see `_codes`."""
as_numbers = _operation(lanes(words), lambda b, x: b.sitofp(x, _FLOATS))
level_of_8 = _operation(lanes(words, _i64), lambda b, x, a: _picked(b, x, b.load(_at(b, a, _FLOATS), align=4)))
level_of_8_portably = _operation(
    lanes(words, _i64), lambda b, x, a: _picked_portably(b, x, b.load(_at(b, a, _FLOATS), align=4))
)
level_of_16 = _operation(lanes(words, _i64), _level)
"""The numbers of a table at an address that codes say."""
transpose = _operation(types.void(_i64, _i64, _i64, _i64), _transpose)
"""Eight rows of eight numbers, so many bytes apart, to where and how far apart their columns become rows."""
prefetch = _operation(types.void(_i64), _prefetch)
copy_2 = _operation(types.void(_i64, _i64), _copy_short)

# Sixteen at once: half the instructions where the machine has such vectors, and as many as before where not.
load_wide = _operation(wide_lanes(_i64), lambda b, a: b.load(_at(b, a, _WIDE_FLOATS), align=4))
load_one_wide = _operation(wide_lanes(_i64), lambda b, a: _splat(b, b.load(_at(b, a, _FLOAT), align=4), 16))
store_wide = _operation(types.void(_i64, wide_lanes), lambda b, a, x: b.store(x, _at(b, a, _WIDE_FLOATS), align=4))
add_wide = _operation(wide_lanes(wide_lanes, wide_lanes), lambda b, x, y: b.fadd(x, y, flags=_FUSED))
multiply_wide = _operation(wide_lanes(wide_lanes, wide_lanes), lambda b, x, y: b.fmul(x, y, flags=_FUSED))
multiply_add_wide = _operation(wide_lanes(wide_lanes, wide_lanes, wide_lanes), _product_sum)
subtract_product_wide = _operation(
    wide_lanes(wide_lanes, wide_lanes, wide_lanes),
    lambda b, x, y, z: b.fsub(z, b.fmul(x, y, flags=_FUSED), flags=_FUSED),
)
"""z - x * y"""
wide_codes = {bits: _codes(bits, wide_words) for bits in range(1, 9)}
as_numbers_wide = _operation(wide_lanes(wide_words), lambda b, x: b.sitofp(x, _WIDE_FLOATS))
level_wide = _operation(wide_lanes(wide_words, _i64), _wide_level)
