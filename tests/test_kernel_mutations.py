"""That the kernel's tests can fail: faults put into the tile code one at a time, each of which a small battery notices."""

from __future__ import annotations

import inspect
import sys
import types
from functools import lru_cache
from unittest import mock

import numpy as np
import pytest
from attention_runs import run_problem
from kernel_checks import check, make_inputs, one_hot_inputs, schedule_for
from tile_checks import substituted

from tiledsched.interpreter import InterpreterError
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention import entries as attention_entries
from tiledsched.kernels.attention import features as attention_features
from tiledsched.kernels.attention import flat as attention_flat
from tiledsched.kernels.attention import packed as attention_packed
from tiledsched.kernels.attention import scheduler as attention_scheduler
from tiledsched.kernels.attention import split as attention_split
from tiledsched.kernels.attention import tiles as attention_tiles

MUTATIONS = {
    "the last turn left out": ("ct.cdiv(steps, const.UNROLL) * const", "steps // const.UNROLL * const"),
    "a masked step in an unmasked turn": ("first_masked // const.UNROLL * const.UNROLL", "first_masked"),
    "the same step all turn": ("keys, i + u, chains", "keys, i, chains"),
    "queries doubled on the way": ("scale_log2 > 0.0, 1.0, 2.0", "scale_log2 > 0.0, 2.0, 1.0"),
    "causal mask one short": ("columns <= rows", "columns < rows"),
    "causal mask one long": ("columns <= rows", "columns <= rows + 1"),
    "column mask one long": ("columns < keys.K.shape[2]", "columns <= keys.K.shape[2]"),
    "no column mask": ("not const.EVEN", "False"),
    "no mask on scores": ("scores = ct.where(visible, scores, -math.inf)", "scores = scores"),
    "accumulator not rescaled": ("acc = scaled(chain.acc, alpha)", "acc = chain.acc"),
    "row sum not rescaled": ("add_rows(chain.row_sum * alpha, p)", "add_rows(chain.row_sum, p)"),
    "row maximum not kept": ("return Chain(acc, new_max, row_sum), p", "return Chain(acc, chain.row_max, row_sum), p"),
    "row maximum starts at zero": ("if may_see_nothing(const) else -math.inf", "if may_see_nothing(const) else 0.0"),
    "scores not scaled": ("ct.exp2(s * scale_log2 - new_max", "ct.exp2(s - new_max"),
    "output not normalized": ("ct.truediv(acc, row_sum, flush", "ct.truediv(acc, 1.0, flush"),
    "wrong key/value head": ("kv_head = head // const.GROUP if", "kv_head = head % K.shape[1] if"),
    "first loop starts late": ("range(begin, boundary, const", "range(begin + 1, boundary, const"),
    "second loop starts late": ("range(boundary, end, const", "range(boundary + 1, end, const"),
    "loop ends early": ("range(begin, end, const", "range(begin, end - 1, const"),
    "causal tiles unmasked": ("min(place * block_rows, seq_k) //", "min((place + 1) * block_rows, seq_k) //"),
    "ragged tile unmasked": ("first_masked = seq_k // step_n", "first_masked = ct.cdiv(seq_k, step_n)"),
    "causal end too early": ("min((place + 1) * block_rows, seq_k)", "min(place * block_rows + 1, seq_k)"),
    "first value tile only": (
        "load(keys.V, (entry, keys.kv_head, j, column)",
        "load(keys.V, (entry, keys.kv_head, 0, column)",
    ),
    "first key tile only": ("(entry, keys.kv_head, column, j)", "(entry, keys.kv_head, column, 0)"),
    "query of another head": ("load_queries(Q, (entry, head, tile)", "load_queries(Q, (entry, kv_head, tile)"),
    "output of another head": (
        "ct.store(pack_of(Out, work_tile.head, const), (work_tile.batch, place_of(work_tile.head, const),",
        "ct.store(pack_of(Out, work_tile.head, const), (work_tile.batch, place_of(work_tile.head, const) // const.GROUP,",
    ),
    "batch and head exchanged": ("batch_head % heads, batch_head // heads", "batch_head // heads, batch_head % heads"),
    "persistent blocks skip work": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):"),
    "reversed order off by one": ("work_tiles - 1 - place", "work_tiles - place"),
    "heads-fastest order wrong": ("place = work // pairs", "place = work // heads"),
    "rows counted from zero": ("last = tile * const.TILE_M +", "last = 0 * const.TILE_M +"),
    "columns counted from zero": ("columns = j * const.TILE_N +", "columns = 0 * const.TILE_N +"),
    "padding undetermined": ("ct.PaddingMode.ZERO if const.CHECK_BOUNDS else ", ""),
    "always a float16 accumulator": ("ct.float16 if const.FP16_ACCUM else ct.float32", "ct.float16"),
    "probabilities rounded to integers": (
        "p[t].astype(values[t][part].dtype)",
        "p[t].astype(ct.int32).astype(values[t][part].dtype)",
    ),
    "output not cast": ("out.astype(Out.dtype)", "out"),
    "snake's last lap missing": ("snake(ct.bid(0), blocks, total // blocks)", "blocks"),
    "snake's last lap too long": ("total - snake(ct.bid(0), blocks, total // blocks)", "total"),
    "the last output never stored": (
        "epilogues(Out, Lse, work_tile, chains, features, const)\n\n\ndef compute",
        "pass\n\n\ndef compute",
    ),
    "an output of nothing": ("lap > 0 if", "lap >= 0 if"),
    "one output in two": ("lap > 0 if", "lap > 1 if"),
    "an output of nothing, unpeeled": ("else work >= blocks", "else work >= 0"),
    "one output in two, unpeeled": ("else work >= blocks", "else work >= 2 * blocks"),
    "every block's late work tiles are the first's": ("work = lap * blocks + place", "work = lap * blocks"),
    "snake turns short": ("(blocks - 1 - 2 * block)", "(blocks - 2 - 2 * block)"),
    "swizzled groups overlap": ("(SWIZZLE_PAIRS * work_tiles) * SWIZZLE_PAIRS", "(SWIZZLE_PAIRS * work_tiles)"),
    "last swizzled group too wide": ("width = min(SWIZZLE_PAIRS, pairs - first)", "width = SWIZZLE_PAIRS"),
    "swizzled tile counted over heads": (
        "% (SWIZZLE_PAIRS * work_tiles) // width",
        "% (SWIZZLE_PAIRS * work_tiles) // pairs",
    ),
    "backward loop off by one": ("i = keys.steps - 1 - i\n", "i = keys.steps - i\n"),
    "backward loop is masked forward": ("keys.steps - first_masked if backward else first_masked", "first_masked"),
    "backward loop masks the wrong loop": ("backward = const.KV_DIRECTION == BACKWARD", "backward = False"),
    "sawtooth stands still": ("(keys.steps - 1 - 2 * i)", "(keys.steps - 1 - i)"),
    "sawtooth turns everywhere by two": ("else place % 2", "else place % 2 * 2"),
    "wide sawtooth turns everywhere by two": ("TOOTH % 2 if", "TOOTH % 2 * 2 if"),
    "unseen steps make NaN": ("LOWEST if may_see_nothing(const) else -math.inf", "-math.inf"),
    "lowest maximum too high": ("LOWEST = -3.4e38", "LOWEST = -10.0"),
    "second query tile is the first": ("place * const.Q_SUBTILES + s", "place * const.Q_SUBTILES"),
    "second query tile beyond the end": (
        "tile = min(tile, ct.cdiv(seq_q, const.TILE_M // const.PACK) - 1)",
        "tile = tile",
    ),
    "second key tile is the first": ("i * const.KV_SUBTILES + t", "i * const.KV_SUBTILES"),
    "second key tile beyond the end": (
        "if const.EVEN or (const.KV_SUBTILES == 1 and",
        "if True or (const.KV_SUBTILES == 1 and",
    ),
    "maximum of the first key tile only": ("step_max = ct.maximum(step_max, ", "step_max = ct.minimum(step_max, "),
    "scores ahead of themselves": ("products(queries, keys, i + 1, const)", "products(queries, keys, i, const)"),
    "last step ahead not folded": ("fold(rows, keys, end, chains,", "fold(rows, keys, end - 1, chains,"),
    "last step ahead unmasked": ("True, scale_log2, const)\n    return", "False, scale_log2, const)\n    return"),
    "boundary beyond the last step": ("boundary = min(boundary, end)", "boundary = boundary"),
    "keys not transposed": ("(0, 1, 3, 2)", "(0, 1, 2, 3)"),
    "bounds never checked": ("check_bounds=const.CHECK_BOUNDS", "check_bounds=False"),
    "exact division by something else": ("out = ct.truediv(acc, row_sum)", "out = ct.truediv(acc, row_sum + 1)"),
    "lazy rescaling never": ("> RESCALE_ABOVE", "> math.inf"),
    "lazy rescaling forgets the sum": ("            row_sum = row_sum * alpha\n", "            row_sum = row_sum\n"),
    "lazy rescaling forgets the output": ("acc = scaled(acc, alpha)", "acc = acc"),
    "lazy rescaling takes the new maximum": ("new_max = chain.row_max", "new_max = new_max"),
}

MUTATIONS_ELSEWHERE = {
    "bottom-right mask off by one": ("return last + offset if", "return last + offset + 1 if"),
    "bottom-right mask at the top left": (
        "return last + offset if const.BOTTOM_RIGHT or const.WINDOW_RIGHT or const.STARTS else last",
        "return last",
    ),
    "bottom-right offset the wrong way": (
        "K.shape[2] - seq_q if const.BOTTOM_RIGHT",
        "seq_q - K.shape[2] if const.BOTTOM_RIGHT",
    ),
    "bottom-right end too early": (
        "min(max((place + 1) * block_rows + offset, 0)",
        "min(max(place * block_rows + 1 + offset, 0)",
    ),
    "bottom-right tiles unmasked": (
        "min(max(place * block_rows + offset, 0)",
        "min(max((place + 1) * block_rows + offset, 0)",
    ),
    "no step where nothing is seen": ("steps = max(steps, 1)", "steps = max(steps, 0)"),
    "nothing divided by nothing": ("ct.where(row_sum > 0.0, row_sum, 1.0)", "row_sum"),
    "log-sum-exp in powers of two": ("ct.log2(chain.row_sum)) * LN_2", "ct.log2(chain.row_sum))"),
    "log-sum-exp without its maximum": ("(chain.row_max + ct.log2(", "(0.0 * chain.row_max + ct.log2("),
    "log-sum-exp of another head": (
        "ct.store(pack_of(Lse, work_tile.head, const), (work_tile.batch, place_of(work_tile.head, const),",
        "ct.store(pack_of(Lse, work_tile.head, const), (work_tile.batch, place_of(work_tile.head, const) // const.GROUP,",
    ),
    "second part of the columns is the first": ("else (REST, TILE // REST)", "else (REST, 0)"),
    "second part of the columns not held": (
        "part * one.astype(part.dtype) for part in ct.static_iter(parts)",
        "parts[0] * one.astype(part.dtype) for part in ct.static_iter(parts)",
    ),
    "second part of the columns left out": (
        "product = ct.mma(q[part], k[part], product)",
        "product = ct.mma(q[0], k[0], product)",
    ),
    "second part takes the first's values": ("total = chain.acc[part]", "total = chain.acc[0]"),
    "packed rows counted as one head's": ("[:, None] % rows", "[:, None]"),
    "packed tiles too tall": ("last = tile * rows +", "last = tile * const.TILE_M +"),
    "packed heads spread over all": ("if const.PACK == 1 else head", "if const.PACK == 1 else head // const.GROUP"),
    "packed work tiles of one head": ("Q.shape[1] if const.PACK == 1 else Q.shape[1] // const.GROUP", "Q.shape[1]"),
    "packs as wide as a tile": ("Q.shape[1] // const.GROUP", "Q.shape[1] // const.PACK"),
    "packs a tile apart": ("start=head * const.GROUP", "start=min(head, 1) * const.PACK"),
    "every pack the first": ("start=head * const.GROUP, stop=(head + 1) * const.GROUP", "start=0, stop=const.GROUP"),
    "packs with the next one's heads": (
        "stop=(head + 1) * const.GROUP",
        "stop=min(array.shape[1], head * const.GROUP + const.PACK)",
    ),
    "shares overlap": ("begin, end = steps * split //", "begin, end = steps * split // 2 //"),
    "shares leave gaps": ("steps * (split + 1) // const.KV_SPLITS", "steps // const.KV_SPLITS * (split + 1)"),
    "boundary before the share": ("boundary = max(boundary, begin)", "boundary = boundary"),
    "boundary behind the share": ("if const.QK_AHEAD or const.KV_SPLITS > 1", "if const.QK_AHEAD"),
    "first to arrive combines": ("arrived == const.KV_SPLITS - 1", "arrived == 0"),
    "nobody combines": ("arrived == const.KV_SPLITS - 1", "arrived == const.KV_SPLITS"),
    "counter not reset": ("ct.scatter(Counters, (work, 0), 0)", "pass"),
    "counter of the block": ("ct.atomic_add(Counters, (work, 0), 1)", "ct.atomic_add(Counters, (work // 2, 0), 1)"),
    "every share in one slot": ("* const.KV_SPLITS + split", "* const.KV_SPLITS"),
    "shares not rescaled": (
        "share.reshape((const.TILE_M, width)) * share_weight",
        "share.reshape((const.TILE_M, width))",
    ),
    "sums not rescaled": ("ct.sum(sums * weight(maxima, row_max), axis=0)", "ct.sum(sums, axis=0)"),
    "sum of the first share": (
        "sums = ct.load(State, (place, 1, 0), shares",
        "sums = ct.load(State, (place, 0, 0), shares",
    ),
    "shares of one group": ("range(const.KV_SPLITS // together(const))", "range(1)"),
    "every group the first": ("group * together(const) + each", "each"),
    "one share of each group": ("ct.static_iter(range(together(const)))", "ct.static_iter(range(1))"),
    "shares by the order of blocks": ("slot_of((batch * packs + head) * work_tiles + place, s,", "slot_of(work, s,"),
    "rows of the first head": (
        "pack, member = head // const.TILE_HEADS, head % const.TILE_HEADS",
        "pack, member = head // const.TILE_HEADS, 0",
    ),
    "shares of the first pack": ("+ pack) * work_tiles + tile", ") * work_tiles + tile"),
    "shares of the first tile": ("* work_tiles + tile // const.Q_SUBTILES\n", "* work_tiles\n"),
    "shares of one subtile": (
        "place = work * const.Q_SUBTILES + tile % const.Q_SUBTILES",
        "place = work * const.Q_SUBTILES",
    ),
    "states of the first row": (
        "(member * const.TILE_ROWS + row) // const.TILE_M",
        "member * const.TILE_ROWS // const.TILE_M",
    ),
    "rows of the first block": ("(place, member, row // const.TILE_M, column)", "(place, member, 0, column)"),
    "maxima not told apart": ("weights = weight(maxima, row_max)", "weights = weight(row_max, row_max)"),
    "sums of the maxima": (
        "sums = ct.load(State, (place, 1, part), shares",
        "sums = ct.load(State, (place, 0, part), shares",
    ),
    "found shares not rescaled": ("found * weights.reshape((const.KV_SPLITS, const.TILE_M, 1))", "found"),
    "states of the first query tile": ("place, shares = work * const.Q_SUBTILES + s,", "place, shares = 0,"),
    "share of another maximum": (
        "ct.store(State, (slot, 0, 0), chain.row_max",
        "ct.store(State, (slot, 0, 0), chain.row_sum",
    ),
    "shares in float16": ("chain.acc[part].astype(ct.float32).reshape", "chain.acc[part].astype(ct.float16).reshape"),
}

MUTATIONS_FLAT = {
    "counting from the first lap only": ("range(laps_of(Q, blocks, const))", "range(1)"),
    "a work tile takes one turn more": ("return ct.cdiv(narrowed(", "return 1 + ct.cdiv(narrowed("),
    "old output in the next work tile": ("            chain = forgetful(chain, const)\n", ""),
    "old queries in the next work tile": ("elif not const.RELOAD_Q:", "elif False:"),
    "queries never loaded again": ("if const.RELOAD_Q:", "if False:"),
    "the first queries ahead for ever": ("ahead = queries_of(Q, lap + 1, blocks, const)", "ahead = ahead"),
    "queries one work tile late": ("queries_of(Q, lap + 1, blocks", "queries_of(Q, lap, blocks"),
    "the second work tile's queries in the first": (
        "queries = queries_of(Q, 0, blocks",
        "queries = queries_of(Q, 1, blocks",
    ),
    "steps go on counting": ("            i = 0\n", ""),
    "one step of two": ("keys, i + u, first_masked", "keys, i, first_masked"),
    "steps counted singly": ("i = i + const.FLAT_STEPS", "i = i + 1"),
    "always the same lap": ("lap = lap + 1", "lap = lap"),
    "snake goes straight": ("place = snake(ct.bid(0), blocks, lap) if", "place = ct.bid(0) if"),
    "beyond the last work tile": (
        "min(lap * blocks + place, work_tiles * heads * batches - 1)",
        "lap * blocks + place",
    ),
    "masked a step late": ("masked = i >= first_masked", "masked = i > first_masked"),
    "never masked": ("masked = i >= first_masked", "masked = i < 0"),
    "forgets by the wrong maximum": ("(const.TILE_M, 1), LOWEST, dtype", "(const.TILE_M, 1), 0.0, dtype"),
    "remembers what saw nothing": ("return fresh_chain(const)\n    return", "pass\n    return"),
    "second step beyond the end": (
        "if const.EVEN or (const.KV_SUBTILES == 1 and",
        "if True or (const.KV_SUBTILES == 1 and",
    ),
}

MUTATIONS_ASKED = {
    "window one key short": ("columns > rows - span.window", "columns > rows - span.window + 1"),
    "window one key long": ("columns > rows - span.window", "columns >= rows - span.window"),
    "no window": ("visible = visible & (columns > rows", "visible = visible | (columns > rows"),
    "no causal mask in a window": ("visible = visible & (columns <= rows)", "visible = visible"),
    "first step of the window late": ("offset + 1 - window, 0)", "offset + 33 - window, 0)"),
    "early keys of the last row unmasked": (
        "(place + 1) * block_rows + offset - window",
        "place * block_rows + offset - window",
    ),
    "early keys unmasked": ("left = ct.cdiv(last_first_key, step_n) - first", "left = 0"),
    "no keys after a row's own": ("    if const.WINDOW_RIGHT:\n", "    if False:\n"),
    "no row knows of keys after its own": (
        "if const.BOTTOM_RIGHT or const.WINDOW_RIGHT or const.STARTS else",
        "if const.BOTTOM_RIGHT or const.STARTS else",
    ),
    "steps end at a row's own key": (
        "(const.BOTTOM_RIGHT or const.WINDOW_RIGHT or const.STARTS)",
        "(const.BOTTOM_RIGHT or const.STARTS)",
    ),
    "both sides of a window as one": ("features.window + features.window_right if const", "features.window if const"),
    "steps counted from all keys": ("steps = max(steps - first, 1)", "steps = max(steps, 1)"),
    "late keys unmasked": ("first_masked = max(first_masked - first, 0)", "first_masked = first_masked"),
    "the first step forgotten": ("i = i + keys.span.first", "i = i"),
    "half a turn skipped": (" // step_n // turn * turn", " // step_n"),
    "the window beyond the keys": ("min(first_key, most) //", "first_key //"),
    "early turns unmasked": ("ct.cdiv(keys.span.left, const.UNROLL) *", "keys.span.left // const.UNROLL *"),
    "backward ends exchanged": ("keys.steps - last, keys.steps - left", "keys.steps - left, keys.steps - last"),
    "a share's first boundary": ("min(max(boundary, begin), end), ", "min(boundary, end), "),
    "a share's second boundary": (", min(max(second, begin), end)", ", max(second, begin)"),
    "starts one late": ("start, stop=end), V", "start + 1, stop=end), V"),
    "values behind the length count": (
        "V.slice(axis=2, start=start, stop=end)",
        "V.slice(axis=2, start=start, stop=V.shape[2])",
    ),
    "the diagonal stays where it was": (", offset - start", ", offset"),
    "starts of the first sequence": ("features.Starts, (batch,)", "features.Starts, (0,)"),
    "starts below zero": (
        "Starts, (batch,), check_bounds=False), 0)",
        "Starts, (batch,), check_bounds=False), -9999999)",
    ),
    "lengths one long": ("columns < span.end", "columns <= span.end"),
    "lengths of the first sequence": ("features.Lengths, (batch,)", "features.Lengths, (0,)"),
    "lengths beyond the keys": ("check_bounds=False), 0), seq_k)", "check_bounds=False), 0), 9999999)"),
    "nothing divided by nothing": ("if rows_see_nothing(const):  # rows", "if const.BOTTOM_RIGHT:  # rows"),
    "remembers what saw nothing": ("if rows_see_nothing(const):  # a row", "if const.BOTTOM_RIGHT:  # a row"),
    "flat early steps unmasked": ("masked | (i < keys.span.left)", "masked"),
    "scores not capped": ("    if const.SOFTCAP:\n", "    if False:\n"),
    "half the cap": ("1.0 - ct.truediv(2.0, power + 1.0", "1.0 - ct.truediv(1.0, power + 1.0"),
    "no sinks": ("    if const.SINKS:\n", "    if False:\n"),
    "sinks in powers of two": (".astype(ct.float32) / LN_2", ".astype(ct.float32)"),
    "sinks of another head": ("heads = first + ct.arange", "heads = 0 * first + ct.arange"),
    "sinks of one packed head": ("[:, None] // (const.TILE_M // const.PACK)", "[:, None] // const.TILE_M"),
    "sinks under another maximum": ("ct.exp2(sink - row_max", "ct.exp2(sink - chain.row_max"),
    "output not rescaled by the sink": ("part.astype(ct.float32) * alpha", "part.astype(ct.float32)"),
    "sum not rescaled by the sink": ("chain.row_sum * alpha + ct.exp2(sink", "chain.row_sum + ct.exp2(sink"),
}


MUTATIONS_PLACED = {
    "bisection one sequence early": ("block_rows, features) <= place:", "block_rows, features) < place:"),
    "every place the first sequence's": ("while beyond - sequence > 1", "while beyond - sequence > 1000"),
    "bisection ends early": ("while beyond - sequence > 1", "while beyond - sequence > 2"),
    "places without one for each sequence": (
        "return sequence + ct.gather(features.CuQ",
        "return ct.gather(features.CuQ",
    ),
    "places counted in rows": ("check_bounds=False) // block_rows\n", "check_bounds=False)\n"),
    "places counted from the head's first": ("max(place - first_place(sequence, block_rows, features), 0)", "place"),
    "a head's last place missing": (
        "rows_of_work(const) + features.CuQ.shape[0] - 1",
        "rows_of_work(const) + features.CuQ.shape[0] - 2",
    ),
    "a head of no sequences": (" + features.CuQ.shape[0] - 1", ""),
    "a place too many is filled": (
        "place * rows_of_work(const) < Q.shape[2]",
        "place * rows_of_work(const) <= Q.shape[2]",
    ),
    "second work tiles are left out": ("place * rows_of_work(const) < Q.shape[2]", "place < 1"),
    "rows of the next sequence, too": (
        "min(max(ct.gather(offsets, (sequence + 1,), check_bounds=False), begin), rows)",
        "rows",
    ),
    "rows from the first on": ("start=begin, stop=end", "start=0, stop=end"),
    "keys where queries begin": (
        "own_rows(K, features.CuK, sequence), own_rows(V, features.CuK",
        "own_rows(K, features.CuQ, sequence), own_rows(V, features.CuQ",
    ),
    "outputs of another sequence": (
        "return own_rows(Out, features.CuQ, sequence), Lse",
        "return own_rows(Out, features.CuQ, 0), Lse",
    ),
    "log-sum-exps where they were": ("        Lse = own_rows(Lse, features.CuQ, sequence)", "        pass"),
    "even keys unmasked": ("const.CHECK_BOUNDS else ", "False else "),
    "a step where there are no keys": ("steps = min(steps, ct.cdiv(end,", "steps = min(steps, 1 + ct.cdiv(end,"),
    "nothing divided by nothing": ("or const.LENGTHS or const.PACKED", "or const.LENGTHS"),
    "another sequence's sizes": ("entry = 0 if const.PACKED else batch", "entry = batch"),
    "keys of the first entry": ("batch if const.PAGE else entry", "entry"),
    "diagonal at the table's end": (
        "return min(max(length, 0), features.Table.shape[1] * const.PAGE) - seq_q",
        "return features.Table.shape[1] * const.PAGE - seq_q",
    ),
    "diagonal at the top": (" * const.PAGE) - seq_q", " * const.PAGE)"),
    "tables of the first sequence": ("(keys.batch, place)", "(0, place)"),
    "keys behind the length unmasked": ("steps_of(place, offset, end, const)", "steps_of(place, offset, seq_k, const)"),
    "pages behind the last key count": ("used = columns < keys.span.end", "used = columns >= 0"),
    "a freed page counts": ("used & (columns >= keys.span.first_key)", "used"),
    "always the first page": ("page_at(keys, j // tiles)", "page_at(keys, 0)"),
    "pages beyond the last key": ("(keys.batch, ct.minimum(first + each, last))", "(keys.batch, first + each)"),
    "pages beyond the last key, one by one": ("page_at(keys, min(first + n, last))", "page_at(keys, first + n)"),
    "a tile's first page alone": (
        "(keys.batch, ct.minimum(first + each, last))",
        "(keys.batch, ct.minimum(first, last))",
    ),
    "a tile's pages, one late": ("page_at(keys, min(first + n, last))", "page_at(keys, min(first + n + 1, last))"),
    "a tile's pages in the same place": ("ct.where(each == n,", "ct.where(each <= n,"),
    "every tile's first pages": ("first, last = j * pages,", "first, last = 0 * pages,"),
    "tiles of pages as of one": ("first, last = j * pages,", "first, last = j,"),
    "pages of another head": ("ct.Slice(head, 1)", "ct.Slice(0, 1)"),
    "a page's first keys again": ("j // tiles), j % tiles", "j // tiles), 0"),
    "pages as long as a tile": ("const.PAGE // const.TILE_N", "1"),
    "keys of pages not transposed": ("k = ct.permute(k, (1, 0))", "k = k.reshape((width, const.TILE_N))"),
    "the last tile of a page for all": (
        "return min(j, max(ct.cdiv(keys.span.end, const.TILE_N) - 1, 0))",
        "return min(j, 0)",
    ),
    "keys of a page alone": ("features.Table.shape[1] * const.PAGE if const.PAGE else K.shape[2]", "K.shape[2]"),
}


MODULES = (
    attention_scheduler,
    attention_packed,
    attention_features,
    attention_tiles,
    attention_split,
    attention_flat,
    attention_entries,
)
"""In the order in which they name each other."""


@lru_cache
def source_of(module):
    return inspect.getsource(module)


@lru_cache(maxsize=64)
def compiled(source, name):
    """Most modules are the same for every mutation."""
    return compile(source, name, "exec")


def mutated(old, new):
    """Attention over copies of the kernel's modules with `old` replaced by `new` wherever it stands."""
    sources = {module.__name__: source_of(module) for module in MODULES}
    copies = {name: types.ModuleType(name) for name in sources}
    with mock.patch.dict(sys.modules, copies):  # so that they import each other
        for name, source in substituted(sources, old, new).items():
            exec(compiled(source, f"mutated_{name}"), copies[name].__dict__)

    class Mutated(Attention):
        name = "attention with a fault"
        suites, default_suite = {}, ""  # else each of their problems is made once more, for every mutation

        def launches(p, s, device):
            entries = copies[attention_entries.__name__]
            return [(getattr(entries, entry.__name__), grid) for entry, grid in Attention.launches(p, s, device)]

    return Mutated


def battery(kernel):
    """Cases that between them must notice every mutation above; those come first that notice most in little time."""
    causal = Attention.problem(seq_q=200, seq_k=170, head_dim=40, causal=True, batch=2, heads=4, kv_heads=2)
    lean = causal.replace(batch=1, heads=2, kv_heads=1)
    ragged = lean.replace(causal=False)
    even = Attention.problem(seq_q=256, seq_k=128, head_dim=64, causal=True, heads=2)
    many = Attention.problem(seq_q=130, seq_k=70, head_dim=16, causal=True, batch=3, heads=3, kv_heads=3)
    wide = lean.replace(head_dim=64)
    q, k, v = make_inputs(wide)
    negative: dict = {"inputs": (np.full_like(q, -30), np.full_like(k, 30), v)}
    tiles: dict = {"tile_m": 64, "tile_n": 64}
    in_turns: dict = {"unroll": 2, "q_in_registers": True, "persistent": "snake"}
    unexplored: dict = {"forced": True}  # right in these tiles, too, though explored in others only
    for problem, knobs, more in (
        (lean, {"persistent": "strided", "store_late": True, "q_subtiles": 2}, {}),
        (lean, in_turns | {"loop_split": True, "kv_direction": "backward"}, {}),
        (lean.replace(seq_k=64), {"qk_ahead": True, "loop_split": True}, {}),
        (wide, {"lazy_rescale": True}, {"inputs": (q * 8, k * 8, v)}),  # maxima that grow by more than 2**8, row by row
        (lean, {"block_order": "heads_fastest", "persistent": "strided"}, {}),
        (lean, {"kv_direction": "sawtooth"}, {}),
        (many, {"block_order": "swizzled"}, {}),
        (lean.replace(seq_q=130), {"q_subtiles": 2}, {}),
        (lean, {"qk_ahead": True}, {}),
        (wide, {}, negative),
        (ragged, {"loop_split": True}, {}),
        (wide, {"tile_m": 128, "tile_n": 32, "kv_direction": "backward"}, negative),
        (ragged.replace(seq_k=40), {"kv_subtiles": 2}, {}),
        (lean, {"lazy_rescale": True}, {}),
        (many, {"persistent": "snake", "block_order": "heads_fastest"}, {}),
        (many, {"persistent": "snake", "store_late": True, "peel_first": False}, unexplored),
        (ragged, {"division": "ieee"}, {}),
        (ragged, {"kv_subtiles": 2}, {}),
        (ragged.replace(seq_q=300), {"kv_direction": "wide_sawtooth"}, unexplored),
        (causal, {}, {}),
        (lean, {"loop_split": True}, {}),
        (many, {"persistent": "snake", "store_late": True}, {}),
        (lean, in_turns, {}),
        (lean, {"loop_split": True, "block_order": "reversed", "persistent": "strided"}, {}),
        (lean.replace(seq_k=40), {"loop_split": True}, {}),
        (lean, {"tile_m": 128, "tile_n": 32}, {}),
        (ragged, {}, {}),
        (ragged.replace(seq_k=192, dtype="bfloat16"), {}, {}),
        (many, {"persistent": "snake", "store_late": True, "q_in_registers": True}, {}),
        (lean, in_turns | {"loop_split": True}, {}),
        (ragged, in_turns | {"persistent": "strided"}, {}),
        (lean, {"kv_direction": "backward", "tile_m": 128, "tile_n": 32}, {}),
        (lean, {"kv_direction": "backward", "loop_split": True}, {}),
        (even, {"check_bounds": False}, {}),
        (ragged.replace(seq_q=300), {"q_subtiles": 2, "q_in_registers": True, "persistent": "strided"}, unexplored),
        (wide, {}, {"inputs": (np.full_like(q, 60), np.full_like(k, 60), v), "scale": 1e-3}),
    ):
        forced = more is unexplored
        check(problem, schedule_for(problem, forced=forced, **tiles | knobs), kernel=kernel, **({} if forced else more))
    inputs, expected = one_hot_inputs(wide)
    np.testing.assert_array_equal(run_problem(kernel, schedule_for(wide, **tiles), wide, *inputs, 1.0), expected)


def battery_elsewhere(kernel):
    """Cases that must notice every mutation of what only some problems and schedules use, in the order of `battery`."""
    causal = Attention.problem(seq_q=200, seq_k=170, head_dim=40, causal=True, batch=2, heads=4, kv_heads=2)
    tiles: dict = {"tile_m": 64, "tile_n": 64}
    lean = causal.replace(batch=1, heads=2, kv_heads=1)
    right = lean.replace(alignment="bottom_right", lse=True)
    tall, few = right.replace(seq_k=90), right.replace(seq_q=5, seq_k=330, batch=2, heads=4, kv_heads=2)
    split: dict = {"kv_splits": 4, "tma_loads": False}
    later: dict = {"kv_splits": 4, "kv_combine": "launch"}
    for problem, knobs in (
        (few.replace(seq_q=100, heads=2, batch=1), split | {"kv_splits": 2, "loop_split": True}),
        (right.replace(head_dim=96, value_dim=80), {"column_parts": 2}),
        (few.replace(heads=6), later | {"tile_m": 16, "pack_gqa": True}),
        (tall, {"qk_ahead": True, "loop_split": True}),
        (
            lean.replace(seq_k=300, lse=True),
            later | {"kv_splits": 8, "tile_n": 32, "q_subtiles": 2, "block_order": "heads_fastest"},
        ),
        (lean, split | {"kv_splits": 2, "loop_split": True, "tile_m": 128, "tile_n": 32}),
        (right.replace(head_dim=96, value_dim=80), {"column_parts": 2, "q_in_registers": True, "persistent": "snake"}),
        (few.replace(value_dim=100), split),
        (few.replace(seq_q=16), {"tile_m": 16, "pack_gqa": True}),
        (few.replace(heads=6), {"tile_m": 16, "pack_gqa": True}),
        (few, split | {"loop_split": True}),
        (right, {}),
        (few, {"tile_m": 16, "pack_gqa": True}),
        (right.replace(seq_q=90), {"loop_split": True}),
        (tall, {"kv_direction": "backward", "loop_split": True}),
        (few, split | {"tile_m": 16, "pack_gqa": True}),
    ):
        for order in ("reversed", "forward") if "kv_splits" in knobs else ("forward",):
            schedule = schedule_for(problem, forced="kv_splits" in knobs, **tiles | knobs)
            check(problem, schedule, kernel=kernel, order=order)
    narrow = few.replace(causal=False)
    q, k, v = make_inputs(narrow)
    large = (v.astype(np.float32) * 2e4).clip(-60000, 60000).astype(v.dtype)
    check(narrow, schedule_for(narrow, forced=True, **tiles | split), (q, k, large), kernel=kernel)


def battery_flat(kernel):
    """Cases that must notice every mutation of a flat loop."""
    causal = Attention.problem(seq_q=200, seq_k=170, head_dim=40, causal=True, batch=2, heads=2, kv_heads=1)
    flat: dict = {"tile_m": 64, "tile_n": 64, "persistent": "strided", "flat_steps": 1}
    for problem, knobs in (
        (causal.replace(seq_k=90, alignment="bottom_right"), {"loop_split": True}),
        (causal.replace(causal=False, seq_k=192), {"flat_steps": 2, "reload_q": True}),
        (causal, {"loop_split": True, "q_ahead": True, "persistent": "snake"}),
        (causal.replace(heads=5, kv_heads=5, batch=1, seq_q=130), {"persistent": "snake", "occupancy": 2}),
        (causal, {}),
        (causal, {"flat_steps": 2, "persistent": "snake", "tile_n": 32}),
        (causal, {"loop_split": True, "reload_q": True}),
        (causal.replace(causal=False), {"flat_steps": 2}),
    ):
        check(problem, schedule_for(problem, **flat | knobs), kernel=kernel)
    q, k, v = make_inputs(causal)
    check(causal, schedule_for(causal, **flat), (np.full_like(q, -30), np.full_like(k, 30), v), kernel=kernel)


@pytest.mark.parametrize("name", MUTATIONS_FLAT)
def test_mutations_of_flat_loops_are_noticed(name):
    kernel = mutated(*MUTATIONS_FLAT[name])
    with pytest.raises((AssertionError, InterpreterError)):
        battery_flat(kernel)


def battery_asked(kernel):
    """Cases that must notice every mutation of what some models ask for beside."""
    small = Attention.problem(seq_q=200, seq_k=200, head_dim=16, causal=True, heads=2, kv_heads=1, lse=True)
    window = small.replace(window=40)
    several = small.replace(batch=3)
    both = several.replace(starts=True, lengths=True)
    backward = {"kv_direction": "backward", "loop_split": True}
    in_turns = {"unroll": 2, "q_in_registers": True, "persistent": "snake"}
    split = {"kv_splits": 2, "tma_loads": False, "loop_split": True}
    flat = {"persistent": "strided", "flat_steps": 1}
    wild: dict = {
        "more": {
            "Starts": np.array([-5, 150, 2**31 - 1], np.int32),
            "Lengths": np.array([2**31 - 1, 190, -7], np.int32),
        }
    }
    capped = small.replace(softcap=True)
    q, k, v = make_inputs(capped)
    for problem, knobs, more in (
        (window.replace(seq_q=300, seq_k=64), {"loop_split": True, "check_bounds": True}, {}),
        (both, {}, wild),
        (small.replace(sinks=True), {"pack_gqa": True}, {}),
        (both.replace(causal=False), {"loop_split": True}, {}),
        (window.replace(window_right=70), {"loop_split": True}, {}),
        (capped, {}, {"inputs": (4 * q, 4 * k, v), "cap": 2.0}),
        (both, {"persistent": "strided"}, {}),
        (small.replace(sinks=True), {}, {"more": {"Sinks": np.array([9, -9], np.float16)}}),
        (both.replace(causal=False), split, {}),
        (several.replace(starts=True, causal=False, seq_k=128), {}, {}),
        (window.replace(window=150), backward, {}),
        (window.replace(seq_k=256, seq_q=256, window=90), in_turns | {"check_bounds": False}, {}),
        (window.replace(seq_k=256, seq_q=256, window=100), in_turns | {"loop_split": True}, {}),
        (window.replace(window=150), flat | {"loop_split": True}, {}),
        (small.replace(sinks=True), {}, {}),
        (window, {}, {}),
        (several.replace(lengths=True, causal=False, seq_k=128), {"loop_split": True}, {}),
        (window.replace(window=100), {"loop_split": True}, {}),
        (window.replace(window_right=70), flat, {}),
        (capped, {"loop_split": True}, {}),
        (window.replace(window=100), {"loop_split": True, "tile_n": 64}, {}),
        (window.replace(seq_k=90), {"qk_ahead": True}, {}),
        (window.replace(seq_q=300, seq_k=64), flat, {}),
        (window.replace(seq_k=256, seq_q=256), in_turns | {"loop_split": True}, {}),
        (window.replace(window=150), split, {}),
        (several.replace(starts=True), split, {}),
        (both, {"loop_split": True}, {}),
        (both, {"persistent": "strided"}, wild),
    ):
        schedule = schedule_for(problem, forced=True, **{"tile_m": 64, "tile_n": 32} | knobs)
        check(problem, schedule, kernel=kernel, sm_count=1, **more)


@pytest.mark.parametrize("name", MUTATIONS_ASKED)
def test_mutations_of_what_is_asked_beside_are_noticed(name):
    kernel = mutated(*MUTATIONS_ASKED[name])
    with pytest.raises((AssertionError, InterpreterError)):
        battery_asked(kernel)


def battery_placed(kernel):
    """Cases that must notice every mutation of packed sequences and pages."""
    packed = Attention.problem(seq_q=200, seq_k=150, head_dim=16, causal=True, heads=2, kv_heads=1, packed=5, lse=True)
    paged = Attention.problem(
        seq_q=5,
        seq_k=192,
        head_dim=16,
        causal=True,
        alignment="bottom_right",
        batch=3,
        heads=2,
        kv_heads=1,
        lengths=True,
        page=64,
        lse=True,
    )
    rows, keys = np.array([0, 64, 65, 65, 70, 200], np.int32), np.array([0, 10, 75, 80, 80, 150], np.int32)
    own = {"CuQ": rows, "CuK": keys}
    lengths = {"Lengths": np.array([100, 0, 3], np.int32)}
    table = np.array([[4, 7, -1], [-1, 2**31 - 1, -1], [0, -1, -1]], np.int32)
    one = {"tile_m": 64, "tile_n": 32}
    few = {"seq_q": 5, "causal": True, "alignment": "bottom_right"}
    for problem, knobs, more in (
        (
            packed.replace(**few, seq_k=64, packed=3),
            {"tile_m": 16},
            {"CuQ": np.array([0, 3, 3, 5], np.int32), "CuK": np.array([0, 0, 32, 64], np.int32)},
        ),
        (
            paged.replace(seq_q=70, batch=1, packed=3),
            {},
            lengths | {"Table": table, "CuQ": np.array([0, 30, 31, 70], np.int32)},
        ),
        (
            packed.replace(seq_q=130, packed=2),
            {},
            {"CuQ": np.array([0, 65, 130], np.int32), "CuK": np.array([0, 70, 150], np.int32)},
        ),
        (paged, {"kv_subtiles": 2, "unroll": 2, "q_in_registers": True}, lengths | {"Table": table}),
        (packed, {}, own),
        (packed.replace(alignment="bottom_right"), {"loop_split": True, "persistent": "strided"}, own),
        (packed.replace(causal=False), {"kv_splits": 2, "tma_loads": False}, own),
        (paged, {}, lengths | {"Table": table}),
        (paged.replace(causal=False), {"loop_split": True}, lengths | {"Table": table}),
    ):
        check(problem, schedule_for(problem, forced=True, **one | knobs), kernel=kernel, more=more, sm_count=1)
    thin = paged.replace(page=16, kv_heads=2, seq_k=176)  # the last tile is one page longer than the table
    lengths = {"Lengths": np.array([176, 0, 3], np.int32)}
    table = np.full((3, 11), 2**31 - 1, np.int32)
    table[0], table[2, 0] = [4, 30, 9, 32, 2, 17, 3, 0, 8, 12, 25], 21
    for lookup in ("gather", "scalar"):
        schedule = schedule_for(thin, forced=True, **one, page_lookup=lookup)
        check(thin, schedule, kernel=kernel, more=lengths | {"Table": table}, sm_count=1)
        late = thin.replace(
            seq_q=64, seq_k=192, window=20, batch=1
        )  # keys from 83 on: the tile's first page lies before them
        before = {
            "Lengths": np.array([166], np.int32),
            "Table": np.array([[-1] * 5 + [5, 6, 7, 8, 9, 10, -1]], np.int32),
        }
        schedule = schedule_for(late, forced=True, **one, page_lookup=lookup, check_bounds=False)
        check(late, schedule, kernel=kernel, more=before, sm_count=1)


@pytest.mark.parametrize("name", MUTATIONS_PLACED)
def test_mutations_of_where_things_lie_are_noticed(name):
    kernel = mutated(*MUTATIONS_PLACED[name])
    with pytest.raises((AssertionError, InterpreterError, IndexError)):
        battery_placed(kernel)


@pytest.mark.parametrize("run", [battery, battery_elsewhere, battery_flat, battery_asked, battery_placed])
def test_the_batteries_pass_the_kernel(run):
    run(Attention)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_noticed(name):
    kernel = mutated(*MUTATIONS[name])
    with pytest.raises((AssertionError, InterpreterError)):
        battery(kernel)


@pytest.mark.parametrize("name", MUTATIONS_ELSEWHERE)
def test_mutations_elsewhere_are_noticed(name):
    kernel = mutated(*MUTATIONS_ELSEWHERE[name])
    with pytest.raises((AssertionError, InterpreterError)):
        battery_elsewhere(kernel)
