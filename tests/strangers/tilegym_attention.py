"""TileGym's attention kernels."""

from __future__ import annotations

import math

import torch

from strangers import programs
from strangers.references import attention, causal_mask, normal
from strangers.tilegym_rows import functools, tilegym, untuned

PROGRAMS: list[programs.Program] = []
program = functools.partial(programs.program, PROGRAMS)


def inputs(queries: int, keys: int, heads: int = 4, kv_heads: int = 2, columns: int = 64):
    return normal(2, heads, queries, columns), normal(2, kv_heads, keys, columns), normal(2, kv_heads, keys, columns)


@program("attention.py", "_fmha_kernel")
def fmha():
    for causal in (True, False):
        q, k, v = inputs(128, 256)
        mask = causal_mask(128, 256) if causal else None
        yield tilegym("attention").tile_fmha(q, k, v, is_causal=causal), attention(q, k, v, mask=mask)


@program("attention.py", "_fmha_fwd_kernel_with_lse")
def fmha_with_lse():
    q, k, v = inputs(128, 128)
    out, lse = tilegym("attention").fmha_forward_with_lse(q, k, v, 0.125, True)
    yield out, attention(q, k, v, mask=causal_mask(128, 128))
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.125
    exact = scores.masked_fill(~causal_mask(128, 128), -math.inf).logsumexp(-1)
    yield lse, exact / math.log(2)


@program("attention_sink.py", "_attention_sink_kernel")
def attention_sink():
    for window in (None, 50):
        q, k, v = normal(2, 128, 2, 2, 64), normal(2, 128, 2, 64), normal(2, 128, 2, 64)
        sinks = normal(4)
        got = tilegym("attention_sink").attention_sink(q, k, v, sinks, 0.125, window)
        q, k, v = q.flatten(2, 3).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        want = attention(q, k, v, scale=0.125, mask=causal_mask(128, 128, window), sinks=sinks)
        yield got, want.transpose(1, 2).flatten(2)


@program("attention_sink_decode.py", "_attention_sink_decode_kernel")
def attention_sink_decode():
    for window in (None, 100):
        q, k, v = normal(2, 1, 2, 2, 64), normal(2, 256, 2, 64), normal(2, 256, 2, 64)
        sinks, last = normal(4), torch.tensor([230], dtype=torch.int32)
        module = tilegym("attention_sink_decode")
        got = module.attention_sink_decode(q, k, v, sinks, 0.125, window, last, kv_len_per_split=128)
        q, k, v = q.flatten(2, 3).transpose(1, 2), k.transpose(1, 2)[:, :, :231], v.transpose(1, 2)[:, :, :231]
        mask = causal_mask(1, 231, window)
        yield got, attention(q, k, v, scale=0.125, mask=mask, sinks=sinks).transpose(1, 2).flatten(2)


@program("attention_varlen.py", "_fmha_varlen_kernel")
def fmha_varlen():
    q, k, v = inputs(128, 128)
    lengths, causal = torch.tensor([100, 64], dtype=torch.int32), True
    got = tilegym("attention_varlen").tile_fmha_varlen(q, k, v, is_causal=causal, q_lens=lengths, kv_lens=lengths)
    for batch, length in enumerate(lengths.tolist()):
        q_, k_, v_ = (x[batch : batch + 1, :, :length] for x in (q, k, v))
        yield got[batch : batch + 1, :, :length], attention(q_, k_, v_, mask=causal_mask(length, length))


def alibi(queries: int, keys: int, slopes: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)[None, :]
    return -(rows - columns).abs() * slopes.double()[None, :, None, None]


def check_variant(layout: str, queries: int, keys: int):
    def laid(x):
        return x if layout == "bnsd" else x.permute(1, 2, 0, 3).contiguous()

    run = functools.partial(tilegym("attention_variant").fmha_variant_cutile, layout=layout)
    q, k, v = inputs(queries, keys)
    arguments = laid(q), laid(k), laid(v)
    vector, matrix, slopes = normal(2, 4, 1, keys), normal(2, 4, queries, keys), torch.rand(4).half()
    hidden = (torch.rand(2, 4, queries, keys) < 0.3).to(torch.int8)
    hidden[..., 0] = 0  # at least one key that every query sees
    causal = causal_mask(queries, keys)
    window = causal_mask(queries, keys, 41)
    yield run(*arguments), laid(attention(q, k, v, mask=causal))
    yield run(*arguments, window_size=40), laid(attention(q, k, v, mask=window))
    yield run(*arguments, is_causal=False), laid(attention(q, k, v))
    for kind, bias, added in (
        ("vector", vector, vector),
        ("matrix", matrix, matrix),
        ("alibi", slopes, alibi(queries, keys, slopes)),
    ):
        yield run(*arguments, bias_type=kind, bias=bias), laid(attention(q, k, v, mask=causal, bias=added))
    yield run(*arguments, random_mask=hidden), laid(attention(q, k, v, mask=causal & (hidden == 0)))


@program("attention_variant.py", "_fmha_variant_kernel_bnsd")
def fmha_variant():
    yield from check_variant("bnsd", 128, 256)


@program("attention_variant.py", "_fmha_variant_kernel_nsbd")
def fmha_variant_nsbd():
    # One tile of keys, as many as columns: with more, it loads outside K (test_finds_a_load_outside_its_array).
    yield from check_variant("nsbd", 64, 64)


@program("flash_decode.py", "_attention_decode_kernel_grouped")
def fmha_decode():
    q, k, v = inputs(1, 200)
    yield tilegym("flash_decode").fmha_decode(q, k, v, None, kv_len_per_split=128), attention(q, k, v)


@program("gemma_attention.py", "_gemma_fmha_kernel")
def gemma_attention():
    gemma = tilegym("gemma_attention").gemma_attention_cutile
    for cap in (None, 20.0):
        q, k, v = inputs(256, 256)
        yield gemma(q, k, v, soft_cap=cap), attention(q, k, v, mask=causal_mask(256, 256), cap=cap)
    window = causal_mask(256, 256, 51)
    yield gemma(q, k, v, window_size=50, use_autotune=True), attention(q, k, v, mask=window)


@program("gemma_attention_decode.py", "_gemma_attention_decode_kernel_grouped")
def gemma_attention_decode():
    for cap, window in ((None, 0), (20.0, 150)):
        q, k, v = inputs(1, 256)
        mask = causal_mask(1, 256, window + 1) if window else None
        decode = tilegym("gemma_attention_decode").gemma_fmha_decode
        got = decode(q, k, v, window_size=window, soft_cap=cap, kv_len_per_split=128)
        yield got, attention(q, k, v, mask=mask, cap=cap)


@program("mla.py", "_prefill_mla_kernel")
def mla():
    (q, k, v), q_part, k_part = inputs(128, 128), normal(2, 4, 128, 32), normal(2, 1, 128, 32)
    got = tilegym("mla").tile_mla(q, k, v, q_part, k_part, True, None)
    whole = torch.cat([k, k_part.expand(-1, 2, -1, -1)], -1)
    yield got, attention(torch.cat([q, q_part], -1), whole, v, mask=causal_mask(128, 128))


def check_mla_decoding(decode, keys: int):
    q, q_part, kv, k_part = normal(2, 16, 64), normal(2, 16, 32), normal(2, keys, 64), normal(2, keys, 32)
    got = decode(q, q_part, kv, k_part)
    whole_q, whole_k = torch.cat([q, q_part], -1)[:, :, None], torch.cat([kv, k_part], -1)[:, None]
    yield got, attention(whole_q, whole_k, kv[:, None])[:, :, 0]


@program("mla_decoding.py", "_naive_absorb_mla_transpose_kernel")
def mla_decoding():
    yield from check_mla_decoding(lambda *args: tilegym("mla_decoding").mla_decoding(*args, None)[0], 128)


@program("mla_decoding_split_kv.py", "_naive_absorb_mla_transpose_kernel")
def mla_decoding_split_kv():
    split = functools.partial(tilegym("mla_decoding_split_kv").mla_decoding_split_kv, kv_len_per_split=128)
    yield from check_mla_decoding(split, 200)


@program("experimental/swa_attention.py", "_swa_fwd_kernel")
def swa_attention():
    q, k, v = inputs(200, 200)
    got = tilegym("experimental.swa_attention").tile_swa_attention(q, k, v, 70)
    yield got, attention(q, k, v, mask=causal_mask(200, 200, 70))


@program("experimental/sparse_mla.py", "_sparse_mla_fwd_kernel")
def sparse_mla():
    batch, heads, steps, chosen = 1, 2, 32, 16
    q, q_part, k_part = normal(batch, heads, steps, 32), normal(batch, heads, steps, 16), normal(batch, 1, steps, 16)
    k, v = normal(batch, 1, steps, 32), normal(batch, 1, steps, 32)
    order = torch.stack([torch.randperm(steps) for _ in range(steps)])
    order[:, 0] = 0  # at least one key that every row may see
    indices = torch.where(torch.arange(chosen) > 0, torch.where(order == 0, 1, order)[:, :chosen], 0)
    seen = torch.zeros(steps, steps, dtype=torch.bool).scatter(1, indices, True) & causal_mask(steps, steps)
    distinct = [len(set(row.tolist())) == chosen for row in indices]
    with untuned():
        sparse = tilegym("experimental.sparse_mla").tile_sparse_mla
        got = sparse(q, k, v, indices.int()[None, :, None], q_part, k_part)
    want = attention(torch.cat([q, q_part], -1), torch.cat([k, k_part], -1), v, mask=seen)
    yield got[:, :, distinct], want[:, :, distinct]
