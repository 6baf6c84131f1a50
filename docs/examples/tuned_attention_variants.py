"""The variants of attention_variants.py as kernels to tune, with the sizes and arrays of docs/results/attention_variants.md.

    tiledsched tune docs/examples/tuned_attention_variants.py:alibi -p seq_q=4096,seq_k=4096,heads=16,kv_heads=16,head_dim=128

What was measured on an H200 is in attention_variants_sm_90.json, for `tiledsched db import`.
"""

import tiledsched as ts
from docs.examples import attention_variants as variants

causal = ts.flex_attention(mask_mod=variants.causal)
prefix_lm = ts.flex_attention(
    mask_mod=variants.prefix_lm, arrays={"prefix": ts.array("batch", dtype="int32", below=2048)}
)
window_with_global_tokens = ts.flex_attention(mask_mod=variants.window_with_global_tokens(128, 16))
same_document = ts.flex_attention(
    mask_mod=variants.same_document, arrays={"documents": ts.array("batch seq_k", dtype="int32", below=8, sorted=True)}
)
alibi = ts.flex_attention(score_mod=variants.alibi, arrays={"slopes": ts.array("heads", dtype="float32")})
t5_bias = ts.flex_attention(score_mod=variants.t5_bias, arrays={"biases": ts.array("heads 257", dtype="float32")})
softcap = ts.flex_attention(score_mod=variants.softcap(30.0))
neighbourhood_2d = ts.flex_attention(mask_mod=variants.neighbourhood_2d(64, 64, 6))
window_3d = ts.flex_attention(mask_mod=variants.window_3d(16, 16, 2, 4, 4))
tree = ts.flex_attention(
    mask_mod=variants.tree,
    arrays={
        "context": ts.array("batch", dtype="int32", below=4000),
        "ancestors": ts.array("batch seq_q seq_q", dtype="bool"),
    },
)
block_sparse = ts.flex_attention(
    mask_mod=variants.block_sparse(64), arrays={"pattern": ts.array("heads 64 64", dtype="bool")}
)
dense_bias = ts.flex_attention(
    score_mod=variants.dense_bias, arrays={"attn_mask": ts.array("1 heads seq_q seq_k", dtype="bfloat16")}
)
