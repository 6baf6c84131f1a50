"""Twelve kinds of attention for `tiledsched.flex`, each as a function of scores or of what a row sees.

docs/attention_variants.md shows them with pictures. All are tile code: `score` is `[rows, keys]` and scaled already, `q_idx` is
`[rows, 1]` and `kv_idx` is `[1, keys]`, both counted from 0 in their sequence; `b` is the number of the sequence, and `h` that of
the query head. A function is given all arrays of the call, so one that needs none takes `*arrays`.
"""

import math

import cuda.tile as ct


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
    return score + ct.gather(slopes, h) * (kv_idx - q_idx)


def t5_bias(buckets=32, furthest=128):
    exact = buckets // 4
    doublings = math.log2(furthest / exact)

    def score_mod(score, b, h, q_idx, kv_idx, table):
        distance = ct.abs(kv_idx - q_idx)
        far = ct.log2(ct.maximum(distance, exact) / exact) / doublings * exact
        bucket = ct.where(distance < exact, distance, ct.minimum(exact + far.astype(ct.int32), 2 * exact - 1))
        return score + ct.gather(table, (bucket + ct.where(kv_idx > q_idx, 2 * exact, 0), h))

    return score_mod


def softcap(cap):
    def score_mod(score, b, h, q_idx, kv_idx, *arrays):
        return cap * ct.tanh(score / cap)

    return score_mod


def neighbourhood_2d(height, width, radius):
    def mask_mod(b, h, q_idx, kv_idx, *arrays):
        row = ct.minimum(ct.maximum(q_idx // width, radius), height - 1 - radius)
        column = ct.minimum(ct.maximum(q_idx % width, radius), width - 1 - radius)
        return (ct.abs(kv_idx // width - row) <= radius) & (ct.abs(kv_idx % width - column) <= radius)

    return mask_mod


def window_3d(height, width, frames, rows, columns):
    def mask_mod(b, h, q_idx, kv_idx, *arrays):
        time = ct.abs(q_idx // (height * width) - kv_idx // (height * width)) <= frames
        down = ct.abs(q_idx // width % height - kv_idx // width % height) <= rows
        across = ct.abs(q_idx % width - kv_idx % width) <= columns
        return time & down & across

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
    return score + ct.gather(attn_mask, (of_batch, of_head, q_idx, kv_idx))
