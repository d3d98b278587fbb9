"""XXH3-64, seed 0 and default secret, bit for bit that of the ``xxhash`` package; alone, or fused with a copy.

The algorithm, its primes and its secret are those of the XXH3 specification: ``doc/xxhash_spec.md`` of xxHash
(https://github.com/Cyan4973/xxHash), Copyright (c) Yann Collet. Up to 240 bytes it has other branches, which gain
nothing here: the package computes them.

A fused copy hashes each stripe of 64 bytes between its load and its store, from the register: the source may be a map
that another process writes to meanwhile, and what has been hashed is what has been copied. Buffers are little-endian
words, as on every platform that has SGLang.

From ``STREAM_BYTES`` on, copies store past the caches, which saves reading the target's lines first. Where the CPU
reads the target again right away and it would have stayed in the caches, say so with ``reread``: stores are then
ordinary ones. So they are where the target does not lie at a multiple of 16 bytes.

Measured on pools of 512 MiB, pages of 2 MiB: ``memcpy`` 15 GB/s, after the package's checksum 13; the fused copy 24,
with ordinary stores 15. Without a copy the package is as fast as the kernels, and sooner done with a few KiB, but its
one-shot functions hold the GIL before version 4; the kernels never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import xxhash
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from sgl_kvtier_kernels._jit import kernel

Bytes = npt.NDArray[np.uint8]
State = npt.NDArray[np.uint64]

#: Length from which copies store past the caches; below, the target may well lie in them.
STREAM_BYTES = 64 << 10

#: Up to this length XXH3 has branches of its own.
_SHORT_BYTES = 240

_LANES, _STRIPE_BYTES = 8, 64
_BLOCK_STRIPES = 16
_BLOCK_BYTES = _STRIPE_BYTES * _BLOCK_STRIPES

#: How far ahead of the loads to prefetch the source when storing past the caches. Hashing alone and copies with
#: ordinary stores, which have the target's lines to wait for too, are faster left to the hardware.
_AHEAD_BYTES = 2 << 10

#: Alignment of a target that can be stored to past the caches, that of every array from ``malloc``. To ask for more, so
#: that stores can be wider, gains nothing: they are gathered into lines before they reach memory.
_STREAM_ALIGN = 16

_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_PRIME_MX1 = 0x165667919E3779F9

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
# Where the secret's 64 bytes for a purpose begin; stripe n of a block has those from 8 * n on.
_SECRET_SCRAMBLE = len(_SECRET) - 64
_SECRET_LAST = len(_SECRET) - 71
_SECRET_MERGE = 11

# A hash in progress, uint64[145]: the eight accumulators; then, seen as bytes, the last stripe before the block in
# hand and that block, of which 1 to 1024 bytes are there once anything is; then the number of bytes so far. A full
# block waits until more comes, since the last one, full or not, is treated differently.
_BEFORE_AT = 64
_BLOCK_AT = _BEFORE_AT + _STRIPE_BYTES
_TOTAL = (_BLOCK_AT + _BLOCK_BYTES) // 8

_START = np.zeros(_TOTAL + 1, np.uint64)
_START[:_LANES] = (
    _PRIME32_3,
    _PRIME64_1,
    _PRIME64_2,
    _PRIME64_3,
    _PRIME64_4,
    _PRIME32_2,
    _PRIME64_5,
    _PRIME32_1,
)


def hash_bytes(data: Bytes) -> int:
    """XXH3-64 of ``data``, uint8[n].

    Raises:
        ValueError: Not one contiguous run of uint8.
    """
    _check(data)
    if data.size <= _SHORT_BYTES:
        return int(xxhash.xxh3_64_intdigest(data))
    return int(_hash_one(data))


def hash_parts(parts: Sequence[Bytes]) -> int:
    """XXH3-64 over ``parts``, uint8[n] each, one after the other.

    Raises:
        ValueError: As for :func:`hash_bytes`.
    """
    total = 0
    for part in parts:
        _check(part)
        total += part.size
    if total <= _SHORT_BYTES:
        return int(xxhash.xxh3_64_intdigest(b"".join(parts)))
    state = _START.copy()
    for part in parts:
        _absorb(state, part)
    return int(_digest(state))


def hash_copy(source: Bytes, target: Bytes, *, reread: bool = False) -> int:
    """Copy ``source`` to ``target``, uint8[n] both, which do not overlap; XXH3-64 of what was copied.

    Args:
        source: May change meanwhile: the result still is that of the bytes now in ``target``.
        target: Filled.
        reread: Keep the target in the caches, for the CPU to read it right away.

    Raises:
        ValueError: As for :func:`hash_bytes`, a read-only target, or other lengths.
    """
    _check(source)
    _check_target(target)
    if source.size != target.size:
        raise ValueError(f"copy of {source.size} bytes to a target of {target.size}")
    if source.size <= _SHORT_BYTES:
        target[:] = source
        return int(xxhash.xxh3_64_intdigest(target))
    return int(_copy_one(source, target, not reread and source.size >= STREAM_BYTES))


def copy_parts(source: Bytes, targets: Sequence[Bytes], *, reread: bool = False) -> int:
    """Copy ``source``, uint8[n], to ``targets``, uint8[m] each, filled one after the other; XXH3-64 of what was copied.

    The arguments and the result are otherwise those of :func:`hash_copy`.

    Raises:
        ValueError: As for :func:`hash_copy`; the lengths of ``targets`` must add up to that of ``source``.
    """
    _check(source)
    total = 0
    for target in targets:
        _check_target(target)
        total += target.size
    if source.size != total:
        raise ValueError(f"copy of {source.size} bytes to targets of {total} together")
    streaming = not reread and total >= STREAM_BYTES
    state = _START.copy()
    at = 0
    for target in targets:
        _absorb_copy(state, source[at : at + target.size], target, streaming)
        at += target.size
    if total <= _SHORT_BYTES:
        return int(xxhash.xxh3_64_intdigest(state.view(np.uint8)[_BLOCK_AT : _BLOCK_AT + total]))
    return int(_digest(state))


def _check(data: Bytes) -> None:
    if data.dtype != _START_BYTE or data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError(f"a contiguous uint8[n] is needed, not {data.dtype}{list(data.shape)}, strides {data.strides}")


def _check_target(target: Bytes) -> None:
    _check(target)
    # Kernels write through the address: a read-only map would end the process.
    if not target.flags.writeable:
        raise ValueError(f"the target of {target.size} bytes is read-only; copy to a writeable array")


_START_BYTE = np.dtype(np.uint8)


def _lanes(at: int) -> npt.NDArray[np.uint64]:
    """The secret's 64 bytes from ``at`` on, uint64[8]."""
    return np.frombuffer(_SECRET, np.uint64, _LANES, at)


if numba.config.DISABLE_JIT:
    _STRIPE_SECRETS = np.stack([_lanes(8 * stripe) for stripe in range(_BLOCK_STRIPES)])
    _SWAPPED = np.arange(_LANES) ^ 1
    _MASK32, _MASK64 = np.uint64(0xFFFFFFFF), (1 << 64) - 1

    def _accumulate(state: Any, stripes: Any, secrets: Any) -> None:
        value = stripes ^ secrets
        products = (value & _MASK32) * (value >> np.uint64(32))
        state[:_LANES] += (stripes[:, _SWAPPED] + products).sum(axis=0, dtype=np.uint64)

    def _words(data: Any, at: int, count: int) -> Any:
        """``count`` bytes as stripes, uint64[count // 64, 8]; through a copy, as they may be unaligned."""
        return np.frombuffer(data[at : at + count].tobytes(), np.uint64).reshape(-1, _LANES)

    def _hash_blocks(state: Any, source: Any, at: int, blocks: int) -> None:
        for start in range(at, at + blocks * _BLOCK_BYTES, _BLOCK_BYTES):
            _accumulate(state, _words(source, start, _BLOCK_BYTES), _STRIPE_SECRETS)
            lanes = state[:_LANES]
            lanes ^= (lanes >> np.uint64(47)) ^ _lanes(_SECRET_SCRAMBLE)
            lanes *= np.uint64(_PRIME32_1)

    def _copy_blocks(state: Any, source: Any, at: int, blocks: int, target: Any, _streaming: bool) -> None:
        end = at + blocks * _BLOCK_BYTES
        target[at:end] = source[at:end]
        _hash_blocks(state, target, at, blocks)

    def _barrier() -> None:
        """Nothing: plain Python does what it is told."""

    def _finish(state: Any) -> Any:
        total = int(state[_TOTAL])
        filled = (total - 1) % _BLOCK_BYTES + 1
        stripes = (filled - 1) // _STRIPE_BYTES
        room, rest = state.view(np.uint8), state.copy()
        _accumulate(rest, _words(room, _BLOCK_AT, stripes * _STRIPE_BYTES), _STRIPE_SECRETS[:stripes])
        _accumulate(rest, _words(room, _BLOCK_AT + filled - _STRIPE_BYTES, _STRIPE_BYTES), _lanes(_SECRET_LAST))
        lanes = (rest[:_LANES] ^ _lanes(_SECRET_MERGE)).tolist()
        result = total * _PRIME64_1
        for low, high in zip(lanes[::2], lanes[1::2], strict=True):
            result += (low * high ^ (low * high >> 64)) & _MASK64
        result &= _MASK64
        result = (result ^ (result >> 37)) * _PRIME_MX1 & _MASK64
        return result ^ (result >> 32)

else:
    # Eight lanes as one LLVM vector, that is one register of AVX-512, two of AVX2 or four of SSE2 and NEON: stores
    # past the caches and single loads can be asked for only here, and nothing hangs on the compiler's vectoriser.
    _BYTE, _INT32, _INT64, _INT128 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.IntType(128)
    _BYTE_POINTER = _BYTE.as_pointer()
    _VECTOR = ir.VectorType(_INT64, _LANES)

    def _constant(words: Any) -> Any:
        return ir.Constant(_VECTOR, [_INT64(int(word)) for word in words])

    def _every(word: int) -> Any:
        return _constant([word] * _LANES)

    def _address(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
        return builder.bitcast(context.make_array(array_type)(context, builder, array).data, _BYTE_POINTER)

    def _at(builder: Any, address: Any, offset: Any) -> Any:
        return builder.bitcast(builder.gep(address, [offset]), _VECTOR.as_pointer())

    def _load(builder: Any, address: Any, offset: Any) -> Any:
        return builder.load(_at(builder, address, offset), align=1)

    def _load_once(builder: Any, address: Any, offset: Any) -> Any:
        """Load a stripe such that the compiler never reads its bytes a second time, as it does to narrow stores.

        That is a volatile load, for which llvmlite has no name.
        """
        load = _load(builder, address, offset)
        describe = load.descr

        def describe_volatile(buffer: Any) -> None:
            describe(buffer)
            buffer[-1] = buffer[-1].replace("load ", "load volatile ", 1)

        load.descr = describe_volatile
        return load

    def _accumulate_ir(builder: Any, lanes: Any, stripe: Any, secret: Any) -> Any:
        value = builder.xor(stripe, secret)
        product = builder.mul(builder.and_(value, _every(0xFFFFFFFF)), builder.lshr(value, _every(32)))
        swap = ir.Constant(ir.VectorType(_INT32, _LANES), [_INT32(lane ^ 1) for lane in range(_LANES)])
        swapped = builder.shuffle_vector(stripe, stripe, swap)
        # In this order, only one addition of each stripe waits for the stripe before.
        return builder.add(lanes, builder.add(product, swapped))

    def _scramble_ir(builder: Any, lanes: Any) -> Any:
        mixed = builder.xor(builder.xor(lanes, builder.lshr(lanes, _every(47))), _constant(_lanes(_SECRET_SCRAMBLE)))
        return builder.mul(mixed, _every(_PRIME32_1))

    def _prefetch_ir(builder: Any, address: Any, offset: Any) -> None:
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _INT32, _INT32, _INT32]),
            "llvm.prefetch.p0",
        )
        # For reading, into all cache levels, data. Behind the source's end too: prefetches never fault.
        builder.call(function, [builder.gep(address, [offset]), _INT32(0), _INT32(3), _INT32(1)])

    def _blocks_ir(builder: Any, state: Any, source: Any, blocks: Any, target: Any, streaming: bool) -> None:
        """Hash whole blocks from ``source`` on; copy them to ``target`` unless that is None."""
        lanes = cgutils.alloca_once(builder, _VECTOR)
        builder.store(_load(builder, state, _INT64(0)), lanes)
        with cgutils.for_range(builder, blocks, intp=_INT64) as loop:
            start = builder.mul(loop.index, _INT64(_BLOCK_BYTES))
            value = builder.load(lanes)
            for stripe in range(_BLOCK_STRIPES):
                offset = builder.add(start, _INT64(stripe * _STRIPE_BYTES))
                if streaming:
                    _prefetch_ir(builder, source, builder.add(offset, _INT64(_AHEAD_BYTES)))
                word = (_load if target is None else _load_once)(builder, source, offset)
                if target is not None:
                    align = _STREAM_ALIGN if streaming else 1
                    store = builder.store(word, _at(builder, target, offset), align=align)
                    if streaming:
                        store.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))
                value = _accumulate_ir(builder, value, word, _constant(_lanes(8 * stripe)))
            builder.store(_scramble_ir(builder, value), lanes)
        builder.store(builder.load(lanes), _at(builder, state, _INT64(0)), align=1)
        if streaming:
            # Stores past the caches are not ordered with others, such as that which tells another thread of the data.
            builder.fence("seq_cst")

    def _hash_blocks_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        state, source = (_address(context, builder, signature.args[i], args[i]) for i in range(2))
        _blocks_ir(builder, state, builder.gep(source, [args[2]]), args[3], None, False)
        return context.get_dummy_value()

    def _copy_blocks_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        state, source, target = (_address(context, builder, signature.args[i], args[i]) for i in (0, 1, 4))
        source, target = builder.gep(source, [args[2]]), builder.gep(target, [args[2]])
        misaligned = builder.and_(builder.ptrtoint(target, _INT64), _INT64(_STREAM_ALIGN - 1))
        aligned = builder.icmp_unsigned("==", misaligned, _INT64(0))
        with builder.if_else(builder.and_(aligned, args[5])) as (then, otherwise):
            with then:
                _blocks_ir(builder, state, source, args[3], target, True)
            with otherwise:
                _blocks_ir(builder, state, source, args[3], target, False)
        return context.get_dummy_value()

    def _barrier_codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
        return context.get_dummy_value()

    def _finish_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        state = _address(context, builder, signature.args[0], args[0])
        secret = cgutils.global_constant(builder, "xxh3_secret", cgutils.make_bytearray(_SECRET))
        secret = builder.bitcast(secret, _BYTE_POINTER)
        total = builder.load(builder.bitcast(builder.gep(state, [_INT64(8 * _TOTAL)]), _INT64.as_pointer()), align=8)
        block = builder.gep(state, [_INT64(_BLOCK_AT)])
        before_last = builder.and_(builder.sub(total, _INT64(1)), _INT64(_BLOCK_BYTES - 1))
        lanes = cgutils.alloca_once(builder, _VECTOR)
        builder.store(_load(builder, state, _INT64(0)), lanes)
        with cgutils.for_range(builder, builder.lshr(before_last, _INT64(6)), intp=_INT64) as loop:
            stripe = _load(builder, block, builder.mul(loop.index, _INT64(_STRIPE_BYTES)))
            key = _load(builder, secret, builder.mul(loop.index, _INT64(8)))
            builder.store(_accumulate_ir(builder, builder.load(lanes), stripe, key), lanes)
        stripe = _load(builder, block, builder.sub(before_last, _INT64(_STRIPE_BYTES - 1)))
        value = _accumulate_ir(builder, builder.load(lanes), stripe, _constant(_lanes(_SECRET_LAST)))
        value = builder.xor(value, _constant(_lanes(_SECRET_MERGE)))
        result = builder.mul(total, _INT64(_PRIME64_1))
        for lane in range(0, _LANES, 2):
            low, high = (builder.zext(builder.extract_element(value, _INT32(i)), _INT128) for i in (lane, lane + 1))
            product = builder.mul(low, high)
            folded = builder.xor(product, builder.lshr(product, _INT128(64)))
            result = builder.add(result, builder.trunc(folded, _INT64))
        result = builder.xor(result, builder.lshr(result, _INT64(37)))
        result = builder.mul(result, _INT64(_PRIME_MX1))
        return builder.xor(result, builder.lshr(result, _INT64(32)))

    @intrinsic  # type: ignore[untyped-decorator]
    def _hash_blocks(_typing_context: Any, state: Any, source: Any, _at: Any, _blocks: Any) -> Any:
        """Take in ``blocks`` whole blocks of ``source[at:]``."""
        return types.void(state, source, types.int64, types.int64), _hash_blocks_codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def _copy_blocks(
        _typing_context: Any, state: Any, source: Any, _at: Any, _blocks: Any, target: Any, _streaming: Any
    ) -> Any:
        """The same, while they are copied to ``target[at:]``."""
        return types.void(state, source, types.int64, types.int64, target, types.boolean), _copy_blocks_codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def _barrier(_typing_context: Any) -> Any:
        """Keep the compiler from reading a copy's source again instead of its target."""
        return types.void(), _barrier_codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def _finish(_typing_context: Any, state: Any) -> Any:
        """XXH3-64 of what ``state`` has taken in, more than 240 bytes; ``state`` stays as it is."""
        return types.uint64(state), _finish_codegen


@kernel
def _move(source: Bytes, at: int, target: Bytes, to: int, count: int) -> None:
    """Copy a few bytes."""
    if count > 0:
        s, t = source[at : at + count], target[to : to + count]
        for x in range(count):
            t[x] = s[x]


@kernel
def _filled(state: State) -> Any:
    """Bytes in the block in hand."""
    total = np.int64(state[_TOTAL])
    return (total - 1) % _BLOCK_BYTES + 1 if total > 0 else 0


@kernel
def _absorb(state: State, source: Bytes) -> None:
    """Take in ``source``."""
    room, length, filled = state.view(np.uint8), len(source), _filled(state)
    at = 0
    if filled + length > _BLOCK_BYTES:
        if filled > 0:
            at = _BLOCK_BYTES - filled
            _move(source, 0, room, _BLOCK_AT + filled, at)
            _hash_blocks(state, room, _BLOCK_AT, 1)
            _move(room, _BLOCK_AT + _BLOCK_BYTES - _STRIPE_BYTES, room, _BEFORE_AT, _STRIPE_BYTES)
            filled = 0
        blocks = (length - at - 1) // _BLOCK_BYTES
        if blocks > 0:
            _hash_blocks(state, source, at, blocks)
            at += blocks * _BLOCK_BYTES
            _move(source, at - _STRIPE_BYTES, room, _BEFORE_AT, _STRIPE_BYTES)
    _move(source, at, room, _BLOCK_AT + filled, length - at)
    state[_TOTAL] += np.uint64(length)


@kernel
def _absorb_copy(state: State, source: Bytes, target: Bytes, streaming: bool) -> None:
    """Take in ``source`` while it is copied to ``target``; bytes that go through ``state`` come out of ``target``."""
    room, length, filled = state.view(np.uint8), len(source), _filled(state)
    at = 0
    if filled + length > _BLOCK_BYTES:
        if filled > 0:
            at = _BLOCK_BYTES - filled
            _move(source, 0, target, 0, at)
            _barrier()
            _move(target, 0, room, _BLOCK_AT + filled, at)
            _hash_blocks(state, room, _BLOCK_AT, 1)
            _move(room, _BLOCK_AT + _BLOCK_BYTES - _STRIPE_BYTES, room, _BEFORE_AT, _STRIPE_BYTES)
            filled = 0
        blocks = (length - at - 1) // _BLOCK_BYTES
        if blocks > 0:
            _copy_blocks(state, source, at, blocks, target, streaming)
            at += blocks * _BLOCK_BYTES
            _move(target, at - _STRIPE_BYTES, room, _BEFORE_AT, _STRIPE_BYTES)
    _move(source, at, target, at, length - at)
    _barrier()
    _move(target, at, room, _BLOCK_AT + filled, length - at)
    state[_TOTAL] += np.uint64(length)


@kernel
def _digest(state: State) -> Any:
    return _finish(state)


@kernel
def _hash_one(data: Bytes) -> Any:
    state = _START.copy()
    _absorb(state, data)
    return _finish(state)


@kernel
def _copy_one(source: Bytes, target: Bytes, streaming: bool) -> Any:
    state = _START.copy()
    _absorb_copy(state, source, target, streaming)
    return _finish(state)
