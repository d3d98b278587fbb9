"""A prefetch instruction for kernels: host pools are far larger than the caches, and hardware prefetchers give up
at the ends of the short runs that layouts other than the canonical one consist of.

Measured on a pool of 512 MiB, split of bf16 into planes that stay in the L2 cache, runs of 256 bytes: 14 GB/s without,
39 GB/s with prefetch 16 KiB ahead, 256 bytes at a time; prefetching larger pieces at once stalls.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

#: How far ahead to prefetch, and how much to work on between prefetches, in bytes.
AHEAD_BYTES = 16 << 10
CHUNK_BYTES = 256

_LINE_BYTES = 64


def _prefetch_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    byte_pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte_pointer, word, word, word]), "llvm.prefetch.p0"
    )
    start = builder.bitcast(builder.gep(array.data, [args[1]]), byte_pointer)
    for offset in range(0, CHUNK_BYTES, _LINE_BYTES):
        address = builder.gep(start, [ir.Constant(ir.IntType(64), offset)])
        # For reading, into all cache levels, data. An address outside the array is allowed: prefetches never fault.
        builder.call(function, [address, word(0), word(3), word(1)])
    return context.get_dummy_value()


if numba.config.DISABLE_JIT:

    def prefetch(array: Any, index: int) -> None:
        """Nothing: plain Python has no prefetch."""

else:

    @intrinsic  # type: ignore[untyped-decorator]
    def prefetch(_typing_context: Any, array: Any, index: Any) -> Any:
        """Prefetch the ``CHUNK_BYTES`` bytes from ``array[index]`` on; ``index`` may lie outside the array."""
        return types.void(array, index), _prefetch_codegen
