"""Triton kernels of wkv, forward and backward, in three shapes that trade memory traffic for parallelism.

All keep sums as ``value * exp(top)`` with the largest exponent ``top`` taken out, in float32 (or float64).

* sequential: one program per batch row and block of channels walks through time. Each tensor is read once, but
  8 x 1024 channels are too few to keep a large GPU busy.
* chunked: time is cut into chunks. A first kernel sums up each chunk on its own; a second one joins the sums of
  all earlier chunks and walks through its chunk. The inputs are read twice, with T / CHUNK times the parallelism.
* tiled: one program per batch row and block of channels takes a tile of time steps at once and scans it in
  log2(tile) joins. Each tensor is read once, with more arithmetic.

Backward needs no forward states: with the logarithm of the denominator ``log_total`` stored by forward, it is
the same recurrence from the end, over what later outputs ask of a step (sums, and their derivative by w).
"""

# Triton reads the source of these functions: annotations would only be in its way.
# mypy: ignore-errors

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1e38)


@triton.jit
def scales(a, b):
    """Scales of two sums with exponents a and b: the larger one gets 1, the other e^-|a - b|."""
    d = a - b
    e = tl.exp(-tl.abs(d))
    return tl.where(d >= 0, 1.0, e), tl.where(d >= 0, e, 1.0)


@triton.jit
def emit(u, key, value, top, weighted, weights):
    """Output of one step, and the logarithm of its denominator."""
    now = u + key
    past, mine = scales(top, now)
    total = past * weights + mine
    return (past * weighted + mine * value) / total, tl.maximum(top, now) + tl.log(total)


@triton.jit
def absorb(w, key, value, top, weighted, weights):
    """State after one step."""
    before = top + w
    past, mine = scales(before, key)
    return tl.maximum(before, key), past * weighted + mine * value, past * weights + mine


@triton.jit
def answer(u, key, value, out, total, grad, top, ask_v, ask_1, slope_v, slope_1):
    """Gradients of one step, given what later outputs ask of it: of u, of w, of k and of v."""
    now = tl.exp(u + key - total) * grad
    later = tl.exp(key + top)
    direct = now * (value - out)
    through = later * (value * slope_v + slope_1)
    return direct, through, direct + later * (value * ask_v + ask_1), now + later * ask_v


@triton.jit
def ask(w, out, total, grad, top, ask_v, ask_1, slope_v, slope_1):
    """What the outputs from this step on ask of the step before."""
    before = top + w
    past, mine = scales(before, -total)
    slope_v = past * (slope_v + ask_v)
    slope_1 = past * (slope_1 + ask_1)
    ask_v = past * ask_v + mine * grad
    ask_1 = past * ask_1 - mine * grad * out
    return tl.maximum(before, -total), ask_v, ask_1, slope_v, slope_1


@triton.jit
def place(w_ptr, C, CHUNKS, BLOCK: tl.constexpr):
    """Where a program stands: its channels, chunk and batch row, which channels exist, the size of one kind of sums
    (B, CHUNKS, C), and the decay of its channels."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    plane = tl.num_programs(2).to(tl.int64) * CHUNKS * C
    return c, tl.program_id(1), tl.program_id(2), inside, plane, tl.load(w_ptr + c, mask=inside, other=0.0)


@triton.jit
def chunk_forward_sums(w_ptr, k_ptr, v_ptr, sums_ptr, T, C, CHUNKS, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Sum up every chunk but the last on its own: (top, weighted, weights) into sums (3, B, CHUNKS, C)."""
    c, n, b, inside, plane, w = place(w_ptr, C, CHUNKS, BLOCK)
    at = (b.to(tl.int64) * T + n * CHUNK) * C + c
    top = tl.zeros_like(w) + EMPTY
    weighted = tl.zeros_like(w)
    weights = tl.zeros_like(w)
    key = tl.load(k_ptr + at, mask=inside, other=0.0).to(w.dtype)
    value = tl.load(v_ptr + at, mask=inside, other=0.0).to(w.dtype)
    for i in range(CHUNK):
        # The next row is asked for before this one is used, so that it is on its way meanwhile.
        at += C
        wanted = inside & (i + 1 < CHUNK)
        next_key = tl.load(k_ptr + at, mask=wanted, other=0.0).to(w.dtype)
        next_value = tl.load(v_ptr + at, mask=wanted, other=0.0).to(w.dtype)
        top, weighted, weights = absorb(w, key, value, top, weighted, weights)
        key = next_key
        value = next_value
    to = (b.to(tl.int64) * CHUNKS + n) * C + c
    tl.store(sums_ptr + to, top, mask=inside)
    tl.store(sums_ptr + plane + to, weighted, mask=inside)
    tl.store(sums_ptr + 2 * plane + to, weights, mask=inside)


@triton.jit
def walk_forward(w_ptr, u_ptr, k_ptr, v_ptr, y_ptr, total_ptr, sums_ptr, T, C, CHUNKS, CHUNK, BLOCK: tl.constexpr):
    """Outputs of one chunk, from the joined sums of the chunks before it. One chunk of length T: sequential."""
    c, n, b, inside, plane, w = place(w_ptr, C, CHUNKS, BLOCK)
    u = tl.load(u_ptr + c, mask=inside, other=0.0)
    top = tl.zeros_like(w) + EMPTY
    weighted = tl.zeros_like(w)
    weights = tl.zeros_like(w)
    earlier = b.to(tl.int64) * CHUNKS * C + c
    for _ in range(n):
        chunk_top = tl.load(sums_ptr + earlier, mask=inside, other=0.0)
        chunk_weighted = tl.load(sums_ptr + plane + earlier, mask=inside, other=0.0)
        chunk_weights = tl.load(sums_ptr + 2 * plane + earlier, mask=inside, other=0.0)
        before = top + CHUNK * w
        past, mine = scales(before, chunk_top)
        weighted = past * weighted + mine * chunk_weighted
        weights = past * weights + mine * chunk_weights
        top = tl.maximum(before, chunk_top)
        earlier += C
    at = (b.to(tl.int64) * T + n * CHUNK) * C + c
    steps = tl.minimum(CHUNK, T - n * CHUNK)
    key = tl.load(k_ptr + at, mask=inside, other=0.0).to(w.dtype)
    value = tl.load(v_ptr + at, mask=inside, other=0.0).to(w.dtype)
    for i in range(steps):
        wanted = inside & (i + 1 < steps)
        next_key = tl.load(k_ptr + at + C, mask=wanted, other=0.0).to(w.dtype)
        next_value = tl.load(v_ptr + at + C, mask=wanted, other=0.0).to(w.dtype)
        y, total = emit(u, key, value, top, weighted, weights)
        tl.store(y_ptr + at, y, mask=inside)
        tl.store(total_ptr + at, total, mask=inside)
        top, weighted, weights = absorb(w, key, value, top, weighted, weights)
        key = next_key
        value = next_value
        at += C


@triton.jit
def chunk_backward_sums(
    w_ptr, y_ptr, total_ptr, grad_ptr, sums_ptr, T, C, CHUNKS, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum up what every chunk but the first asks of the past: five values into sums (5, B, CHUNKS, C)."""
    c, n, b, inside, plane, w = place(w_ptr, C, CHUNKS, BLOCK)
    n += 1
    top = tl.zeros_like(w) + EMPTY
    ask_v = tl.zeros_like(w)
    ask_1 = tl.zeros_like(w)
    slope_v = tl.zeros_like(w)
    slope_1 = tl.zeros_like(w)
    steps = tl.minimum(CHUNK, T - n * CHUNK)
    at = (b.to(tl.int64) * T + n * CHUNK + steps - 1) * C + c
    out = tl.load(y_ptr + at, mask=inside, other=0.0)
    total = tl.load(total_ptr + at, mask=inside, other=0.0)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(w.dtype)
    for i in range(steps):
        at -= C
        wanted = inside & (i + 1 < steps)
        next_out = tl.load(y_ptr + at, mask=wanted, other=0.0)
        next_total = tl.load(total_ptr + at, mask=wanted, other=0.0)
        next_grad = tl.load(grad_ptr + at, mask=wanted, other=0.0).to(w.dtype)
        top, ask_v, ask_1, slope_v, slope_1 = ask(w, out, total, grad, top, ask_v, ask_1, slope_v, slope_1)
        out = next_out
        total = next_total
        grad = next_grad
    to = (b.to(tl.int64) * CHUNKS + n) * C + c
    tl.store(sums_ptr + to, top, mask=inside)
    tl.store(sums_ptr + plane + to, ask_v, mask=inside)
    tl.store(sums_ptr + 2 * plane + to, ask_1, mask=inside)
    tl.store(sums_ptr + 3 * plane + to, slope_v, mask=inside)
    tl.store(sums_ptr + 4 * plane + to, slope_1, mask=inside)


@triton.jit
def walk_backward(
    w_ptr,
    u_ptr,
    k_ptr,
    v_ptr,
    y_ptr,
    total_ptr,
    grad_ptr,
    sums_ptr,
    gw_ptr,
    gu_ptr,
    gk_ptr,
    gv_ptr,
    T,
    C,
    CHUNKS,
    CHUNK,
    BLOCK: tl.constexpr,
):
    """Gradients of one chunk, from the joined sums of the chunks after it. One chunk of length T: sequential."""
    c, n, b, inside, plane, w = place(w_ptr, C, CHUNKS, BLOCK)
    u = tl.load(u_ptr + c, mask=inside, other=0.0)
    top = tl.zeros_like(w) + EMPTY
    ask_v = tl.zeros_like(w)
    ask_1 = tl.zeros_like(w)
    slope_v = tl.zeros_like(w)
    slope_1 = tl.zeros_like(w)
    later = (b.to(tl.int64) * CHUNKS + CHUNKS - 1) * C + c
    length = (T - (CHUNKS - 1) * CHUNK).to(tl.float32)  # of the last chunk, which may be short; all others are full
    for _ in range(CHUNKS - 1 - n):
        chunk_top = tl.load(sums_ptr + later, mask=inside, other=0.0)
        chunk_v = tl.load(sums_ptr + plane + later, mask=inside, other=0.0)
        chunk_1 = tl.load(sums_ptr + 2 * plane + later, mask=inside, other=0.0)
        chunk_slope_v = tl.load(sums_ptr + 3 * plane + later, mask=inside, other=0.0)
        chunk_slope_1 = tl.load(sums_ptr + 4 * plane + later, mask=inside, other=0.0)
        before = top + length * w
        past, mine = scales(before, chunk_top)
        slope_v = past * (slope_v + length * ask_v) + mine * chunk_slope_v
        slope_1 = past * (slope_1 + length * ask_1) + mine * chunk_slope_1
        ask_v = past * ask_v + mine * chunk_v
        ask_1 = past * ask_1 + mine * chunk_1
        top = tl.maximum(before, chunk_top)
        later -= C
        length = (CHUNK + 0 * T).to(tl.float32)
    steps = tl.minimum(CHUNK, T - n * CHUNK)
    at = (b.to(tl.int64) * T + n * CHUNK + steps - 1) * C + c
    sum_w = tl.zeros_like(w)
    sum_u = tl.zeros_like(w)
    key = tl.load(k_ptr + at, mask=inside, other=0.0).to(w.dtype)
    value = tl.load(v_ptr + at, mask=inside, other=0.0).to(w.dtype)
    out = tl.load(y_ptr + at, mask=inside, other=0.0)
    total = tl.load(total_ptr + at, mask=inside, other=0.0)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(w.dtype)
    for i in range(steps):
        wanted = inside & (i + 1 < steps)
        next_key = tl.load(k_ptr + at - C, mask=wanted, other=0.0).to(w.dtype)
        next_value = tl.load(v_ptr + at - C, mask=wanted, other=0.0).to(w.dtype)
        next_out = tl.load(y_ptr + at - C, mask=wanted, other=0.0)
        next_total = tl.load(total_ptr + at - C, mask=wanted, other=0.0)
        next_grad = tl.load(grad_ptr + at - C, mask=wanted, other=0.0).to(w.dtype)
        gu, gw, gk, gv = answer(u, key, value, out, total, grad, top, ask_v, ask_1, slope_v, slope_1)
        sum_u += gu
        sum_w += gw
        tl.store(gk_ptr + at, gk.to(gk_ptr.dtype.element_ty), mask=inside)
        tl.store(gv_ptr + at, gv.to(gv_ptr.dtype.element_ty), mask=inside)
        top, ask_v, ask_1, slope_v, slope_1 = ask(w, out, total, grad, top, ask_v, ask_1, slope_v, slope_1)
        key = next_key
        value = next_value
        out = next_out
        total = next_total
        grad = next_grad
        at -= C
    to = (b.to(tl.int64) * CHUNKS + n) * C + c
    tl.store(gw_ptr + to, sum_w, mask=inside)
    tl.store(gu_ptr + to, sum_u, mask=inside)


@triton.jit
def join_forward(l_decay, l_top, l_weighted, l_weights, r_decay, r_top, r_weighted, r_weights):
    """Sums of two neighbouring stretches of time, the earlier one first."""
    before = l_top + r_decay
    past, mine = scales(before, r_top)
    return (
        l_decay + r_decay,
        tl.maximum(before, r_top),
        past * l_weighted + mine * r_weighted,
        past * l_weights + mine * r_weights,
    )


@triton.jit
def tile_forward(w_ptr, u_ptr, k_ptr, v_ptr, y_ptr, total_ptr, T, C, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Outputs of a batch row and block of channels, a tile of time steps at once."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(1)
    w = tl.load(w_ptr + c, mask=c < C, other=0.0)[None, :]
    u = tl.load(u_ptr + c, mask=c < C, other=0.0)[None, :]
    row = tl.arange(0, TILE)[:, None]
    last = row == TILE - 1
    carry_top = tl.zeros_like(w) + EMPTY
    carry_weighted = tl.zeros_like(w)
    carry_weights = tl.zeros_like(w)
    steps = (row + 1).to(w.dtype)
    for start in range(0, T, TILE):
        t = start + row
        at = (b.to(tl.int64) * T + t) * C + c[None, :]
        inside = (t < T) & (c < C)[None, :]
        # Position t of the scan takes up step t - 1, so that its result is the state before step t. The carry is
        # the state before the tile's first step t0: position t0 holds nothing new, the rest decays it by t - t0.
        fresh = inside & (row > 0)
        earlier_key = tl.load(k_ptr + at - C, mask=fresh, other=0.0).to(w.dtype)
        earlier_value = tl.load(v_ptr + at - C, mask=fresh, other=0.0).to(w.dtype)
        key = tl.load(k_ptr + at, mask=inside, other=0.0).to(w.dtype)
        value = tl.load(v_ptr + at, mask=inside, other=0.0).to(w.dtype)
        decay = w + tl.zeros_like(key)
        top0 = tl.where(fresh, earlier_key, EMPTY)
        ones = tl.where(fresh, 1.0, tl.zeros_like(key))
        _, top, weighted, weights = tl.associative_scan((decay, top0, earlier_value, ones), 0, join_forward)
        before = carry_top + (steps - 1) * w
        past, mine = scales(before, top)
        top = tl.maximum(before, top)
        weighted = past * carry_weighted + mine * weighted
        weights = past * carry_weights + mine * weights
        y, total = emit(u, key, value, top, weighted, weights)
        tl.store(y_ptr + at, y, mask=inside)
        tl.store(total_ptr + at, total, mask=inside)
        top, weighted, weights = absorb(w, key, value, top, weighted, weights)
        carry_top = tl.sum(tl.where(last, top, 0.0), axis=0)[None, :]
        carry_weighted = tl.sum(tl.where(last, weighted, 0.0), axis=0)[None, :]
        carry_weights = tl.sum(tl.where(last, weights, 0.0), axis=0)[None, :]


@triton.jit
def join_backward(l_steps, l_decay, l_top, l_v, l_1, l_sv, l_s1, r_steps, r_decay, r_top, r_v, r_1, r_sv, r_s1):
    """What two neighbouring stretches ask of the past, the later one first."""
    before = l_top + r_decay
    past, mine = scales(before, r_top)
    return (
        l_steps + r_steps,
        l_decay + r_decay,
        tl.maximum(before, r_top),
        past * l_v + mine * r_v,
        past * l_1 + mine * r_1,
        past * (l_sv + r_steps * l_v) + mine * r_sv,
        past * (l_s1 + r_steps * l_1) + mine * r_s1,
    )


@triton.jit
def tile_backward(
    w_ptr,
    u_ptr,
    k_ptr,
    v_ptr,
    y_ptr,
    total_ptr,
    grad_ptr,
    gw_ptr,
    gu_ptr,
    gk_ptr,
    gv_ptr,
    T,
    C,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of a batch row and block of channels, a tile of time steps at once, from the end."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(1)
    w = tl.load(w_ptr + c, mask=c < C, other=0.0)[None, :]
    u = tl.load(u_ptr + c, mask=c < C, other=0.0)[None, :]
    row = tl.arange(0, TILE)[:, None]
    last = row == TILE - 1
    carry_top = tl.zeros_like(w) + EMPTY
    carry_v = tl.zeros_like(w)
    carry_1 = tl.zeros_like(w)
    carry_sv = tl.zeros_like(w)
    carry_s1 = tl.zeros_like(w)
    sum_w = tl.zeros_like(w)
    sum_u = tl.zeros_like(w)
    done = row.to(w.dtype)
    for start in range(0, T, TILE):
        t = T - 1 - start - row  # time runs backwards along the tile
        at = (b.to(tl.int64) * T + t) * C + c[None, :]
        inside = (t >= 0) & (c < C)[None, :]
        fresh = inside & (row > 0)  # position t takes up step t + 1; the tile's first one starts from the carry
        next_out = tl.load(y_ptr + at + C, mask=fresh, other=0.0)
        next_total = tl.load(total_ptr + at + C, mask=fresh, other=0.0)
        next_grad = tl.load(grad_ptr + at + C, mask=fresh, other=0.0).to(w.dtype)
        key = tl.load(k_ptr + at, mask=inside, other=0.0).to(w.dtype)
        value = tl.load(v_ptr + at, mask=inside, other=0.0).to(w.dtype)
        out = tl.load(y_ptr + at, mask=inside, other=0.0)
        total = tl.load(total_ptr + at, mask=inside, other=0.0)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(w.dtype)
        zeros = tl.zeros_like(key)
        top0 = tl.where(fresh, -next_total, EMPTY)
        _, _, top, ask_v, ask_1, slope_v, slope_1 = tl.associative_scan(
            (zeros + 1.0, w + zeros, top0, next_grad, -next_grad * next_out, zeros, zeros), 0, join_backward
        )
        before = carry_top + done * w
        past, mine = scales(before, top)
        top = tl.maximum(before, top)
        slope_v = past * (carry_sv + done * carry_v) + mine * slope_v
        slope_1 = past * (carry_s1 + done * carry_1) + mine * slope_1
        ask_v = past * carry_v + mine * ask_v
        ask_1 = past * carry_1 + mine * ask_1
        gu, gw, gk, gv = answer(u, key, value, out, total, grad, top, ask_v, ask_1, slope_v, slope_1)
        sum_u += tl.sum(tl.where(inside, gu, 0.0), axis=0)[None, :]
        sum_w += tl.sum(tl.where(inside, gw, 0.0), axis=0)[None, :]
        tl.store(gk_ptr + at, gk.to(gk_ptr.dtype.element_ty), mask=inside)
        tl.store(gv_ptr + at, gv.to(gv_ptr.dtype.element_ty), mask=inside)
        top, ask_v, ask_1, slope_v, slope_1 = ask(w, out, total, grad, top, ask_v, ask_1, slope_v, slope_1)
        carry_top = tl.sum(tl.where(last, top, 0.0), axis=0)[None, :]
        carry_v = tl.sum(tl.where(last, ask_v, 0.0), axis=0)[None, :]
        carry_1 = tl.sum(tl.where(last, ask_1, 0.0), axis=0)[None, :]
        carry_sv = tl.sum(tl.where(last, slope_v, 0.0), axis=0)[None, :]
        carry_s1 = tl.sum(tl.where(last, slope_1, 0.0), axis=0)[None, :]
    to = b.to(tl.int64) * C + c
    tl.store(gw_ptr + to, tl.sum(sum_w, axis=0), mask=c < C)
    tl.store(gu_ptr + to, tl.sum(sum_u, axis=0), mask=c < C)
