"""Attention's own flags of the command line: sequence lengths, head dimensions and masks, in every combination."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from tiledsched.core.flags import integers, positive, words
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention.problem import ALIGNMENTS, DTYPES, standard


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add them to a command's parser."""
    parser.add_argument(
        "--seq-len",
        dest="seq_k",
        type=integers,
        default=[1024, 4096],
        metavar="S[,S]",
        help="sequence lengths (default: 1024,4096)",
    )
    parser.add_argument(
        "--head-dim",
        type=integers,
        default=[64, 128],
        metavar="D[,D]",
        help="head dimensions, up to 256 (default: 64,128)",
    )
    parser.add_argument(
        "--dtype",
        type=words(DTYPES),
        default=["float16"],
        metavar="T[,T]",
        help=f"{', '.join(DTYPES)} (default: float16)",
    )
    parser.add_argument(
        "--causal",
        choices=("yes", "no", "both"),
        nargs="?",
        const="yes",
        default="both",
        help="causal mask; without a word: yes (default: both)",
    )
    parser.add_argument("--batch", type=positive, metavar="N", help="sequences (default: 16k tokens in all)")
    parser.add_argument("--heads", type=positive, metavar="N", help="query heads (default: 2048 / head dimension)")
    parser.add_argument("--kv-heads", type=positive, metavar="N", help="key/value heads (default: as many as heads)")
    parser.add_argument("--seq-q", type=positive, metavar="N", help="query rows (default: as many as keys)")
    parser.add_argument(
        "--alignment",
        choices=ALIGNMENTS,
        default="top_left",
        help="where the causal diagonal starts, or ends: matters where --seq-q does (default: top_left)",
    )
    parser.add_argument(
        "--value-dim",
        type=positive,
        default=0,
        metavar="D",
        help="columns of v and the output (default: as the head dimension)",
    )
    parser.add_argument(
        "--window",
        type=positive,
        default=0,
        metavar="N",
        help="keys that a row sees at most, up to its own: a sliding window, of causal problems only (default: all)",
    )
    parser.add_argument(
        "--window-right",
        type=positive,
        default=0,
        metavar="N",
        help="keys that it sees after its own, of causal problems only (default: none)",
    )
    parser.add_argument("--softcap", action="store_true", help="cap the scores, as Gemma 2 does")
    parser.add_argument("--sinks", action="store_true", help="a logit for each head in the denominators, as in GPT-OSS")
    parser.add_argument("--starts", action="store_true", help="the sequences of a batch start at keys of their own")
    parser.add_argument("--lengths", action="store_true", help="the sequences of a batch end at keys of their own")
    parser.add_argument(
        "--packed",
        type=positive,
        default=0,
        metavar="N",
        help="sequences that lie end to end and are as long "
        "as --seq-len together (default: each in an entry of its own)",
    )
    parser.add_argument(
        "--page",
        type=positive,
        default=0,
        metavar="N",
        help="keys lie in pages of N, a multiple of 16 (default: end to end)",
    )
    parser.add_argument("--lse", action="store_true", help="return the log-sum-exp of each row, too")


def from_flags(make: Any, options: argparse.Namespace) -> list[Problem]:
    """The problems that the flags name: `make` makes each."""
    if (options.window or options.window_right) and options.causal == "both":
        options.causal = "yes"
    masks = {"yes": (True,), "no": (False,), "both": (False, True)}[options.causal]
    found = (
        standard(
            make,
            seq_len=seq_len,
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
            batch=options.batch,
            heads=options.heads,
            kv_heads=options.kv_heads,
        )
        for dtype in options.dtype
        for head_dim in options.head_dim
        for causal in masks
        for seq_len in options.seq_k
    )
    return [
        each.replace(
            seq_q=options.seq_q or each.seq_q,
            alignment=options.alignment,
            value_dim=options.value_dim,
            lse=options.lse,
            window=options.window,
            window_right=options.window_right,
            softcap=options.softcap,
            sinks=options.sinks,
            starts=options.starts,
            lengths=options.lengths or options.page > 0,
            packed=options.packed,
            page=options.page,
            batch=1 if options.packed else each.batch,
        )
        for each in found
    ]


def add_likely_flags(parser: argparse.ArgumentParser) -> None:
    """Add those that say which problems to expect beside the tuned ones."""
    parser.add_argument(
        "--dtype",
        type=words(DTYPES),
        default=[],
        metavar="T[,T]",
        help=f"also {' or '.join(DTYPES)} (default: what was tuned)",
    )
    parser.add_argument(
        "--group",
        type=integers,
        default=[],
        metavar="G[,G]",
        help="also so many query heads per key/value head (default: what was tuned)",
    )
    parser.add_argument(
        "--any-length", action="store_true", help="also key lengths that no tile divides, which take other machine code"
    )
    parser.add_argument(
        "--decode",
        action="store_true",
        help="also one query row that sees every key, as generation with a cache asks for",
    )


def likely(p: Problem, options: argparse.Namespace) -> list[Problem]:
    """Problems like `p` that the flags name; head counts that a group does not divide are left out."""
    found = []
    for dtype, group, odd in itertools.product(
        options.dtype or (p.dtype,), options.group or (p.group,), (0, 1) if options.any_length else (0,)
    ):
        if p.heads % group:
            continue
        like = p.replace(
            dtype=dtype, kv_heads=p.heads // group, seq_q=p.seq_q + odd, seq_k=p.seq_k + odd * max(1, p.page)
        )
        found.append(like)
        if options.decode and not p.packed:
            seen = {"causal": True, "alignment": "bottom_right"} if p.window else {"causal": False}
            found.append(like.replace(seq_q=1, **seen))
    return list(dict.fromkeys(found))
