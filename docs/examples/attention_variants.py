"""Twelve kinds of attention for `tiledsched.flex`, each as a function of scores or of what a row sees.

docs/attention_variants.md shows them with pictures. All are tile code: `score` is `[rows, keys]` and scaled already, `q_idx` is
`[rows, 1]` and `kv_idx` is `[1, keys]`, both counted from 0 in their sequence; `b` is the number of the sequence, and `h` that of
the query head. A function is given all arrays of the call, so one that needs none takes `*arrays`.
"""

import math

import cuda.tile as ct

from tiledsched import load_by_distance, load_tile


def causal(b, h, q_idx, kv_idx, *arrays):
    return kv_idx <= q_idx


def prefix_lm(b, h, q_idx, kv_idx, prefix):
    return (kv_idx <= q_idx) | (kv_idx < ct.gather(prefix, b))


def window_with_global_tokens(window, tokens):
    def mask_mod(b, h, q_idx, kv_idx, *arrays):
        near = ct.abs(q_idx - kv_idx) <= window
        return near | (q_idx < tokens) | (kv_idx < tokens)

    return mask_mod


def same_document(b, h, q_idx, kv_idx, documents):
    return ct.gather(documents, (b, q_idx)) == ct.gather(documents, (b, kv_idx))


def alibi(score, b, h, q_idx, kv_idx, slopes):
    distance = ct.astype(kv_idx, ct.float32) - ct.astype(q_idx, ct.float32)
    return score + ct.gather(slopes, h) * distance


def t5_bias(score, b, h, q_idx, kv_idx, biases):
    return score + load_by_distance(biases, h, q_idx, kv_idx)


def softcap(cap):
    power = 2 * math.log2(math.e) / cap

    def score_mod(score, b, h, q_idx, kv_idx, *arrays):
        above = ct.exp2(score * power, flush_to_zero=True) + 1.0
        return cap - ct.truediv(2.0 * cap, above, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)

    return score_mod


def neighbourhood_2d(height, width, radius):
    def mask_mod(b, h, q_idx, kv_idx, *arrays):
        row = ct.minimum(ct.maximum(q_idx // width, radius), height - 1 - radius)
        column = ct.minimum(ct.maximum(q_idx % width, radius), width - 1 - radius)
        return ct.maximum(ct.abs(kv_idx // width - row), ct.abs(kv_idx % width - column)) <= radius

    return mask_mod


def window_3d(height, width, frames, rows, columns):
    def mask_mod(b, h, q_idx, kv_idx, *arrays):
        time = ct.abs(q_idx // (height * width) - kv_idx // (height * width)) - frames
        down = ct.abs(q_idx // width % height - kv_idx // width % height) - rows
        across = ct.abs(q_idx % width - kv_idx % width) - columns
        return ct.maximum(ct.maximum(time, down), across) <= 0

    return mask_mod


def tree(b, h, q_idx, kv_idx, context, ancestors):
    node = kv_idx - ct.gather(context, b)
    return (node < 0) | ct.gather(ancestors, (b, q_idx, node))


def block_sparse(block):
    def mask_mod(b, h, q_idx, kv_idx, pattern):
        return ct.gather(pattern, (h, q_idx // block, kv_idx // block))

    return mask_mod


def dense_bias(score, b, h, q_idx, kv_idx, attn_mask):
    of_batch, of_head = b % attn_mask.shape[0], h % attn_mask.shape[1]  # 0 where attn_mask is broadcast
    return score + load_tile(attn_mask, (of_batch, of_head, q_idx, kv_idx))


def t5_buckets(buckets=32, furthest=128):
    """The bucket of T5's table for each distance of a key from a row, from -furthest to furthest: a list of integers."""
    exact = buckets // 4
    found = []
    for distance in range(-furthest, furthest + 1):
        far = math.log(max(abs(distance), exact) / exact) / math.log(furthest / exact)
        bucket = min(abs(distance), exact + int(far * exact), 2 * exact - 1)
        found.append(bucket + (2 * exact if distance > 0 else 0))
    return found
