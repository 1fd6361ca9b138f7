"""A stable radix sort of ``int64`` keys on the device, from the lowest digit to the highest.

A pass sorts by one digit, in three launches. `count_kernel` counts the digits of each tile of keys,
one tile a block. `scan_kernel` turns the counts into places: they lie digit by digit, and the sum
of all counts before one of them is where its keys begin. `scatter_kernel` sorts each tile in shared
memory, so that equal digits lie side by side, and writes them to their places. Of few tiles each
block adds up the counts itself, without `scan_kernel`.

Equal digits keep their order throughout, so the result is fixed by the keys alone. The index
arithmetic is tested with smaller constants than a device has.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from numba import cuda, int32, int64, uint32

from ..device.backend import GEOMETRY, launcher, load_int64, store_int64

DIGIT_BITS, _SPLIT_BITS, THREADS, GROUP, KEYS_PER_THREAD, _COUNTS_PER_THREAD, LINE_BITS, _FEW = (
    GEOMETRY.sort
)
TILE = THREADS * KEYS_PER_THREAD
"""Keys of a block."""

# Of arrays in shared memory a word is left out after each line of 1 << LINE_BITS: threads that
# read at a distance of a power of two would else meet in few banks. What a thread or a group reads
# in one go lies within a line, and a line within a row of THREADS words.

# A tile is sorted by a few bits of the digit at a time, so that each thread can have counters of
# its own. Two of them share a word: those of values d and d + _HALF.
_HALF = 1 << (_SPLIT_BITS - 1)
_COUNTER_BITS = 16
_COUNTER_MASK = (1 << _COUNTER_BITS) - 1


def _words(n: int) -> int:
    """The words of ``n`` elements in lines, and the word of element ``n``."""
    return n + (n >> LINE_BITS)


_word = cuda.jit(device=True)(_words)
_DIGITS, _OWN_DIGITS = 1 << DIGIT_BITS, (1 << DIGIT_BITS) // THREADS
_TILE_WORDS, _RANKS_WORDS = _words(TILE), _words(THREADS * _HALF)
_SUMS_WORDS = _words(THREADS) + THREADS // GROUP + 1


def scratch_words(n: int) -> int:
    """The ``int64`` words of scratch that sorting ``n`` keys needs."""
    return (n_tiles(n) + 1) << DIGIT_BITS


def sort_keys(
    keys: int, spare: int, scratch: int, n: int, first_bit: int, n_bits: int, stream: Any = 0
) -> int:
    """Enqueue a stable sort of keys by ``n_bits`` bits from ``first_bit`` on; where they will lie.

    ``keys`` and ``spare`` are addresses of int64 ``[n]``: one of them gets the result. No key is
    negative. ``scratch`` has `scratch_words`. The number of bits decides that of the launches.
    """
    for launch in sort_launches(keys, spare, scratch, n, first_bit, n_bits, stream) if n else ():
        launch()
    return sorted_place(keys, spare, n_bits)


def sorted_place(keys: int, spare: int, n_bits: int) -> int:
    """Where so many bits leave the sorted keys, of the two addresses."""
    return spare if -(-n_bits // DIGIT_BITS) % 2 else keys


def first_mask(n_bits: int) -> int:
    """The mask of the first digit of a sort by so many bits."""
    return (1 << min(DIGIT_BITS, n_bits)) - 1


def sort_launches(
    keys: int, spare: int, scratch: int, n: int, first_bit: int, n_bits: int, stream: Any,
    is_counted: bool = False,
) -> Iterator[Any]:  # fmt: skip
    """The launches of `sort_keys`; the first digit may be counted already (`count_digits`)."""
    blocks = n_tiles(n)
    is_scanned = int(blocks > _FEW)
    for done in range(0, n_bits, DIGIT_BITS):
        digit = first_bit + done, first_mask(n_bits - done)
        if done or not is_counted:
            count = launcher(count_kernel, blocks, THREADS, stream)
            yield partial(count, keys, scratch, n, *digit)
        if is_scanned:
            yield partial(launcher(scan_kernel, _DIGITS, THREADS, stream), scratch, blocks)
        scatter = launcher(scatter_kernel, blocks, THREADS, stream)
        yield partial(scatter, keys, spare, scratch, n, *digit, is_scanned)
        keys, spare = spare, keys


def n_tiles(n: int) -> int:
    """The tiles of ``n`` keys."""
    return -(-n // TILE)


@cuda.jit
def count_kernel(keys, counters, n, shift, mask):
    """``[digits, tiles]``: how often each is in each; room for the sums of the rows comes after."""
    thread_keys = cuda.local.array(KEYS_PER_THREAD, int64)
    _load_keys(thread_keys, keys, n)
    count_digits(thread_keys, counters, shift, mask)


@cuda.jit(device=True)
def count_digits(thread_keys, counters, shift, mask):
    """Count the digits of the keys of a tile, of which a thread has its ``own``."""
    counts = cuda.shared.array(_DIGITS, int32)
    for k in range(_OWN_DIGITS):
        counts[thread() + k * THREADS] = 0
    cuda.syncthreads()
    # What is counted beyond the last key is the greatest digit of the last tile: no place comes
    # after it. The sums are of integers, the same in any order.
    for k in range(KEYS_PER_THREAD):
        cuda.atomic.add(counts, _digit(thread_keys[k], shift, mask), 1)
    cuda.syncthreads()
    for k in range(_OWN_DIGITS):
        digit = thread() + k * THREADS
        place = digit * int64(cuda.gridDim.x) + cuda.blockIdx.x
        store_int64(counters + 8 * place, counts[digit])


@cuda.jit
def scan_kernel(counters, n_tiles):
    """A counter becomes the sum of those before it in its row: a block has a digit, hence a row."""
    counts = cuda.local.array(_COUNTS_PER_THREAD, int64)
    sums = cuda.shared.array(_SUMS_WORDS, int64)
    row, row_sum = counters + 8 * cuda.blockIdx.x * n_tiles, 0
    for begin in range(0, n_tiles, THREADS * _COUNTS_PER_THREAD):
        first, sum_of_own = begin + thread() * _COUNTS_PER_THREAD, 0
        for k in range(_COUNTS_PER_THREAD):
            counts[k] = load_int64(row + 8 * (first + k)) if first + k < n_tiles else 0
            sum_of_own += counts[k]
        before, sum_of_all = _sum_before(sum_of_own, sums)
        before += row_sum
        for k in range(_COUNTS_PER_THREAD):
            if first + k < n_tiles:
                store_int64(row + 8 * (first + k), before)
            before += counts[k]
        row_sum += sum_of_all
    if thread() == 0:
        store_int64(counters + 8 * (_DIGITS * n_tiles + cuda.blockIdx.x), row_sum)


@cuda.jit
def scatter_kernel(keys, out, counters, n, shift, mask, is_scanned):
    """Move the keys to their places."""
    thread_keys = cuda.local.array(KEYS_PER_THREAD, int64)
    # A line for each: that is how the simulator tells shared arrays apart.
    tile = cuda.shared.array(_TILE_WORDS, int64)
    places = cuda.shared.array(_DIGITS, int64)
    place_sums = cuda.shared.array(_SUMS_WORDS, int64)
    ranks = cuda.shared.array(_RANKS_WORDS, uint32)
    rank_sums = cuda.shared.array(_SUMS_WORDS, uint32)
    n_valid = _load_keys(thread_keys, keys, n)
    for k in range(KEYS_PER_THREAD):
        tile[_word(thread()) + k * _word(THREADS)] = thread_keys[k]
    _load_places(places, place_sums, counters, out, is_scanned)
    cuda.syncthreads()
    _sort_tile(tile, ranks, rank_sums, shift, mask)
    for k in range(KEYS_PER_THREAD):
        i = thread() + k * THREADS
        thread_keys[k] = tile[_word(thread()) + k * _word(THREADS)]
        digit = _digit(thread_keys[k], shift, mask)
        # One thread has the first key of a digit. Key i of the tile then goes to place + 8 i.
        if i == 0 or _digit(tile[_word(i - 1)], shift, mask) != digit:
            places[digit] -= 8 * i
    cuda.syncthreads()
    for k in range(KEYS_PER_THREAD):
        i = thread() + k * THREADS
        if i < n_valid:
            store_int64(places[_digit(thread_keys[k], shift, mask)] + 8 * i, thread_keys[k])


@cuda.jit(device=True)
def thread():
    """The number of the thread. Of an unsigned index Numba need not test the sign."""
    return int64(uint32(cuda.threadIdx.x))


@cuda.jit(device=True)
def _digit(key, shift, mask):
    return uint32((key >> shift) & mask)


@cuda.jit(device=True)
def _load_keys(thread_keys, keys, n):
    """Load a thread's keys of the block's tile, ``THREADS`` apart; returns how many the tile has.

    Those beyond are nothing but 1 bits: no digit is greater, so they stay at the end of the tile.
    """
    first = int64(cuda.blockIdx.x) * TILE
    n_valid = uint32(min(n - first, TILE))
    address = keys + 8 * (first + thread())
    for k in range(KEYS_PER_THREAD):
        is_valid = thread() + k * THREADS < n_valid
        thread_keys[k] = load_int64(address + 8 * THREADS * k) if is_valid else -1
    return n_valid


@cuda.jit(device=True)
def _load_places(places, sums, counters, out, is_scanned):
    """The address for the block's keys of each digit: after smaller digits, and earlier tiles."""
    first, sum_of_own = thread() * _OWN_DIGITS, 0
    for digit in range(first, first + _OWN_DIGITS):
        sum_of_own += _counts_of(counters, digit, is_scanned)[1]
    before, _ = _sum_before(sum_of_own, sums)
    for digit in range(first, first + _OWN_DIGITS):
        in_earlier, in_all = _counts_of(counters, digit, is_scanned)
        places[digit] = out + 8 * (before + in_earlier)
        before += in_all


@cuda.jit(device=True)
def _counts_of(counters, digit, is_scanned):
    """How often a digit is in the tiles before the block's own, and in all."""
    tile, n_tiles = int64(cuda.blockIdx.x), int64(cuda.gridDim.x)
    row = counters + 8 * digit * n_tiles
    if is_scanned != 0:
        return load_int64(row + 8 * tile), load_int64(counters + 8 * (_DIGITS * n_tiles + digit))
    in_earlier, in_all = 0, 0
    for k in range(n_tiles):
        count = load_int64(row + 8 * k)
        in_earlier += count if k < tile else 0
        in_all += count
    return in_earlier, in_all


@cuda.jit(device=True)
def _sort_tile(tile, ranks, sums, shift, mask):
    """Sort a tile in shared memory by the bits of a mask."""
    rest = mask
    while rest > 0:
        _split(tile, ranks, sums, shift, rest)
        shift, rest = shift + _SPLIT_BITS, rest >> _SPLIT_BITS


@cuda.jit(device=True)
def sort_one_tile(thread_keys, keys, n, shift, mask):
    """Write the keys of the only tile, of which a thread has its ``own``, in their order."""
    tile = cuda.shared.array(_TILE_WORDS, int64)
    ranks = cuda.shared.array(_RANKS_WORDS, uint32)
    sums = cuda.shared.array(_SUMS_WORDS, uint32)
    for k in range(KEYS_PER_THREAD):
        tile[_word(thread()) + k * _word(THREADS)] = thread_keys[k]
    cuda.syncthreads()
    _sort_tile(tile, ranks, sums, shift, mask)
    for k in range(KEYS_PER_THREAD):
        i = thread() + k * THREADS
        if i < n:
            store_int64(keys + 8 * i, tile[_word(thread()) + k * _word(THREADS)])


@cuda.jit(device=True)
def _split(tile, ranks, sums, shift, mask):
    """Sort a tile in shared memory by up to ``_SPLIT_BITS`` bits.

    A thread has consecutive keys, and a column of the counters ``[_HALF, THREADS]``: the sum of
    the counters before one of them is the rank of its first key.
    """
    thread_keys = cuda.local.array(KEYS_PER_THREAD, int64)
    rank = cuda.local.array(KEYS_PER_THREAD, int32)
    column, first = _word(thread()), _word(thread() * KEYS_PER_THREAD)
    for row in range(_HALF):
        ranks[column + row * _word(THREADS)] = 0
    for k in range(KEYS_PER_THREAD):
        thread_keys[k] = tile[first + k]
        row, bit = _row_and_bit(thread_keys[k], shift, mask)
        word = column + row * _word(THREADS)
        rank[k] = (ranks[word] >> bit) & _COUNTER_MASK
        ranks[word] += 1 << bit
    cuda.syncthreads()
    _scan_counters(ranks, sums)
    cuda.syncthreads()
    for k in range(KEYS_PER_THREAD):
        row, bit = _row_and_bit(thread_keys[k], shift, mask)
        rank[k] += (ranks[column + row * _word(THREADS)] >> bit) & _COUNTER_MASK
        tile[_word(rank[k])] = thread_keys[k]
    cuda.syncthreads()


@cuda.jit(device=True)
def _row_and_bit(key, shift, mask):
    """The row of the counter of a key's bits, and where in its word it begins."""
    bits = int32((key >> shift) & mask)
    return bits & (_HALF - 1), (bits & _HALF) * (_COUNTER_BITS // _HALF)


@cuda.jit(device=True)
def _scan_counters(counters, sums):
    """Each counter becomes the sum of those before it: all lower halves, then all upper ones."""
    first, sum_of_own = _word(thread() * _HALF), 0
    for k in range(_HALF):
        sum_of_own += counters[first + k]
    before, sum_of_all = _sum_before(sum_of_own, sums)
    before += (sum_of_all & _COUNTER_MASK) << _COUNTER_BITS
    for k in range(_HALF):
        count = counters[first + k]
        counters[first + k] = before
        before += count


@cuda.jit(device=True)
def _sum_before(value, sums):
    """The sum of the values of the block's earlier threads, and that of all.

    ``sums`` has ``_SUMS_WORDS``. Few threads add up a group each, then one the groups: less work
    for the device than when all threads take part in each of a number of steps.
    """
    groups, n_groups = _word(THREADS), THREADS // GROUP
    sums[_word(thread())] = value
    cuda.syncthreads()
    if thread() < n_groups:
        sums[groups + thread()] = _scan_run(sums, _word(thread() * GROUP), GROUP)
    cuda.syncthreads()
    if thread() == 0:
        sums[groups + n_groups] = _scan_run(sums, groups, n_groups)
    cuda.syncthreads()
    return sums[_word(thread())] + sums[groups + thread() // GROUP], sums[groups + n_groups]


@cuda.jit(device=True)
def _scan_run(values, first, count):
    """Each value becomes the sum of those before it in the run; returns that of all."""
    before = 0
    for k in range(first, first + count):
        value = values[k]
        values[k] = before
        before += value
    return before
