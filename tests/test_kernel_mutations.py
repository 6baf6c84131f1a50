"""That the kernel's tests can fail: faults put into the tile code one at a time, each of which a small battery notices."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from functools import lru_cache
from unittest import mock

import numpy as np
import pytest
from kernel_checks import check, make_inputs, schedule_for
from tile_checks import substituted

from tiledsched.interpreter import InterpreterError
from tiledsched.kernels.attention import Attention

MUTATIONS = {
    "the last turn left out": ("ct.cdiv(steps, const.UNROLL) * const", "steps // const.UNROLL * const", "loops 22"),
    "a masked step in an unmasked turn": ("first_masked // const.UNROLL * const.UNROLL", "first_masked", "loops 22"),
    "the same step all turn": ("keys, i + u, chains", "keys, i, chains", "loops 22"),
    "queries doubled on the way": ("scale_log2 > 0.0, 1.0, 2.0", "scale_log2 > 0.0, 2.0, 1.0", "loops 22"),
    "causal mask one short": ("columns <= rows", "columns < rows", "loops 2"),
    "causal mask one long": ("columns <= rows", "columns <= rows + 1", "loops 2"),
    "column mask one long": ("columns < keys.K.shape[2]", "columns <= keys.K.shape[2]", "loops 20"),
    "no column mask": ("not const.EVEN", "False", "loops 20"),
    "no mask on scores": ("scores = ct.where(visible, scores, -math.inf)", "scores = scores", "loops 2"),
    "accumulator not rescaled": ("acc = scaled(chain.acc, alpha)", "acc = chain.acc", "loops 25"),
    "row sum not rescaled": ("add_rows(chain.row_sum * alpha, p)", "add_rows(chain.row_sum, p)", "loops 25"),
    "row maximum not kept": (
        "return Chain(acc, new_max, row_sum), p",
        "return Chain(acc, chain.row_max, row_sum), p",
        "loops 25",
    ),
    "row maximum starts at zero": (
        "if may_see_nothing(const) else -math.inf",
        "if may_see_nothing(const) else 0.0",
        "loops 8",
    ),
    "scores not scaled": ("ct.exp2(s * scale_log2 - new_max", "ct.exp2(s - new_max", "loops 2"),
    "output not normalized": ("ct.truediv(acc, row_sum, flush", "ct.truediv(acc, 1.0, flush", "loops 2"),
    "wrong key/value head": ("kv_head = head // const.GROUP if", "kv_head = head % K.shape[1] if", "loops 18"),
    "first loop starts late": ("range(begin, boundary, const", "range(begin + 1, boundary, const", "loops 19"),
    "second loop starts late": ("range(boundary, end, const", "range(boundary + 1, end, const", "loops 20"),
    "loop ends early": ("range(begin, end, const", "range(begin, end - 1, const", "loops 25"),
    "causal tiles unmasked": (
        "min(place * block_rows, seq_k) //",
        "min((place + 1) * block_rows, seq_k) //",
        "loops 19",
    ),
    "ragged tile unmasked": ("first_masked = seq_k // step_n", "first_masked = ct.cdiv(seq_k, step_n)", "loops 9"),
    "causal end too early": ("min((place + 1) * block_rows, seq_k)", "min(place * block_rows + 1, seq_k)", "loops 6"),
    "first value tile only": (
        "load(keys.V, (entry, keys.kv_head, j, column)",
        "load(keys.V, (entry, keys.kv_head, 0, column)",
        "loops 25",
    ),
    "first key tile only": ("(entry, keys.kv_head, column, j)", "(entry, keys.kv_head, column, 0)", "loops 25"),
    "query of another head": (
        "load_queries(Q, (entry, head, tile)",
        "load_queries(Q, (entry, kv_head, tile)",
        "loops 2",
    ),
    "output of another head": (
        "ct.store(pack_of(Out, work_tile.head, const), (work_tile.batch, place_of(work_tile.head, const),",
        "ct.store(pack_of(Out, work_tile.head, const), (work_tile.batch, place_of(work_tile.head, const) // const.GROUP,",
        "loops 2",
    ),
    "batch and head exchanged": (
        "batch_head % heads, batch_head // heads",
        "batch_head // heads, batch_head % heads",
        "loops 2",
    ),
    "persistent blocks skip work": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):", "loops 19"),
    "reversed order off by one": ("work_tiles - 1 - place", "work_tiles - place", "loops 19"),
    "heads-fastest order wrong": ("place = work // pairs", "place = work // heads", "loops 13"),
    "rows counted from zero": ("last = tile * const.TILE_M +", "last = 0 * const.TILE_M +", "loops 2"),
    "columns counted from zero": ("columns = j * const.TILE_N +", "columns = 0 * const.TILE_N +", "loops 25"),
    "padding undetermined": ("ct.PaddingMode.ZERO if const.CHECK_BOUNDS else ", "", "loops 2"),
    "always a float16 accumulator": ("ct.float16 if const.FP16_ACCUM else ct.float32", "ct.float16", "loops 21"),
    "probabilities rounded to integers": (
        "p[t].astype(values[t][part].dtype)",
        "p[t].astype(ct.int32).astype(values[t][part].dtype)",
        "loops 2",
    ),
    "output not cast": ("out.astype(Out.dtype)", "out", "loops 2"),
    "snake's last lap missing": ("snake(ct.bid(0), blocks, total // blocks)", "blocks", "loops 22"),
    "snake's last lap too long": ("total - snake(ct.bid(0), blocks, total // blocks)", "total", "loops 13"),
    "the last output never stored": (
        "epilogues(Out, Lse, work_tile, chains, features, const)\n\n\ndef compute",
        "pass\n\n\ndef compute",
        "loops 1",
    ),
    "an output of nothing": ("lap > 0 if", "lap >= 0 if", "loops 1"),
    "one output in two": ("lap > 0 if", "lap > 1 if", "loops 1"),
    "an output of nothing, unpeeled": ("else work >= blocks", "else work >= 0", "loops 14"),
    "one output in two, unpeeled": ("else work >= blocks", "else work >= 2 * blocks", "loops 14"),
    "every block's late work tiles are the first's": ("work = lap * blocks + place", "work = lap * blocks", "loops 1"),
    "snake turns short": ("(blocks - 1 - 2 * block)", "(blocks - 2 - 2 * block)", "loops 22"),
    "swizzled groups overlap": (
        "(SWIZZLE_PAIRS * work_tiles) * SWIZZLE_PAIRS",
        "(SWIZZLE_PAIRS * work_tiles)",
        "loops 5",
    ),
    "last swizzled group too wide": ("width = min(SWIZZLE_PAIRS, pairs - first)", "width = SWIZZLE_PAIRS", "loops 5"),
    "swizzled tile counted over heads": (
        "% (SWIZZLE_PAIRS * work_tiles) // width",
        "% (SWIZZLE_PAIRS * work_tiles) // pairs",
        "loops 5",
    ),
    "backward loop off by one": ("i = keys.steps - 1 - i\n", "i = keys.steps - i\n", "loops 23"),
    "backward loop is masked forward": (
        "keys.steps - first_masked if backward else first_masked",
        "first_masked",
        "loops 24",
    ),
    "backward loop masks the wrong loop": ("backward = const.KV_DIRECTION == BACKWARD", "backward = False", "loops 24"),
    "sawtooth stands still": ("(keys.steps - 1 - 2 * i)", "(keys.steps - 1 - i)", "loops 4"),
    "sawtooth turns everywhere by two": ("else place % 2", "else place % 2 * 2", "loops 4"),
    "wide sawtooth turns everywhere by two": ("TOOTH % 2 if", "TOOTH % 2 * 2 if", "loops 17"),
    "unseen steps make NaN": ("LOWEST if may_see_nothing(const) else -math.inf", "-math.inf", "loops 23"),
    "lowest maximum too high": ("LOWEST = -3.4e38", "LOWEST = -10.0", "loops 10"),
    "second query tile is the first": ("place * const.Q_SUBTILES + s", "place * const.Q_SUBTILES", "loops 6"),
    "second query tile beyond the end": (
        "tile = min(tile, ct.cdiv(seq_q, const.TILE_M // const.PACK) - 1)",
        "tile = tile",
        "loops 6",
    ),
    "second key tile is the first": ("i * const.KV_SUBTILES + t", "i * const.KV_SUBTILES", "loops 16"),
    "second key tile beyond the end": (
        "if const.EVEN or (const.KV_SUBTILES == 1 and",
        "if True or (const.KV_SUBTILES == 1 and",
        "loops 11",
    ),
    "maximum of the first key tile only": (
        "step_max = ct.maximum(step_max, ",
        "step_max = ct.minimum(step_max, ",
        "loops 11",
    ),
    "scores ahead of themselves": (
        "products(queries, keys, i + 1, const)",
        "products(queries, keys, i, const)",
        "loops 7",
    ),
    "last step ahead not folded": ("fold(rows, keys, end, chains,", "fold(rows, keys, end - 1, chains,", "loops 2"),
    "last step ahead unmasked": (
        "True, scale_log2, const)\n    return",
        "False, scale_log2, const)\n    return",
        "loops 2",
    ),
    "boundary beyond the last step": ("boundary = min(boundary, end)", "boundary = boundary", "loops 2"),
    "keys not transposed": ("(0, 1, 3, 2)", "(0, 1, 2, 3)", "loops 2"),
    "bounds never checked": ("check_bounds=const.CHECK_BOUNDS", "check_bounds=False", "loops 2"),
    "exact division by something else": (
        "out = ct.truediv(acc, row_sum)",
        "out = ct.truediv(acc, row_sum + 1)",
        "loops 15",
    ),
    "lazy rescaling never": ("> RESCALE_ABOVE", "> math.inf", "loops 12"),
    "lazy rescaling forgets the sum": (
        "            row_sum = row_sum * alpha\n",
        "            row_sum = row_sum\n",
        "loops 3",
    ),
    "lazy rescaling forgets the output": ("acc = scaled(acc, alpha)", "acc = acc", "loops 3"),
    "lazy rescaling takes the new maximum": ("new_max = chain.row_max", "new_max = new_max", "loops 12"),
    "bottom-right mask off by one": ("return last + offset if", "return last + offset + 1 if", "elsewhere 13"),
    "bottom-right mask at the top left": (
        "return last + offset if const.BOTTOM_RIGHT or const.WINDOW_RIGHT or const.STARTS else last",
        "return last",
        "elsewhere 13",
    ),
    "bottom-right offset the wrong way": (
        "K.shape[2] - seq_q if const.BOTTOM_RIGHT",
        "seq_q - K.shape[2] if const.BOTTOM_RIGHT",
        "elsewhere 13",
    ),
    "bottom-right end too early": (
        "min(max((place + 1) * block_rows + offset, 0)",
        "min(max(place * block_rows + 1 + offset, 0)",
        "elsewhere 13",
    ),
    "bottom-right tiles unmasked": (
        "min(max(place * block_rows + offset, 0)",
        "min(max((place + 1) * block_rows + offset, 0)",
        "elsewhere 13",
    ),
    "no step where nothing is seen": ("steps = max(steps, 1)", "steps = max(steps, 0)", "elsewhere 5"),
    "nothing divided by nothing": ("ct.where(row_sum > 0.0, row_sum, 1.0)", "row_sum", "elsewhere 2"),
    "log-sum-exp in powers of two": ("ct.log2(chain.row_sum)) * LN_2", "ct.log2(chain.row_sum))", "elsewhere 13"),
    "log-sum-exp without its maximum": ("(chain.row_max + ct.log2(", "(0.0 * chain.row_max + ct.log2(", "elsewhere 13"),
    "log-sum-exp of another head": (
        "ct.store(pack_of(Lse, work_tile.head, const), (work_tile.batch, place_of(work_tile.head, const),",
        "ct.store(pack_of(Lse, work_tile.head, const), (work_tile.batch, place_of(work_tile.head, const) // const.GROUP,",
        "elsewhere 13",
    ),
    "second part of the columns is the first": ("else (REST, TILE // REST)", "else (REST, 0)", "elsewhere 3"),
    "second part of the columns not held": (
        "part * one.astype(part.dtype) for part in ct.static_iter(parts)",
        "parts[0] * one.astype(part.dtype) for part in ct.static_iter(parts)",
        "elsewhere 8",
    ),
    "second part of the columns left out": (
        "product = ct.mma(q[part], k[part], product)",
        "product = ct.mma(q[0], k[0], product)",
        "elsewhere 3",
    ),
    "second part takes the first's values": ("total = chain.acc[part]", "total = chain.acc[0]", "elsewhere 3"),
    "packed rows counted as one head's": ("[:, None] % rows", "[:, None]", "elsewhere 12"),
    "packed tiles too tall": ("last = tile * rows +", "last = tile * const.TILE_M +", "elsewhere 10"),
    "packed heads spread over all": (
        "if const.PACK == 1 else head",
        "if const.PACK == 1 else head // const.GROUP",
        "elsewhere 12",
    ),
    "packed work tiles of one head": (
        "Q.shape[1] if const.PACK == 1 else Q.shape[1] // const.GROUP",
        "Q.shape[1]",
        "elsewhere 12",
    ),
    "packs as wide as a tile": ("Q.shape[1] // const.GROUP", "Q.shape[1] // const.PACK", "elsewhere 11"),
    "packs a tile apart": ("start=head * const.GROUP", "start=min(head, 1) * const.PACK", "elsewhere 11"),
    "every pack the first": (
        "start=head * const.GROUP, stop=(head + 1) * const.GROUP",
        "start=0, stop=const.GROUP",
        "elsewhere 11",
    ),
    "packs with the next one's heads": (
        "stop=(head + 1) * const.GROUP",
        "stop=min(array.shape[1], head * const.GROUP + const.PACK)",
        "elsewhere 11",
    ),
    "shares overlap": ("begin, end = steps * split //", "begin, end = steps * split // 2 //", "elsewhere 7"),
    "shares leave gaps": (
        "steps * (split + 1) // const.KV_SPLITS",
        "steps // const.KV_SPLITS * (split + 1)",
        "elsewhere 1",
    ),
    "boundary before the share": ("boundary = max(boundary, begin)", "boundary = boundary", "elsewhere 7"),
    "boundary behind the share": ("if const.QK_AHEAD or const.KV_SPLITS > 1", "if const.QK_AHEAD", "elsewhere 7"),
    "first to arrive combines": ("arrived == const.KV_SPLITS - 1", "arrived == 0", "elsewhere 7"),
    "nobody combines": ("arrived == const.KV_SPLITS - 1", "arrived == const.KV_SPLITS", "elsewhere 7"),
    "counter not reset": ("ct.scatter(Counters, (work, 0), 0)", "pass", "elsewhere 7"),
    "counter of the block": (
        "ct.atomic_add(Counters, (work, 0), 1)",
        "ct.atomic_add(Counters, (work // 2, 0), 1)",
        "elsewhere 7",
    ),
    "every share in one slot": ("* const.KV_SPLITS + split", "* const.KV_SPLITS", "elsewhere 7"),
    "shares not rescaled": (
        "share.reshape((const.TILE_M, width)) * share_weight",
        "share.reshape((const.TILE_M, width))",
        "elsewhere 7",
    ),
    "sums not rescaled": ("ct.sum(sums * weight(maxima, row_max), axis=0)", "ct.sum(sums, axis=0)", "elsewhere 7"),
    "sum of the first share": (
        "sums = ct.load(State, (place, 1, 0), shares",
        "sums = ct.load(State, (place, 0, 0), shares",
        "elsewhere 7",
    ),
    "shares of one group": ("range(const.KV_SPLITS // together(const))", "range(1)", "elsewhere 9"),
    "every group the first": ("group * together(const) + each", "each", "elsewhere 9"),
    "one share of each group": ("ct.static_iter(range(together(const)))", "ct.static_iter(range(1))", "elsewhere 7"),
    "shares by the order of blocks": (
        "slot_of((batch * packs + head) * work_tiles + place, s,",
        "slot_of(work, s,",
        "elsewhere 6",
    ),
    "rows of the first head": (
        "pack, member = head // const.TILE_HEADS, head % const.TILE_HEADS",
        "pack, member = head // const.TILE_HEADS, 0",
        "elsewhere 4",
    ),
    "shares of the first pack": ("+ pack) * work_tiles + tile", ") * work_tiles + tile", "elsewhere 4"),
    "shares of the first tile": ("* work_tiles + tile // const.Q_SUBTILES\n", "* work_tiles\n", "elsewhere 4"),
    "shares of one subtile": (
        "place = work * const.Q_SUBTILES + tile % const.Q_SUBTILES",
        "place = work * const.Q_SUBTILES",
        "elsewhere 6",
    ),
    "states of the first row": (
        "(member * const.TILE_ROWS + row) // const.TILE_M",
        "member * const.TILE_ROWS // const.TILE_M",
        "elsewhere 6",
    ),
    "rows of the first block": (
        "(place, member, row // const.TILE_M, column)",
        "(place, member, 0, column)",
        "elsewhere 6",
    ),
    "maxima not told apart": ("weights = weight(maxima, row_max)", "weights = weight(row_max, row_max)", "elsewhere 4"),
    "sums of the maxima": (
        "sums = ct.load(State, (place, 1, part), shares",
        "sums = ct.load(State, (place, 0, part), shares",
        "elsewhere 4",
    ),
    "found shares not rescaled": (
        "found * weights.reshape((const.KV_SPLITS, const.TILE_M, 1))",
        "found",
        "elsewhere 4",
    ),
    "states of the first query tile": (
        "place, shares = work * const.Q_SUBTILES + s,",
        "place, shares = 0,",
        "elsewhere 7",
    ),
    "share of another maximum": (
        "ct.store(State, (slot, 0, 0), chain.row_max",
        "ct.store(State, (slot, 0, 0), chain.row_sum",
        "elsewhere 7",
    ),
    "shares in float16": (
        "chain.acc[part].astype(ct.float32).reshape",
        "chain.acc[part].astype(ct.float16).reshape",
        "elsewhere 14",
    ),
    "counting from the first lap only": ("range(laps_of(Q, blocks, const))", "range(1)", "flat_loops 1"),
    "a work tile takes one turn more": ("return ct.cdiv(narrowed(", "return 1 + ct.cdiv(narrowed(", "flat_loops 1"),
    "old output in the next work tile": ("            chain = forgetful(chain, const)\n", "", "flat_loops 1"),
    "old queries in the next work tile": ("elif not const.RELOAD_Q:", "elif False:", "flat_loops 1"),
    "queries never loaded again": ("if const.RELOAD_Q:", "if False:", "flat_loops 4"),
    "the first queries ahead for ever": (
        "ahead = queries_of(Q, lap + 1, blocks, const)",
        "ahead = ahead",
        "flat_loops 2",
    ),
    "queries one work tile late": ("queries_of(Q, lap + 1, blocks", "queries_of(Q, lap, blocks", "flat_loops 2"),
    "the second work tile's queries in the first": (
        "queries = queries_of(Q, 0, blocks",
        "queries = queries_of(Q, 1, blocks",
        "flat_loops 1",
    ),
    "steps go on counting": ("            i = 0\n", "", "flat_loops 1"),
    "one step of two": ("keys, i + u, first_masked", "keys, i, first_masked", "flat_loops 5"),
    "steps counted singly": ("i = i + const.FLAT_STEPS", "i = i + 1", "flat_loops 5"),
    "always the same lap": ("lap = lap + 1", "lap = lap", "flat_loops 1"),
    "snake goes straight": ("place = snake(ct.bid(0), blocks, lap) if", "place = ct.bid(0) if", "flat_loops 3"),
    "beyond the last work tile": (
        "min(lap * blocks + place, work_tiles * heads * batches - 1)",
        "lap * blocks + place",
        "flat_loops 1",
    ),
    "masked a step late": ("masked = i >= first_masked", "masked = i > first_masked", "flat_loops 1"),
    "never masked": ("masked = i >= first_masked", "masked = i < 0", "flat_loops 1"),
    "forgets by the wrong maximum": (
        "(const.TILE_M, 1), LOWEST, dtype",
        "(const.TILE_M, 1), 0.0, dtype",
        "flat_loops 3",
    ),
    "remembers what saw nothing": ("return fresh_chain(const)\n    return", "pass\n    return", "flat_loops 1"),
    "second step beyond the end": (
        "if const.EVEN or (const.KV_SUBTILES == 1 and",
        "if True or (const.KV_SUBTILES == 1 and",
        "flat_loops 5",
    ),
    "window one key short": ("columns > rows - span.window", "columns > rows - span.window + 1", "features 13"),
    "window one key long": ("columns > rows - span.window", "columns >= rows - span.window", "features 13"),
    "no window": ("visible = visible & (columns > rows", "visible = visible | (columns > rows", "features 13"),
    "no causal mask in a window": ("visible = visible & (columns <= rows)", "visible = visible", "features 13"),
    "first step of the window late": ("offset + 1 - window, 0)", "offset + 33 - window, 0)", "features 13"),
    "early keys of the last row unmasked": (
        "(place + 1) * block_rows + offset - window",
        "place * block_rows + offset - window",
        "features 12",
    ),
    "early keys unmasked": ("left = ct.cdiv(last_first_key, step_n) - first", "left = 0", "features 12"),
    "no keys after a row's own": ("    if const.WINDOW_RIGHT:\n", "    if False:\n", "features 4"),
    "no row knows of keys after its own": (
        "if const.BOTTOM_RIGHT or const.WINDOW_RIGHT or const.STARTS else",
        "if const.BOTTOM_RIGHT or const.STARTS else",
        "features 4",
    ),
    "steps end at a row's own key": (
        "(const.BOTTOM_RIGHT or const.WINDOW_RIGHT or const.STARTS)",
        "(const.BOTTOM_RIGHT or const.STARTS)",
        "features 4",
    ),
    "both sides of a window as one": (
        "features.window + features.window_right if const",
        "features.window if const",
        "features 4",
    ),
    "steps counted from all keys": ("steps = max(steps - first, 1)", "steps = max(steps, 1)", "features 13"),
    "late keys unmasked": ("first_masked = max(first_masked - first, 0)", "first_masked = first_masked", "features 12"),
    "the first step forgotten": ("i = i + keys.span.first", "i = i", "features 13"),
    "half a turn skipped": (" // step_n // turn * turn", " // step_n", "features 6"),
    "the window beyond the keys": ("min(first_key, most) //", "first_key //", "features 13"),
    "early turns unmasked": (
        "ct.cdiv(keys.span.left, const.UNROLL) *",
        "keys.span.left // const.UNROLL *",
        "features 7",
    ),
    "backward ends exchanged": (
        "keys.steps - last, keys.steps - left",
        "keys.steps - left, keys.steps - last",
        "features 5",
    ),
    "a share's first boundary": ("min(max(boundary, begin), end), ", "min(boundary, end), ", "features 15"),
    "a share's second boundary": (", min(max(second, begin), end)", ", max(second, begin)", "features 1"),
    "starts one late": ("start, stop=end), V", "start + 1, stop=end), V", "features 3"),
    "values behind the length count": (
        "V.slice(axis=2, start=start, stop=end)",
        "V.slice(axis=2, start=start, stop=V.shape[2])",
        "features 3",
    ),
    "the diagonal stays where it was": (", offset - start", ", offset", "features 16"),
    "starts of the first sequence": ("features.Starts, (batch,)", "features.Starts, (0,)", "features 3"),
    "starts below zero": (
        "Starts, (batch,), check_bounds=False), 0)",
        "Starts, (batch,), check_bounds=False), -9999999)",
        "features 16",
    ),
    "lengths one long": ("columns < span.end", "columns <= span.end", "features 13"),
    "lengths of the first sequence": ("features.Lengths, (batch,)", "features.Lengths, (0,)", "features 10"),
    "lengths beyond the keys": ("check_bounds=False), 0), seq_k)", "check_bounds=False), 0), 9999999)", "features 16"),
    "nothing divided by nothing, of features": (
        "if rows_see_nothing(const):  # rows",
        "if const.BOTTOM_RIGHT:  # rows",
        "features 1",
    ),
    "remembers what saw nothing, of features": (
        "if rows_see_nothing(const):  # a row",
        "if const.BOTTOM_RIGHT:  # a row",
        "features 14",
    ),
    "flat early steps unmasked": ("masked | (i < keys.span.left)", "masked", "features 8"),
    "scores not capped": ("    if const.SOFTCAP:\n", "    if False:\n", "features 11"),
    "half the cap": ("1.0 - ct.truediv(2.0, power + 1.0", "1.0 - ct.truediv(1.0, power + 1.0", "features 11"),
    "no sinks": ("    if const.SINKS:\n", "    if False:\n", "features 2"),
    "sinks in powers of two": (".astype(ct.float32) / LN_2", ".astype(ct.float32)", "features 2"),
    "sinks of another head": ("heads = first + ct.arange", "heads = 0 * first + ct.arange", "features 9"),
    "sinks of one packed head": (
        "[:, None] // (const.TILE_M // const.PACK)",
        "[:, None] // const.TILE_M",
        "features 2",
    ),
    "sinks under another maximum": ("ct.exp2(sink - row_max", "ct.exp2(sink - chain.row_max", "features 2"),
    "output not rescaled by the sink": ("part.astype(ct.float32) * alpha", "part.astype(ct.float32)", "features 2"),
    "sum not rescaled by the sink": (
        "chain.row_sum * alpha + ct.exp2(sink",
        "chain.row_sum + ct.exp2(sink",
        "features 2",
    ),
    "bisection one sequence early": ("block_rows, features) <= place:", "block_rows, features) < place:", "varlen 1"),
    "every place the first sequence's": ("while beyond - sequence > 1", "while beyond - sequence > 1000", "varlen 1"),
    "bisection ends early": ("while beyond - sequence > 1", "while beyond - sequence > 2", "varlen 1"),
    "places without one for each sequence": (
        "return sequence + ct.gather(features.CuQ",
        "return ct.gather(features.CuQ",
        "varlen 1",
    ),
    "places counted in rows": ("check_bounds=False) // block_rows\n", "check_bounds=False)\n", "varlen 1"),
    "places counted from the head's first": (
        "max(place - first_place(sequence, block_rows, features), 0)",
        "place",
        "varlen 1",
    ),
    "a head's last place missing": (
        "rows_of_work(const) + features.CuQ.shape[0] - 1",
        "rows_of_work(const) + features.CuQ.shape[0] - 2",
        "varlen 1",
    ),
    "a head of no sequences": (" + features.CuQ.shape[0] - 1", "", "varlen 1"),
    "a place too many is filled": (
        "place * rows_of_work(const) < Q.shape[2]",
        "place * rows_of_work(const) <= Q.shape[2]",
        "varlen 1",
    ),
    "second work tiles are left out": ("place * rows_of_work(const) < Q.shape[2]", "place < 1", "varlen 1"),
    "rows of the next sequence, too": (
        "min(max(ct.gather(offsets, (sequence + 1,), check_bounds=False), begin), rows)",
        "rows",
        "varlen 1",
    ),
    "rows from the first on": ("start=begin, stop=end", "start=0, stop=end", "varlen 1"),
    "keys where queries begin": (
        "own_rows(K, features.CuK, sequence), own_rows(V, features.CuK",
        "own_rows(K, features.CuQ, sequence), own_rows(V, features.CuQ",
        "varlen 1",
    ),
    "outputs of another sequence": (
        "return own_rows(Out, features.CuQ, sequence), Lse",
        "return own_rows(Out, features.CuQ, 0), Lse",
        "varlen 1",
    ),
    "log-sum-exps where they were": ("        Lse = own_rows(Lse, features.CuQ, sequence)", "        pass", "varlen 1"),
    "even keys unmasked": ("const.CHECK_BOUNDS else ", "False else ", "varlen 3"),
    "a step where there are no keys": (
        "steps = min(steps, ct.cdiv(end,",
        "steps = min(steps, 1 + ct.cdiv(end,",
        "varlen 1",
    ),
    "nothing divided by nothing, of varlen": ("or const.LENGTHS or const.PACKED", "or const.LENGTHS", "varlen 1"),
    "another sequence's sizes": ("entry = 0 if const.PACKED else batch", "entry = batch", "varlen 1"),
    "keys of the first entry": ("batch if const.PAGE else entry", "entry", "varlen 2"),
    "diagonal at the table's end": (
        "return min(max(length, 0), features.Table.shape[1] * const.PAGE) - seq_q",
        "return features.Table.shape[1] * const.PAGE - seq_q",
        "varlen 7",
    ),
    "diagonal at the top": (" * const.PAGE) - seq_q", " * const.PAGE)", "varlen 7"),
    "tables of the first sequence": ("(keys.batch, place)", "(0, place)", "varlen 5"),
    "keys behind the length unmasked": (
        "steps_of(place, offset, end, const)",
        "steps_of(place, offset, seq_k, const)",
        "varlen 5",
    ),
    "pages behind the last key count": ("used = columns < keys.span.end", "used = columns >= 0", "varlen 5"),
    "a freed page counts": ("used & (columns >= keys.span.first_key)", "used", "varlen 7"),
    "always the first page": ("page_at(keys, j // tiles)", "page_at(keys, 0)", "varlen 5"),
    "pages beyond the last key": (
        "(keys.batch, ct.minimum(first + each, last))",
        "(keys.batch, first + each)",
        "varlen 6",
    ),
    "pages beyond the last key, one by one": (
        "page_at(keys, min(first + n, last))",
        "page_at(keys, first + n)",
        "varlen 8",
    ),
    "a tile's first page alone": (
        "(keys.batch, ct.minimum(first + each, last))",
        "(keys.batch, ct.minimum(first, last))",
        "varlen 7",
    ),
    "a tile's pages, one late": (
        "page_at(keys, min(first + n, last))",
        "page_at(keys, min(first + n + 1, last))",
        "varlen 9",
    ),
    "a tile's pages in the same place": ("ct.where(each == n,", "ct.where(each <= n,", "varlen 9"),
    "every tile's first pages": ("first, last = j * pages,", "first, last = 0 * pages,", "varlen 7"),
    "tiles of pages as of one": ("first, last = j * pages,", "first, last = j,", "varlen 7"),
    "pages of another head": ("ct.Slice(head, 1)", "ct.Slice(0, 1)", "varlen 7"),
    "a page's first keys again": ("j // tiles), j % tiles", "j // tiles), 0", "varlen 5"),
    "pages as long as a tile": ("const.PAGE // const.TILE_N", "1", "varlen 5"),
    "keys of pages not transposed": ("k = ct.permute(k, (1, 0))", "k = k.reshape((width, const.TILE_N))", "varlen 7"),
    "the last tile of a page for all": (
        "return min(j, max(ct.cdiv(keys.span.end, const.TILE_N) - 1, 0))",
        "return min(j, 0)",
        "varlen 4",
    ),
    "keys of a page alone": (
        "features.Table.shape[1] * const.PAGE if const.PAGE else K.shape[2]",
        "K.shape[2]",
        "varlen 5",
    ),
}
"""Fault -> what stands in the tile code, what is put in its place, and the case that notices it soonest."""


MODULES = [
    f"tiledsched.kernels.attention.{name}"
    for name in ("scheduler", "packed", "eight_bits", "features", "tiles", "split", "flat", "entries")
]
"""In the order in which they name each other."""


@lru_cache
def source_of(name):
    return inspect.getsource(importlib.import_module(name))


@lru_cache(maxsize=64)
def compiled(source, name):
    """Most modules are the same for every mutation."""
    return compile(source, name, "exec")


def mutated(old, new):
    """Attention over copies of the kernel's modules with `old` replaced by `new` wherever it stands."""
    sources = {name: source_of(name) for name in MODULES}
    copies = {name: types.ModuleType(name) for name in sources}
    with mock.patch.dict(sys.modules, copies):  # so that they import each other
        for name, source in substituted(sources, old, new).items():
            exec(compiled(source, f"mutated_{name}"), copies[name].__dict__)

    class Mutated(Attention):
        name = "attention with a fault"
        suites, default_suite = {}, ""  # else each of their problems is made once more, for every mutation

        def launches(p, s, device):
            entries = copies[MODULES[-1]]
            return [(getattr(entries, entry.__name__), grid) for entry, grid in Attention.launches(p, s, device)]

    return Mutated


def loops():
    """Cases of what every problem and most schedules use."""
    causal = Attention.problem(seq_q=200, seq_k=170, head_dim=40, causal=True, batch=2, heads=4, kv_heads=2)
    lean = causal.replace(batch=1, heads=2, kv_heads=1)
    ragged = lean.replace(causal=False)
    even = Attention.problem(seq_q=256, seq_k=128, head_dim=64, causal=True, heads=2)
    many = Attention.problem(seq_q=130, seq_k=70, head_dim=16, causal=True, batch=3, heads=3, kv_heads=3)
    wide = lean.replace(head_dim=64)
    q, k, v = make_inputs(wide)
    negative: dict = {"inputs": (np.full_like(q, -30), np.full_like(k, 30), v)}
    in_turns: dict = {"unroll": 2, "q_in_registers": True, "persistent": "snake"}
    return [
        (lean, {"persistent": "strided", "store_late": True, "q_subtiles": 2}, {}),
        (lean.replace(seq_k=64), {"qk_ahead": True, "loop_split": True}, {}),
        (wide, {"lazy_rescale": True}, {"inputs": (q * 8, k * 8, v)}),
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
        (many, {"persistent": "snake", "store_late": True, "peel_first": False}, {}),
        (ragged, {"division": "ieee"}, {}),
        (ragged, {"kv_subtiles": 2}, {}),
        (ragged.replace(seq_q=300), {"kv_direction": "wide_sawtooth"}, {}),
        (causal, {}, {}),
        (lean, {"loop_split": True, "block_order": "reversed", "persistent": "strided"}, {}),
        (lean.replace(seq_k=40), {"loop_split": True}, {}),
        (ragged.replace(seq_k=192, dtype="bfloat16"), {}, {}),
        (lean, in_turns | {"loop_split": True}, {}),
        (lean, {"kv_direction": "backward", "tile_m": 128, "tile_n": 32}, {}),
        (lean, {"kv_direction": "backward", "loop_split": True}, {}),
        (even, {"check_bounds": False}, {}),
    ]


def elsewhere():
    """Cases of what only some problems and schedules use."""
    causal = Attention.problem(seq_q=200, seq_k=170, head_dim=40, causal=True, batch=2, heads=4, kv_heads=2)
    lean = causal.replace(batch=1, heads=2, kv_heads=1)
    right = lean.replace(alignment="bottom_right", lse=True)
    tall, few = right.replace(seq_k=90), right.replace(seq_q=5, seq_k=330, batch=2, heads=4, kv_heads=2)
    split: dict = {"kv_splits": 4, "tma_loads": False}
    later: dict = {"kv_splits": 4, "kv_combine": "launch"}
    narrow = few.replace(causal=False)
    q, k, v = make_inputs(narrow)
    large = (v.astype(np.float32) * 2e4).clip(-60000, 60000).astype(v.dtype)
    found = [
        (few.replace(seq_q=100, heads=2, batch=1), split | {"kv_splits": 2, "loop_split": True}, {}),
        (right.replace(head_dim=96, value_dim=80), {"column_parts": 2}, {"order": "reversed"}),
        (right.replace(head_dim=96, value_dim=80), {"column_parts": 2}, {}),
        (few.replace(heads=6), later | {"tile_m": 16, "pack_gqa": True}, {}),
        (tall, {"qk_ahead": True, "loop_split": True}, {}),
        (
            lean.replace(seq_k=300, lse=True),
            later | {"kv_splits": 8, "tile_n": 32, "q_subtiles": 2, "block_order": "heads_fastest"},
            {},
        ),
        (lean, split | {"kv_splits": 2, "loop_split": True, "tile_m": 128, "tile_n": 32}, {}),
        (
            right.replace(head_dim=96, value_dim=80),
            {"column_parts": 2, "q_in_registers": True, "persistent": "snake"},
            {},
        ),
        (few.replace(value_dim=100), split, {}),
        (few.replace(seq_q=16), {"tile_m": 16, "pack_gqa": True}, {}),
        (few.replace(heads=6), {"tile_m": 16, "pack_gqa": True}, {"order": "reversed"}),
        (few, {"tile_m": 16, "pack_gqa": True}, {}),
        (right.replace(seq_q=90), {"loop_split": True}, {}),
    ]
    return [*found, (narrow, split, {"inputs": (q, k, large)})]


def flat_loops():
    """Cases of a flat loop."""
    causal = Attention.problem(seq_q=200, seq_k=170, head_dim=40, causal=True, batch=2, heads=2, kv_heads=1)
    flat: dict = {"persistent": "strided", "flat_steps": 1}
    q, k, v = make_inputs(causal)
    found = [
        (causal.replace(seq_k=90, alignment="bottom_right"), {"loop_split": True}),
        (causal, {"loop_split": True, "q_ahead": True, "persistent": "snake"}),
        (causal.replace(heads=5, kv_heads=5, batch=1, seq_q=130), {"persistent": "snake", "occupancy": 2}),
        (causal, {"loop_split": True, "reload_q": True}),
        (causal.replace(causal=False), {"flat_steps": 2}),
    ]
    low = {"inputs": (np.full_like(q, -30), np.full_like(k, 30), v)}
    return [*((problem, flat | knobs, {}) for problem, knobs in found), (causal, flat, low)]


def features():
    """Cases of the optional features."""
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
    found = [
        (window.replace(seq_q=300, seq_k=64), {"loop_split": True, "check_bounds": True}, {}),
        (small.replace(sinks=True), {"pack_gqa": True}, {}),
        (both.replace(causal=False), {"loop_split": True}, {}),
        (window.replace(window_right=70), {"loop_split": True}, {}),
        (window.replace(window=150), backward, {}),
        (window.replace(seq_k=256, seq_q=256, window=90), in_turns | {"check_bounds": False}, {}),
        (window.replace(seq_k=256, seq_q=256, window=100), in_turns | {"loop_split": True}, {}),
        (window.replace(window=150), flat | {"loop_split": True}, {}),
        (small.replace(sinks=True), {}, {}),
        (several.replace(lengths=True, causal=False, seq_k=128), {"loop_split": True}, {}),
        (capped, {"loop_split": True}, {}),
        (window.replace(window=100), {"loop_split": True, "tile_n": 64}, {}),
        (window.replace(seq_k=90), {"qk_ahead": True}, {}),
        (window.replace(seq_q=300, seq_k=64), flat, {}),
        (window.replace(window=150), split, {}),
        (both, {"persistent": "strided"}, wild),
    ]
    return [(problem, {"tile_n": 32} | knobs, {"sm_count": 1} | more) for problem, knobs, more in found]


def varlen():
    """Cases of packed sequences and pages."""
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
    lengths = {"Lengths": np.array([100, 0, 3], np.int32)}
    table = np.array([[4, 7, -1], [-1, 2**31 - 1, -1], [0, -1, -1]], np.int32)
    few = {"seq_q": 5, "causal": True, "alignment": "bottom_right"}
    found = [
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
        (paged.replace(causal=False), {"loop_split": True}, lengths | {"Table": table}),
    ]
    thin = paged.replace(page=16, kv_heads=2, seq_k=176)  # the last tile is one page longer than the table
    lengths = {"Lengths": np.array([176, 0, 3], np.int32)}
    table = np.full((3, 11), 2**31 - 1, np.int32)
    table[0], table[2, 0] = [4, 30, 9, 32, 2, 17, 3, 0, 8, 12, 25], 21
    late = thin.replace(
        seq_q=64, seq_k=192, window=20, batch=1
    )  # keys from 83 on: the tile's first page lies before them
    before = np.array([[-1] * 5 + [5, 6, 7, 8, 9, 10, -1]], np.int32)
    for lookup in ({"page_lookup": "gather"}, {"page_lookup": "scalar"}):
        found.append((thin, lookup, lengths | {"Table": table}))
        found.append((late, lookup | {"check_bounds": False}, {"Lengths": np.array([166], np.int32), "Table": before}))
    return [(problem, {"tile_n": 32} | knobs, {"sm_count": 1, "more": more}) for problem, knobs, more in found]


FAMILIES = (loops, elsewhere, flat_loops, features, varlen)


@lru_cache
def cases():
    """Name -> a problem, knobs, and what more a run takes."""
    return {f"{family.__name__} {number}": case for family in FAMILIES for number, case in enumerate(family(), 1)}


def run(name, kernel):
    problem, knobs, more = cases()[name]
    check(problem, schedule_for(problem, forced=True, **{"tile_m": 64, "tile_n": 64} | knobs), kernel=kernel, **more)


@pytest.mark.parametrize("name", sorted({case for _, _, case in MUTATIONS.values()}))
def test_the_cases_pass_the_kernel(name):
    run(name, Attention)


@pytest.mark.slow
@pytest.mark.parametrize("fault", MUTATIONS)
def test_mutations_are_noticed(fault):
    """Each mutation by the case that it names, which was found to notice it soonest."""
    old, new, case = MUTATIONS[fault]
    with pytest.raises((AssertionError, InterpreterError, IndexError)):
        run(case, mutated(old, new))
