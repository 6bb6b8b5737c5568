# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (Triton gives the arguments of a kernel their types.)
"""The device code: moments, their fold, and the LSE. Launched from ``triton_moments`` and ``triton_lse``."""

from __future__ import annotations

import os

import triton
import triton.language as tl

LOG2E = 1.4426950408889634
# Read when the kernels below are defined, as Triton itself does.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def load_masked(pointer, column_live, dim_live, COLUMNS_FIRST: tl.constexpr, UPCAST: tl.constexpr):
    """Query columns, [columns, dims] or [dims, columns]; padding columns and dimensions are zero."""
    if COLUMNS_FIRST:  # noqa: SIM108 - taken at compile time
        mask = column_live[:, None] & dim_live[None, :]
    else:
        mask = column_live[None, :] & dim_live[:, None]
    queries = tl.load(pointer, mask=mask, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    return queries


@triton.jit
def product(keys, queries, QUERIES_FIRST: tl.constexpr):
    """keys x queries or queries x keys, in float32; float32 operands as three TF32 products."""
    left = queries if QUERIES_FIRST else keys
    right = tl.trans(keys) if QUERIES_FIRST else queries
    if keys.dtype == tl.float32:  # noqa: SIM108 - taken at compile time
        logits = tl.dot(left, right, input_precision="tf32x3")
    else:
        logits = tl.dot(left, right)
    return logits


@triton.jit
def tile_logits(
    key_ptr,
    q_ptr,
    queries,
    live,
    dim,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    DIM_CHUNK: tl.constexpr,
    QUERIES_FIRST: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Unscaled logits, float32 [keys, columns], or [columns, keys] if ``QUERIES_FIRST``.

    ``key_ptr`` [keys, DIM_CHUNK] points at the first chunk of the keys; ``queries`` is the first chunk of the
    query columns, ``q_ptr`` where it came from.
    """
    if DIM == DIM_PAD:  # noqa: SIM108 - taken at compile time
        keys = tl.load(key_ptr)
    else:
        keys = tl.load(key_ptr, mask=(dim < DIM)[None, :], other=0.0)
    if UPCAST:
        keys = keys.to(tl.float32)
    logits = product(keys, queries, QUERIES_FIRST)
    if DIM_CHUNK < DIM_PAD:
        # float32 operands do not fit the registers whole; their other chunks are fetched anew for each tile.
        for chunk in tl.range(DIM_CHUNK, DIM_PAD, DIM_CHUNK, num_stages=1):
            more = dim + chunk < DIM
            keys = tl.load(key_ptr + chunk, mask=more[None, :], other=0.0)
            if UPCAST:
                keys = keys.to(tl.float32)
            queries = load_masked(q_ptr + chunk, live, more, QUERIES_FIRST, UPCAST)
            logits += product(keys, queries, QUERIES_FIRST)
    return logits


@triton.jit
def moment_kernel(
    q,
    k_pool,
    lse,
    kv_indices,
    work,
    sums,
    q_row_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    lse_row_stride,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    DIM_CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    LANES: tl.constexpr,
    HEADS_INNER: tl.constexpr,
    FIRST: tl.constexpr,
    ADD: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums over one block of query rows, for one KV head and ``LANES * steps`` positions.

    ``work`` int64 [n, 6]: first row, rows, where the sender's slots start in ``kv_indices``, T, steps per
    lane, offset of the result in ``sums``. The result of a work item is float32 [2, KV_HEADS, T]: 256 times
    the sum over rows and heads of p, then the sum over rows of (256 * GROUP * maxpool7(A))^2. With ``ADD`` it
    is added to what is there.
    """
    # Programs of one tile and KV head are neighbours: the queries of a sender find its keys in the L2 cache.
    item = work + tl.program_id(0) * 6
    kv_head = tl.program_id(1)
    length = tl.load(item + 3).to(tl.int32)
    steps = tl.load(item + 4).to(tl.int32)
    base = tl.program_id(2) * (LANES * steps)
    if base >= length:
        return
    row0 = tl.load(item)
    rows = tl.load(item + 1).to(tl.int32)
    slots = kv_indices + tl.load(item + 2)

    # The order of the columns is chosen so that the sum over the group stays inside a thread.
    column = tl.arange(0, GROUP_PAD * BLOCK_ROWS)
    if HEADS_INNER:
        row = column // GROUP_PAD
        member = column % GROUP_PAD
    else:
        row = column % BLOCK_ROWS
        member = column // BLOCK_ROWS
    live = (row < rows) & (member < GROUP)
    head = kv_head * GROUP + member
    dim = tl.arange(0, DIM_CHUNK)
    q_ptr = q + ((row0 + row) * q_row_stride + head * q_head_stride)[None, :] + dim[:, None]
    queries = load_masked(q_ptr, live, dim < DIM, False, UPCAST)
    # An infinite LSE makes the attention of a padding column exactly zero. Taking 8 off scales attention by
    # 256, so that the squares of small weights stay clear of underflow.
    row_lse = tl.load(lse + (row0 + row) * lse_row_stride + head, mask=live, other=float("inf"))
    row_lse = row_lse * 1.4426950408889634 - 8.0

    lane = tl.arange(0, LANES)
    keys_of_head = k_pool + kv_head.to(tl.int64) * k_head_stride
    attention_out = sums + tl.load(item + 5) + kv_head.to(tl.int64) * length + base
    pooled_out = attention_out + KV_HEADS * length.to(tl.int64)

    # The running maximum over the last seven steps, kept as maxima over 1, 2 and 4 steps at several ages.
    one_1 = tl.zeros([LANES, BLOCK_ROWS], tl.float32)
    two_1 = tl.zeros([LANES, BLOCK_ROWS], tl.float32)
    two_2 = tl.zeros([LANES, BLOCK_ROWS], tl.float32)
    four_1 = tl.zeros([LANES, BLOCK_ROWS], tl.float32)
    four_2 = tl.zeros([LANES, BLOCK_ROWS], tl.float32)
    four_3 = tl.zeros([LANES, BLOCK_ROWS], tl.float32)
    for step in tl.range(0, steps + 6, num_stages=STAGES):
        local = lane * steps + (step - 3)
        position = base + local
        # Clamped, not masked: every load names a real slot, and no padding slot (NaN or not) is read.
        slot = tl.load(slots + tl.minimum(tl.maximum(position, 0), length - 1)).to(tl.int64)
        key_ptr = keys_of_head + slot[:, None] * k_slot_stride + dim[None, :]
        logits = tile_logits(key_ptr, q_ptr, queries, live, dim, DIM, DIM_PAD, DIM_CHUNK, False, UPCAST)
        p = tl.exp2(logits * scale_log2 - row_lse[None, :])
        if HEADS_INNER:
            one = tl.sum(tl.reshape(p, [LANES, BLOCK_ROWS, GROUP_PAD]), axis=2)
        else:
            one = tl.sum(tl.reshape(p, [LANES, GROUP_PAD, BLOCK_ROWS]), axis=1)
        inside = (position >= FIRST) & (position < length)
        one = tl.where(inside[:, None], one, 0.0)
        two = tl.maximum(one, one_1)
        four = tl.maximum(two, two_2)
        seven = tl.maximum(four, four_3)

        total = tl.sum(one, axis=1)
        owned = (step >= 3) & (step < steps + 3) & (position < length)
        out = attention_out + local
        if ADD:
            total += tl.load(out, mask=owned, other=0.0)
        tl.store(out, total, mask=owned)
        # ``seven`` now covers steps step-6 .. step: it is the pool around the position of three steps ago.
        energy = tl.sum(seven * seven, axis=1)
        pooled = (step >= 6) & (position - 3 < length)
        out = pooled_out + (local - 3)
        if ADD:
            energy += tl.load(out, mask=pooled, other=0.0)
        tl.store(out, energy, mask=pooled)
        # A plain rotation (a = b; b = c) stops Triton's pipeliner; max with 0 is the identity on these.
        two_2 = tl.maximum(two_1, 0.0)
        two_1 = two
        four_3 = tl.maximum(four_2, 0.0)
        four_2 = tl.maximum(four_1, 0.0)
        four_1 = four
        one_1 = one


@triton.jit
def fold_kernel(
    sums,
    fold,
    votes,
    energy,
    row_energy,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add one layer's row-block sums of one query to the plan's flat moments, TILE positions a program.

    ``fold`` int64 [m, 6]: offset in ``sums``, row blocks, T, rows, column in the flat buffers, unused. A
    query's sums are [blocks, 2, KV_HEADS, T] as ``moment_kernel`` leaves them.
    """
    query = fold + tl.program_id(1) * 6
    length = tl.load(query + 2).to(tl.int32)
    start = tl.program_id(0) * TILE
    if start >= length:
        return
    first = sums + tl.load(query)
    blocks = tl.load(query + 1).to(tl.int32)
    inverse_rows = 1.0 / tl.load(query + 3).to(tl.float32)
    block_stride = 2 * KV_HEADS * length.to(tl.int64)
    position = start + tl.arange(0, TILE)
    valid = position < length
    vote = tl.zeros([TILE], tl.float32)
    mean_energy = tl.zeros([TILE], tl.float32)
    rows_energy = tl.zeros([TILE], tl.float32)
    for head in range(0, KV_HEADS):
        attention = first + head * length.to(tl.int64)
        pooled = attention + KV_HEADS * length.to(tl.int64)
        pool = tl.zeros([TILE], tl.float32)
        for shift in tl.static_range(-3, 4):
            near = position + shift
            inside = (near >= 0) & (near < length)
            total = tl.zeros([TILE], tl.float32)
            for block in range(0, blocks):
                total += tl.load(attention + block * block_stride + near, mask=inside, other=0.0)
            if shift == 0:
                vote += total
            pool = tl.maximum(pool, total)
        pool *= inverse_rows / GROUP
        mean_energy += pool * pool
        for block in range(0, blocks):
            rows_energy += tl.load(pooled + block * block_stride + position, mask=valid, other=0.0)
    out = tl.load(query + 4) + position
    vote *= inverse_rows / (256.0 * KV_HEADS * GROUP)
    rows_energy *= inverse_rows / (GROUP * GROUP)
    tl.store(votes + out, tl.load(votes + out, mask=valid, other=0.0) + vote, mask=valid)
    tl.store(energy + out, tl.load(energy + out, mask=valid, other=0.0) + mean_energy, mask=valid)
    tl.store(row_energy + out, tl.load(row_energy + out, mask=valid, other=0.0) + rows_energy, mask=valid)


@triton.jit
def lse_kernel(
    q,
    k_pool,
    kv_indices,
    work,
    partial,
    q_row_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    partial_row_stride,
    partial_split_stride,
    scale_log2,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    DIM_CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Natural-log LSE of one row block over one split of its keys, for one KV head.

    ``work`` int64 [n, 6]: first row, rows, kv_start, keys the first row sees, keys per split, unused.
    ``partial`` float32 [splits, N, H]; minus infinity where a row sees no key of the split.
    """
    item = work + tl.program_id(0) * 6
    kv_head = tl.program_id(1)
    row0 = tl.load(item)
    rows = tl.load(item + 1).to(tl.int32)
    slots = kv_indices + tl.load(item + 2)
    seen = tl.load(item + 3).to(tl.int32)
    split_keys = tl.load(item + 4).to(tl.int32)
    last = seen + rows - 1
    start = tl.program_id(2) * split_keys
    stop = tl.minimum(start + split_keys, last)

    column = tl.arange(0, GROUP_PAD * BLOCK_ROWS)
    row = column % BLOCK_ROWS
    member = column // BLOCK_ROWS
    live = (row < rows) & (member < GROUP)
    head = kv_head * GROUP + member
    dim = tl.arange(0, DIM_CHUNK)
    q_ptr = q + ((row0 + row) * q_row_stride + head * q_head_stride)[:, None] + dim[None, :]
    queries = load_masked(q_ptr, live, dim < DIM, True, UPCAST)
    # Row i of the block sees i keys more than its first row.
    visible = tl.where(live, seen + row, 0)
    keys_of_head = k_pool + kv_head.to(tl.int64) * k_head_stride

    high = tl.full([GROUP_PAD * BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD * BLOCK_ROWS], tl.float32)
    for tile in tl.range(start, stop, TILE, num_stages=STAGES):
        position = tile + tl.arange(0, TILE)
        slot = tl.load(slots + tl.minimum(position, last - 1)).to(tl.int64)
        key_ptr = keys_of_head + slot[:, None] * k_slot_stride + dim[None, :]
        logits = tile_logits(key_ptr, q_ptr, queries, live, dim, DIM, DIM_PAD, DIM_CHUNK, True, UPCAST)
        seen_here = (position[None, :] < visible[:, None]) & (position[None, :] < stop)
        logits = tl.where(seen_here, logits * scale_log2, float("-inf"))
        higher = tl.maximum(high, tl.max(logits, axis=1))
        # A row that has seen nothing yet must not meet inf - inf.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(high - shift) + tl.sum(tl.exp2(logits - shift[:, None]), axis=1)
        high = higher
    result = (high + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453
    out = partial + tl.program_id(2).to(tl.int64) * partial_split_stride
    tl.store(out + (row0 + row) * partial_row_stride + head, result, mask=live)
