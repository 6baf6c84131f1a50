"""Constraints as text: what is taken, and that what is refused is refused in a moment, with what to do."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from golden import lacking
from hypothesis import given, strategies

from tiledsched.core.config import load_settings
from tiledsched.core.errors import ConfigError, SpaceError
from tiledsched.core.expressions import names_read, words_of
from tiledsched.core.space import Constraint
from tiledsched.core.space_files import load_space
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.softmax import Softmax

KNOWN = {"tile_m", "tile_n", "dtype"}
REFUSED = {
    "tile_m // 0": "divides by 0",
    "tile_m % 0 == 1": "divides by 0",
    '"a" * 10': "computes with text",
    '"a"*100000000000 == dtype': "computes with text",
    "dtype * 100000000000 == dtype": "computes with text",
    "(1, 2) * 100000000000 == tile_m": "computes with text",
    '("a" if tile_m else "b") * 100000000000 == dtype': "computes with text",
    '(tile_m and "b") * 100000000000 == dtype': "computes with text",
    '"%1000000000d" % tile_m == dtype': "computes with text",
    "-dtype == tile_m": "computes with text",
    "-" * 900 + "1": "parts within parts",
    "-" * 3000 + "1": "has 3001 characters; 1000 are allowed",
    "(" * 400 + "1" + ")" * 400: "is not an expression",
    "not " * 200 + "tile_m": "parts within parts",
    "tile_m < 10**11": "uses Pow",
    "1 << 100000000000 > tile_m": "uses LShift",
    "tile_m < 1e308": "only integers",
    "tile_m < 9999999999999999999999": "beyond 64 bits",
    "tile_m < " + "9" * 900: "beyond 64 bits",
    "tile_m < 1j": "only integers",
    "tile_m < None": "only integers",
    "tile_m < b'x'": "only integers",
    "tile_m is 3": "uses Is",
    "[x for x in (1, 2)]": "uses ListComp",
    "open('x')": "uses Call",
    "tile_m.real": "uses Attribute",
    "(tile_m := 3)": "uses NamedExpr",
    "lambda: 1": "uses Lambda",
    "f'{tile_m}'": "uses JoinedStr",
    "tile_q < 3": "unknown name 'tile_q'",
    "tile_m <": "is not an expression",
    "tile_m\x00": "is not an expression",
    "": "is not an expression",
    "tile_m < 3\n)": "is not an expression",
}


NO_TEXT = [(value, "it is no text") for value in (3, None, ["tile_m"], {"a": 1})]


@pytest.mark.parametrize(("text", "words"), [*REFUSED.items(), *NO_TEXT], ids=lambda text: str(text)[:40])
def test_what_would_take_long_or_much_or_is_no_text_is_refused(text, words) -> None:
    started = time.process_time()
    with pytest.raises(SpaceError, match=words.replace("(", r"\(")):
        names_read(text, KNOWN, {"dtype"})
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "text",
    [
        "tile_m * tile_n <= 4096 and (tile_m != 64 or tile_n % 32 == 0)",
        "dtype in ('float16', 'bfloat16')",
        "not tile_m > -3",
        "(tile_m if dtype == 'float16' else tile_n) // 2 < 64",
        "True",
    ],
)
def test_what_constraints_need_is_taken(text) -> None:
    assert names_read(text, KNOWN, {"dtype"}) <= KNOWN


@given(
    strategies.recursive(
        strategies.sampled_from(
            ["tile_m", "tile_n", "dtype", "0", "1", "9223372036854775807", "'float16'", "()", "True"]
        ),
        lambda inner: strategies.one_of(
            strategies.tuples(
                inner, strategies.sampled_from(["+", "-", "*", "//", "%", "<", "==", "in", "and", "or"]), inner
            ).map(" ".join),
            strategies.tuples(inner, inner).map(lambda pair: f"({pair[0]}, {pair[1]})"),
            inner.map("({})".format),
            inner.map("-{}".format),
            strategies.tuples(inner, inner, inner).map("({0[0]} if {0[1]} else {0[2]})".format),
        ),
        max_leaves=25,
    )
)
def test_whatever_is_taken_is_evaluated_or_explained_in_a_moment(text) -> None:
    try:
        names = names_read(text, KNOWN, {"dtype"})
    except SpaceError:
        return
    constraint = Constraint(require=text, because="", exploring=False, names=names)
    started = time.process_time()
    with suppress(SpaceError):  # it divides by 0 here, or compares text with a number
        constraint.holds({"tile_m": (1 << 63) - 1, "tile_n": 0, "dtype": "float16"})
    assert time.process_time() - started < 1


def test_the_declaration_says_what_is_text() -> None:
    for kernel, name, is_text in ((Attention, "dtype", True), (Attention, "head_dim", False), (Softmax, "loads", True)):
        assert (name in words_of(kernel)) is is_text, name


def space(require: str) -> str:
    """The text of a space with one more constraint."""
    return (
        'extends = "attention/sm_90.toml"\nkernel = "attention"\narch = "sm_90"\n'
        f"[[constraints]]\nrequire = {require!r}\nbecause = 'x'\n"
    )


def test_what_divides_by_what_is_0_for_some_problems_is_said_there(tmp_path, cli) -> None:
    (tmp_path / "mine.toml").write_text(space("tile_m % (tile_m - 64) == 0"))
    words = ["explain", "--arch", "sm_90", "--space", str(tmp_path / "mine.toml"), "--problem", "S=999,D=96"]
    why = "the constraint 'tile_m % (tile_m - 64) == 0' cannot be evaluated: integer", "put a condition before it"
    assert lacking(cli(words, code=2).err, *why) == []


UNREADABLE = [b"\xff\xfe", b"[" * 100000, b"x" * (5 << 20), b"a = " + b"[" * 50000]


@pytest.mark.parametrize("made", [*UNREADABLE, Path.mkdir, os.mkfifo])
def test_settings_that_cannot_be_read_are_said(tmp_path, made) -> None:
    path = tmp_path / "tiledsched.toml"
    path.write_bytes(made) if isinstance(made, bytes) else made(path)
    with pytest.raises(ConfigError, match=r"tiledsched\.toml"):
        load_settings(environ={}, project=path, user=tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *((content, "mine.toml") for content in UNREADABLE),
        *((f"extends = {json.dumps(name)}".encode(), "'extends' names") for name in ("x" * 5000, "a\x00b", "..", "")),
        (space("tile_m // 0 > 1").encode(), r"constraints\[\d+\]\.require = 'tile_m // 0 > 1' divides by 0"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_a_space_that_cannot_be_read_is_said(tmp_path, content, why) -> None:
    (tmp_path / "mine.toml").write_bytes(content)
    with pytest.raises(SpaceError, match=why):
        load_space(tmp_path / "mine.toml")
