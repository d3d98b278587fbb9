"""Access to memory by address, for kernels that write into many maps at once.

A typed list of arrays would be unboxed at every call; a table of addresses costs nothing. The caller answers for the
addresses: the maps must live until the kernel returns.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic


def _store_codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    pointer = builder.inttoptr(args[0], args[1].type.as_pointer())
    builder.store(args[1], pointer, align=1)
    return context.get_dummy_value()


def _load_codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)


def _prefetch_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    byte_pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte_pointer, word, word, word]), "llvm.prefetch.p0"
    )
    address = builder.bitcast(builder.gep(array.data, [args[1]]), byte_pointer)
    builder.call(function, [address, word(0), word(3), word(1)])
    return context.get_dummy_value()


if numba.config.DISABLE_JIT:

    def store_u32(address: Any, value: Any) -> None:
        """Write ``value`` at ``address``."""
        ctypes.c_uint32.from_address(int(address)).value = int(value)

    def store_u64(address: Any, value: Any) -> None:
        """Write ``value`` at ``address``."""
        ctypes.c_uint64.from_address(int(address)).value = int(value)

    def load_u64(address: Any) -> Any:
        """The value at ``address``."""
        return ctypes.c_uint64.from_address(int(address)).value

    def prefetch_line(array: Any, index: Any) -> None:
        """Nothing: plain Python has no prefetch."""

else:

    @intrinsic  # type: ignore[untyped-decorator]
    def store_u32(_typing_context: Any, address: Any, value: Any) -> Any:
        """Write the uint32 ``value`` at the uint64 ``address``."""
        return types.void(types.uint64, types.uint32), _store_codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def store_u64(_typing_context: Any, address: Any, value: Any) -> Any:
        """Write the uint64 ``value`` at the uint64 ``address``."""
        return types.void(types.uint64, types.uint64), _store_codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def load_u64(_typing_context: Any, address: Any) -> Any:
        """The uint64 at the uint64 ``address``."""
        return types.uint64(types.uint64), _load_codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def prefetch_line(_typing_context: Any, array: Any, index: Any) -> Any:
        """Prefetch the cache line that holds the first byte of ``array[index]``; ``array`` is contiguous, 1-D."""
        return types.void(array, index), _prefetch_codegen
