"""Eight float32 at once, for Numba: a vector type and the few operations that the CPU kernel is made of.

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

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
"""How storages name their dtype to the kernel."""

_BYTE, _SHORT, _WORD, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_FLOATS, _WORDS, _SHORTS, _BYTES = (ir.VectorType(element, 8) for element in (_FLOAT, _WORD, _SHORT, _BYTE))
_ZERO = ir.Constant(_WORD, 0)
_HAS_FLOAT16 = get_host_cpu_features().get("f16c", False)
_FUSED = ("contract",)  # a product and a sum may become one instruction


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__("float32x8")


lanes = _Lanes()
_i64, _f32 = types.int64, types.float32


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    @no_type_check
    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, _FLOATS)


@no_type_check
def _operation(signature, build):
    """An intrinsic of fixed types, its value what `build(builder, *arguments)` returns."""

    def codegen(context, builder, _, arguments):
        result = build(builder, *arguments)
        return context.get_dummy_value() if signature.return_type == types.void else result

    count = len(signature.args)
    if count == 1:
        return intrinsic(lambda typing, a: (signature, codegen))
    if count == 2:
        return intrinsic(lambda typing, a, b: (signature, codegen))
    return intrinsic(lambda typing, a, b, c: (signature, codegen))


def _at(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _same(element: Any, value: int | float, count: int = 8) -> Any:
    return ir.Constant(ir.VectorType(element, count), [ir.Constant(element, value)] * count)


def _shuffled(builder: Any, vector: Any, order: list[int]) -> Any:
    index = ir.Constant(ir.VectorType(_WORD, len(order)), [ir.Constant(_WORD, i) for i in order])
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), index)


def _splat(builder: Any, x: Any) -> Any:
    single = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), x, _ZERO)
    return _shuffled(builder, single, [0] * 8)


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


def _codes(width: int) -> Any:
    """Eight codes of `width` bits, which take `width` bytes, as numbers."""
    word = ir.IntType(8 * width)
    shifts = ir.Constant(_WORDS, [ir.Constant(_WORD, i * width) for i in range(8)])

    def build(builder: Any, address: Any) -> Any:
        if width == 8:
            codes = builder.zext(builder.load(_at(builder, address, _BYTES), align=1), _WORDS)
            return builder.sitofp(codes, _FLOATS)
        whole = builder.load(_at(builder, address, word), align=1)
        single = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), builder.zext(whole, _WORD), _ZERO)
        codes = builder.and_(builder.lshr(_shuffled(builder, single, [0] * 8), shifts), _same(_WORD, (1 << width) - 1))
        return builder.sitofp(codes, _FLOATS)

    return _operation(lanes(_i64), build)


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
subtract_product = _operation(
    lanes(lanes, lanes, lanes), lambda b, x, y, z: b.fsub(z, b.fmul(x, y, flags=_FUSED), flags=_FUSED)
)
"""z - x * y"""
maximum = _operation(lanes(lanes, lanes), _maximum)
exp = _operation(lanes(lanes), _exp)
get = _operation(_f32(_i64), lambda b, a: b.load(_at(b, a, _FLOAT), align=4))
get_address = _operation(_i64(_i64), lambda b, a: b.load(_at(b, a, ir.IntType(64)), align=8))
put_address = _operation(types.void(_i64, _i64), lambda b, a, x: b.store(x, _at(b, a, ir.IntType(64)), align=8))
put = _operation(types.void(_i64, _f32), lambda b, a, x: b.store(x, _at(b, a, _FLOAT), align=4))
total = _operation(_f32(lanes), lambda b, x: _reduced(b, x, lambda b, x, y: b.fadd(x, y)))
largest = _operation(_f32(lanes), lambda b, x: _reduced(b, x, _maximum))
codes_1, codes_2, codes_4, codes_8 = (_codes(width) for width in (1, 2, 4, 8))
prefetch = _operation(types.void(_i64), _prefetch)
copy_2 = _operation(types.void(_i64, _i64), _copy_short)
