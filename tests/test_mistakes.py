"""Mistakes that newcomers make, in a declaration, in tile code and on the command line: each is answered by the name that is wrong,
by what was meant, and, where it stands in a file, by the line."""

from __future__ import annotations

import bz2
import gzip
import importlib.metadata
import re
from pathlib import Path

import cuda.tile as ct
import pytest
from test_declaration import own_names  # noqa: F401  # what a test declares is known to that test alone

import tiledsched as ts
from tiledsched.build.compiler import compile_schedule
from tiledsched.checking.interpreted import check_schedule
from tiledsched.core import errors, registry
from tiledsched.core.problem import missing_on
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention

FILE = """import cuda.tile as ct
import tiledsched as ts


@ct.kernel
def softmax(X, Out, columns: ct.Constant[int], TILE: ct.Constant[int]):
    row = ct.bid(0)
    x = ct.load(X, (row, 0), (1, TILE), padding_mode=ct.PaddingMode.NEG_INF).astype(ct.float32)
    e = ct.exp(x - ct.max(x, axis=1, keepdims=True))
    ct.store(Out, (row, 0), (e / ct.sum(e, axis=1, keepdims=True)).astype(Out.dtype))


class Softmax(ts.Kernel):
    function = softmax
    rows, columns = ts.dim(), ts.dim(constant=True)
    dtype = ts.dtype("float16", "bfloat16")
    X = ts.array("rows columns")
    Out = ts.out("rows columns")
    knobs = {"TILE": [64, 128], "occupancy": [1, 2], "num_worker_warps": [4, 8]}
    constraints = {"TILE >= columns": "a row is one tile"}
    suites = {"rows": [dict(rows=16384, columns=60), dict(rows=8192, columns=100)]}

    def grid(p, s, device):
        return (p.rows,)

    def reference(xp, X):
        e = xp.exp(X - X.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)
"""
TAKES = "TILE: ct.Constant[int])"
RETURNS = "return e / e.sum(axis=1, keepdims=True)"
OUT = "    Out = ts.out"


def more(*lines: str) -> tuple[str, str]:
    """An edit that adds a function to the class."""
    return RETURNS, RETURNS + "\n\n    " + "\n        ".join(lines)


def written(folder: Path, *edits: tuple[str, str], name: str = "softmax.py") -> str:
    """The kernel in a file with the edits made, as it is named."""
    text = FILE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / name).write_text(text)
    return f"{folder / name}:Softmax"


DECLARATIONS = [
    # names of attributes
    (
        [("knobs =", "knob =")],
        "Softmax.knob: a kernel has no such attribute; did you mean knobs? (softmax.py, line 19)",
    ),
    ([("constraints =", "constraint =")], "did you mean constraints? (softmax.py, line 20)"),
    ([("suites =", "suite =")], "Softmax.suite: the name is taken; did you mean suites? (softmax.py, line 21)"),
    ([("function =", "fuction =")], "Softmax.fuction: a kernel has no such attribute; did you mean function?"),
    ([("def reference", "def refrence")], "did you mean reference? (softmax.py, line 26)"),
    ([more("def tolerence(p, s):", "return 1")], "Softmax.tolerence: a kernel has no such attribute"),
    ([more("def flop(p):", "return p.rows")], "did you mean flops? (softmax.py, line 30)"),
    ([(OUT, "    default_suite = 'row'\n" + OUT)], "there is no suite 'row'; known are rows (did you mean 'rows'?)"),
    # types of attributes
    (
        [("[dict(rows=16384, columns=60), dict(rows=8192, columns=100)]", "dict(rows=1)")],
        "suites['rows']: must be a list",
    ),
    (
        [("dict(rows=8192, columns=100)", "(8192, 100)")],
        "a problem is a dict of sizes, as in dict(rows=64), got (8192, 100)",
    ),
    ([('{"TILE >= columns": "a row is one tile"}', '["TILE >= columns"]')], "Softmax.constraints: must be a dict"),
    (
        [('"occupancy": [1, 2]', '"occupancy": 2')],
        "knobs['occupancy']: must be a list of choices, as in [64, 128], got 2",
    ),
    ([('"TILE": [64, 128]', '"TILE": [64, 64]')], "knobs.TILE.choices has 64 twice"),
    ([(OUT, "    flops = 100\n" + OUT)], "Softmax.flops: must be a function, as in def flops(p): ..., got 100"),
    ([(OUT, "    axes = 'rows'\n" + OUT)], "Softmax.axes: must be a tuple of dims"),
    ([(OUT, "    derived = {'half': 4}\n" + OUT)], "Softmax.derived['half']: must be a function of the problem"),
    ([(OUT, "    name = 3\n" + OUT)], "Softmax.name: must be text, got 3"),
    (
        [(OUT, "    name = 'softmax'\n" + OUT)],
        "'softmax' is a kernel that ships; give yours another name, or leave the name out",
    ),
    (
        [("rows, columns = ts.dim(), ", "rows, columns = ts.dim, ")],
        "Softmax.rows: ts.dim is not called; write rows = ts.dim()",
    ),
    ([("ts.dim(),", "ts.dim('rows'),")], "ts.dim: default must be an integer, got 'rows' (softmax.py, line 15)"),
    ([("ts.dim(),", "ts.dim(5, most=4),")], "ts.dim: the default 5 is not from 1 to 4"),
    ([("constant=True", "constnat=True")], "'constnat' (did you mean 'constant'?) (softmax.py, line 15)"),
    # sizes, types and problems
    (
        [("columns=100", "colums=100")],
        "unknown problem keys ['colums']; known are ['columns', 'dtype', 'rows'] (did you mean 'columns'?)",
    ),
    (
        [("columns=100", "columns=100, dtype='flaot16'")],
        "got 'flaot16' (did you mean 'float16'?) (softmax.py, line 21)",
    ),
    ([('X = ts.array("rows columns")', 'X = ts.array("rows colums")')], "Softmax.X: 'colums' is no size; known are"),
    (
        [('X = ts.array("rows columns")', 'X = ts.array("rows, columns")')],
        "Softmax.X: 'rows,' is no size; axes are parted by spaces",
    ),
    ([('X = ts.array("rows columns")', 'X = ts.array(("rows", "columns"))')], "Softmax.X: its shape must be text"),
    ([('"bfloat16"', '"bf16"')], "ts.dtype: 'bf16' is not the name of a type"),
    ([('X = ts.array("rows columns")', 'X = ts.array("rows columns", dtype="fp32")')], "(did you mean 'float32'?)"),
    # what nothing uses
    (
        [(OUT, '    W = ts.array("columns")\n' + OUT)],
        "Softmax.W: softmax takes no array of that name; take it, or leave it out (softmax.py, line 18)",
    ),
    ([(OUT, "    depth = ts.dim(1)\n" + OUT)], "Softmax.depth: nothing uses it, no array, function or constraint"),
    ([(OUT, "    eps = ts.scalar(1e-5)\n" + OUT)], "Softmax.eps: nothing uses it"),
    (
        [more("def constants(p, s):", "return {'TIEL': 4}")],
        "no parameter of softmax is called 'TIEL' (did you mean 'TILE'?)",
    ),
    ([('"occupancy"', '"ocupancy"')], "(did you mean 'occupancy'?), and read by neither grid nor constants"),
    (
        [("def softmax(X, Out", "def softmax(x, Out")],
        "(did you mean 'X'?); declare it, or return it from constants(p, s) (softmax.py, line 5)",
    ),
    # words where tile code takes numbers
    (
        [('"occupancy"', '"order": ["rows", "swizzled"], "occupancy"'), (TAKES, "TILE: ct.Constant[int], order)")],
        "Softmax.knobs['order']: parameter 'order' of softmax would get 'rows', and constants of tile code are numbers, true and "
        "false; constants(p, s) may return its number for it, as in {'order': ('rows', 'swizzled').index(s['order'])}",
    ),
    (
        [(OUT, "    mode = ts.choice('a', 'b')\n" + OUT), (TAKES, "TILE: ct.Constant[int], mode)")],
        "{'mode': ('a', 'b').index(p.mode)}",
    ),
    (
        [(TAKES, "TILE: ct.Constant[int], dtype)")],
        "arrays have it as their dtype, as in X.dtype: leave the parameter out",
    ),
    (
        [
            (TAKES, "TILE: ct.Constant[int], half: ct.Constant[int])"),
            more("def constants(p, s):", "return {'half': None}"),
        ],
        "would get None",
    ),
    (
        [
            (TAKES, "TILE: ct.Constant[int], half: ct.Constant[int])"),
            more("def constants(p, s):", "return {'half': p.rows / 2}"),
        ],
        "half is annotated as a constant integer and gets 8192.0; // divides without a rest",
    ),
    # functions
    (
        [("def grid(p, s, device)", "def grid(self, p, s, device)")],
        "functions of a declaration are written without self",
    ),
    (
        [("def grid(p, s, device)", "def grid(p, s)")],
        "Softmax.grid: takes (p, s), and must take (p, s, device) (softmax.py, line 23)",
    ),
    (
        [("(p.rows,)", "(p.row,)")],
        "has no field 'row'; it has rows, columns, dtype (did you mean 'rows'?) (softmax.py, line 24)",
    ),
    *[
        (
            [("(p.rows,)", f"(p.rows // s{knob},)")],
            f"the schedule has no knob {name!r}; its knobs are TILE, num_worker_warps, occupancy{meant}",
        )
        for knob, name, meant in (
            ("['TIEL']", "TIEL", " (did you mean 'TILE'?) (softmax.py, line 24)"),
            (".TIME", "TIME", " (did you mean 'TILE'?) (softmax.py, line 24)"),
            (".tile", "tile", " (did you mean 'TILE'?) (softmax.py, line 24)"),
            (".number('Tile')", "Tile", " (did you mean 'TILE'?) (softmax.py, line 24)"),
            (".rest", "rest", " (softmax.py, line 24)"),
        )
    ],
    ([more("def flops(p):", "return 'many'")], "Softmax.flops: must return a number, got 'many'"),
    ([more("def tolerance(p, s):", "return 0.01")], "must return a ts.Tolerance, as in"),
    (
        [more("def inputs(xp, rng, p):", "return {'x': rng.standard_normal((p.rows, p.columns))}")],
        "'x' is no input; the inputs are X (did you mean 'X'?)",
    ),
    (
        [more("def inputs(xp, rng, p):", "return {'X': rng.standard_normal(p.rows * p.columns)}")],
        "Softmax.inputs: X has shape (180,) for",
    ),
    ([more("def inputs(xp, rng, p):", "return [1]")], "Softmax.inputs: must return a dict of inputs by name, got list"),
    (
        [more("def inputs(xp, rng, p):", "return {'X': rng.normals(3)}")],
        "Softmax.inputs: for rows=3 columns=60 float16 it raises Attr",
    ),
    ([("def reference(xp, X)", "def reference(self, xp, X)")], "a reference is written without self"),
    ([(RETURNS, "e / e.sum()")], "Softmax.reference: returns nothing; return the array"),
    ([(RETURNS, "return e, e")], "Softmax.reference: returns 2 arrays; the outputs are Out"),
    ([(RETURNS, "return {'Out': e}")], "Softmax.reference: returns a dict; return the array"),
    ([(RETURNS, "return e + 1j")], "Softmax.reference: returns Out of complex numbers"),
    ([(RETURNS, "return e / total")], "NameError: name 'total' is not defined (softmax.py, line 28)"),
    ([("xp.exp(", "np.exp(")], "NameError: name 'np' is not defined (did you mean 'xp'?) (softmax.py, line 27)"),
    (
        [("    function = softmax", "    function = lambda X, Out, columns, TILE: None")],
        "expected a cuTile kernel or a function",
    ),
    (
        [("    function = softmax", "    def launches(p, s, device):\n        return softmax, (p.rows,)\n")],
        "must return a list of pairs",
    ),
    # constraints
    ([('"TILE >= columns"', '"TIEL >= columns"')], "reads unknown name 'TIEL'; known are"),
    ([('"TILE >= columns"', '"TILE = columns"')], "is not an expression: invalid syntax"),
    ([('"TILE >= columns"', '"TILE / 2 >= columns"')], "; // divides (softmax.py, line 20)"),
    ([('"TILE >= columns"', '"TILE >= p.columns"')], "; sizes and knobs stand alone: rows, not p.rows"),
    # files
    (
        [("import cuda.tile as ct\n", "")],
        "name 'ct' is not defined (the file lacks: import cuda.tile as ct) (softmax.py, line 4)",
    ),
    (
        [("import tiledsched as ts\n", "import tiledsched as ts\nimport numpyy\n")],
        "No module named 'numpyy' (softmax.py, line 3); install numpyy, or correct the import",
    ),
    (
        [("class Softmax(ts.Kernel):", "class Softmax(ts.Kernel)")],
        "SyntaxError: expected ':' (softmax.py, line 13); correct the file",
    ),
    (
        [("class Softmax", "import sys\nsys.exit(3)\n\n\nclass Softmax")],
        "ends the program as it is imported: SystemExit: 3 (softmax.py, line 14)",
    ),
    (
        [("TILE: ct.Constant[int]", "TILE: ct.Const[int]")],
        "has no attribute 'Const' (did you mean 'Constant'?) (softmax.py, line 6)",
    ),
    ([("class Softmax(ts.Kernel)", "class Softmax")], "it declares none: a kernel is a subclass of ts.Kernel"),
    ([(RETURNS, RETURNS + "\n\n\nSoftmax = Softmax()")], "(that is an object: leave out the line that makes it)"),
]


@pytest.mark.parametrize(("edits", "words"), DECLARATIONS, ids=[words[:50] for _, words in DECLARATIONS])
def test_a_mistake_in_a_file_is_answered_by_name_and_line(tmp_path, edits, words) -> None:
    with pytest.raises(errors.TiledschedError, match=re.escape(words)):
        registry.load_kernel(written(tmp_path, *edits))


@pytest.mark.parametrize(
    "edits",
    [
        [],
        [(OUT, "    BLOCKS = 4\n" + OUT), more("def half(p):", "return p.rows // 2")],  # the author's own
        [more("def grid_of_half(p):", "return p.rows // 2"), more("def grid2(p):", "return 1")],
        [(OUT, "    depth = ts.dim(1)\n" + OUT), more("def flops(p):", "return getattr(p, 'depth')")],
        [(OUT, "    causal = ts.flag()\n    mode = ts.choice('a', 'b')\n    W = ts.workspace('rows')\n" + OUT)],
        [("(p.rows,)", "[__import__('numpy').int64(p.rows)]")],
        [("(p.rows,)", "(p.rows * s.TILE // s['TILE'],)")],
        [
            ('"occupancy"', '"order": ["rows", "swizzled"], "occupancy"'),
            (TAKES, "TILE: ct.Constant[int], order: ct.Constant[int])"),
            more("def constants(p, s):", "return {'order': ('rows', 'swizzled').index(s['order'])}"),
        ],
    ],
    ids=[
        "as it is",
        "helpers",
        "like a function",
        "read by name",
        "flags and scratch",
        "numpy",
        "a knob as an attribute",
        "words mapped",
    ],
)
def test_what_is_right_is_taken(tmp_path, edits) -> None:
    kernel = registry.load_kernel(written(tmp_path, *edits))
    p, s = kernel.problem(rows=3, columns=60), {name: each.default for name, each in kernel.knob_fields().items()}
    assert check_schedule(kernel, p, Schedule(s))[0]


SCHEDULE = Schedule(TILE=64, occupancy=1, num_worker_warps=4)
BODIES = [
    (("ct.exp(", "ct.expp("), "no attribute 'expp'", "(softmax.py, line 9)"),
    (("row = ct.bid(0)", "row = ct.bid(0) + offset"), "offset", "(softmax.py, line 7)"),
    (("(1, TILE), padding", "(TILE,), padding"), "shape", "(softmax.py, line 8)"),
    (("(1, TILE), padding", "(1, TILE + 1), padding"), "power", "(softmax.py, line 8)"),
    (("Out.dtype", "Out.dype"), "'dype'", "(softmax.py, line 10)"),
    (("row = ct.bid(0)", "row = ct.bid(0) + 1 // (TILE - TILE)"), "by zero", "(softmax.py, line 7)"),
]


@pytest.mark.parametrize(("edit", "words", "line"), BODIES, ids=[words for _, words, _ in BODIES])
def test_a_mistake_in_tile_code_is_told_with_its_line(tmp_path, edit, words, line) -> None:
    kernel = registry.load_kernel(written(tmp_path, edit))
    passed, _, message = check_schedule(kernel, kernel.problem(rows=3, columns=60), SCHEDULE)
    assert not passed
    assert re.match(rf"softmax, block \(0, 0, 0\): .*{words}.*{re.escape(line)}$", message, re.DOTALL), message


@pytest.mark.compiler
@pytest.mark.parametrize(("edit", "words", "line"), BODIES[:4], ids=[words for _, words, _ in BODIES[:4]])
def test_what_the_compiler_says_is_told_with_its_line(tmp_path, edit, words, line) -> None:
    kernel = registry.load_kernel(written(tmp_path, edit))
    with pytest.raises(Exception) as error:  # noqa: PT011  # of cuTile's several
        compile_schedule(kernel, kernel.problem(rows=3, columns=60), SCHEDULE, "sm_90")
    assert re.search(rf"{words}.*{re.escape(line)}$", errors.describe(error.value), re.DOTALL)


LINES = [
    ("tune atention", "kernel 'atention' is not known here (did you mean 'attention'?); name the file or module"),
    ("check softmax.py", "softmax.py is a file; name its kernel, too: softmax.py:Softmax"),
    ("check softmax.Softmax", "a colon stands between a file and its class: softmax.py:Softmax"),
    ("check softmax.py:Sofmax", "declares no kernel 'Sofmax'; it declares Softmax (did you mean 'Softmax'?)"),
    ("check sofmax.py:Softmax", "sofmax.py (did you mean softmax.py?); name it as path/file.py:Class"),
    ("check none/softmax.py:Softmax", "there is no folder"),
    ("check tiledsched.kernels.matmull:Matmul", "(did you mean 'tiledsched.kernels.matmul'?)"),
    (
        "check softmax.py:Softmax -p rows=3,columns=4k",
        "columns must be a positive integer, got '4k' (did you mean 4096?)",
    ),
    ("check softmax.py:Softmax -p row=3,columns=40", "(did you mean 'rows'?)"),
    ("explain attention --arch sm_90 -p S=4096,D=128x", "got '128x' (did you mean 128?)"),
    ("tune attention --arch sm_90 -p S=1024", "a problem of attention needs D (head_dim)"),
    ("tune attention --arch sm_90 -p D=64", "a problem of attention needs S (seq_q and seq_k)"),
    ("explain rope --arch sm_90 -p S=5", "a problem of rope needs B (batch), q_heads, k_heads"),
    ("explain matmul --arch sm_90 -p m=5", "a problem of matmul needs n, k"),
    ("explain attention --arch sm_90 -p S4096", "(did you mean 'S=4096'?)"),
    ("explain attention --arch sm_90 -p S=64,casual", "(did you mean 'causal'?)"),
    ("explain attention --arch sm_90 -p S=64,dtype=bf16", "got 'bf16' (did you mean 'bfloat16'?)"),
    ("tune --suite lama --arch sm_90", "attention has no suite 'lama'; known are"),
    ("tune --arch h10", "unknown arch 'h10'; known are"),
    (
        "tune --effort quik",
        "'quik' is not one of 'served', 'race', 'quick', 'default', 'thorough' (did you mean 'quick'?)",
    ),
    ("tune --sampler surogate --arch sm_90", "(did you mean 'surrogate'?)"),
    ("show --provenance mesured", "(did you mean 'measured'?)"),
    ("show atention", "(did you mean 'attention'?)"),
    ("fleet run tun", "not tun (did you mean 'tune'?)"),
    ("explain matmul -p m=99999999999999999999,n=2,k=3", "m must be at most 1099511627776, got 99999999999999999999"),
    ("check matmul -p m=99999999999,n=64,k=64 --schedules 1", "memory does not suffice (Unable to allocate 23.3 TiB"),
    ("tune --beside x", "'x' is not a valid number"),
    ("tune --trials x", "'x' is not a valid integer"),
]


@pytest.mark.parametrize(("line", "words"), LINES, ids=[line for line, _ in LINES])
def test_a_misspelt_word_of_a_command_is_answered_by_the_one_that_was_meant(
    line, words, tmp_path, monkeypatch, cli
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "x.db"))
    written(tmp_path)
    assert words in cli(line.split(), code=0 if line == "show atention" else 2).err


IN_EIGHT_BITS = [
    "scaled_matmul -p m=64,n=64,k=64",
    "attention -p S=64,D=64,kv8=head",
    "rms_norm_quantized -p rows=64,columns=64",
    "matmul_epilogue -p m=64,n=64,k=64,out_dtype=float8_e4m3fn",
]


@pytest.mark.parametrize("problem", IN_EIGHT_BITS)
@pytest.mark.parametrize("command", ["explain", "tune", "check", "warmup -o x.bundle", "bake", "record --build-only"])
def test_what_an_arch_cannot_compute_is_said_by_one_sentence(command, problem, home, monkeypatch, cli) -> None:
    monkeypatch.chdir(home)
    said = cli([*command.split(), *problem.split(), "--arch", "sm_86"], code=1).err
    words = "no schedule works for .*: cuTile has no float8_e4m3fn on sm_86; choose another type, or another GPU$"
    assert re.search(words, said.strip())


def test_types_that_only_newer_archs_have(own_names) -> None:  # noqa: F811
    class Scaled(ts.Kernel):
        n = ts.dim()
        X, Out = ts.array("n", dtype="float8_e8m0fnu"), ts.out("n", dtype="float32")
        knobs = {"TILE": [64]}

        def function(X, Out, TILE: ct.Constant[int]):
            ct.store(Out, (ct.bid(0),), ct.load(X, (ct.bid(0),), (TILE,)).astype(ct.float32))

        def grid(p, s, device):
            return (-(-p.n // s["TILE"]),)

        def reference(xp, X):
            return X

    p = Scaled.problem(n=64)
    assert missing_on("sm_90", p) == "cuTile has no float8_e8m0fnu on sm_90; choose another type, or another GPU"
    assert missing_on("sm_100", p) == missing_on("sm_121", p) == ""
    with pytest.raises(errors.NoValidScheduleError, match="cuTile has no float8_e8m0fnu on sm_90"):
        space_for("sm_90", Scaled).default(p)
    assert space_for("sm_100", Scaled).default(p)["TILE"] == 64


def test_what_cannot_be_tuned_is_not_offered(cli, home) -> None:
    said = cli("show scaled_matmul --arch sm_86").err
    assert (
        "nothing of scaled_matmul is tuned for sm_86; cuTile has no float8_e4m3fn on sm_86; choose another type" in said
    )
    assert "run: tiledsched tune scaled_matmul" in cli("show scaled_matmul --arch sm_121").err


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("columns", ["rows", "columns"], "columns"),
        ("x", ["X", "Out"], "X"),
        ("fp16", ["float16", "bfloat16"], "float16"),
        ("fp16", ["bfloat16"], None),
        ("depth", ["rows", "columns"], None),
        (3, ["rows"], None),
    ],
)
def test_the_nearest_name(word, known, found) -> None:
    assert errors.nearest(word, known) == found


# ---- a kernel's identity is its own ----------------------------------------------------------------------------------


def test_files_import_their_neighbours_and_each_its_own(tmp_path) -> None:
    kernels, helpers = {}, "def less(x, y):\n    return x - y + {0} - {0}\n"
    for number in (1, 2):
        folder = tmp_path / f"folder{number}"
        folder.mkdir()
        (folder / "my_helpers.py").write_text(helpers.format(number))
        edits = (
            ("import tiledsched as ts", "import tiledsched as ts\nfrom my_helpers import less"),
            ("ct.exp(x -", "ct.exp(less(x,"),
        )
        closed = ("keepdims=True))\n    ct.store", "keepdims=True)))\n    ct.store")
        kernels[number] = registry.load_kernel(written(folder, *edits, closed))
    for number, kernel in kernels.items():
        assert check_schedule(kernel, kernel.problem(rows=3, columns=60), SCHEDULE)[0]
        assert f"folder{number}" in kernel.function._pyfunc.__globals__["less"].__code__.co_filename
        assert kernel.problem(rows=3, columns=60).kernel == "softmax:Softmax"
    before = [kernel.source_hash() for kernel in kernels.values()]
    (tmp_path / "folder2" / "my_helpers.py").write_text(helpers.format(3))
    after = [kernel.source_hash() for kernel in kernels.values()]
    assert before[0] == after[0] != before[1] != after[1]


def test_a_file_of_a_package_is_named_as_a_module(tmp_path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "__init__.py").touch()
    where = written(
        tmp_path / "made", ("import tiledsched as ts", "import tiledsched as ts\nfrom .helpers import less")
    )
    with pytest.raises(
        errors.ConfigError, match=rf"name it as a module of its package, from {tmp_path}: made.softmax:Class"
    ):
        registry.load_kernel(where)


def test_an_entry_point_shadows_nothing_in_silence(monkeypatch, caplog) -> None:
    def point(name, value):
        return importlib.metadata.EntryPoint(name=name, value=value, group=registry.ENTRY_POINTS)

    points = [point("softmax", "other.softmax:Softmax"), point("norm", "one:Norm"), point("norm", "two:Norm")]
    monkeypatch.setattr(registry, "installed_entry_points", lambda: tuple(points))
    assert registry.load_kernel("softmax").locator() == "tiledsched.kernels.softmax.declaration:Softmax"
    assert "registers another one under that name: name that one other.softmax:Softmax" in caplog.text
    with pytest.raises(
        errors.ConfigError, match=r"different kernels as 'norm'; name the one that you mean: one:Norm .*, two:Norm"
    ):
        registry.load_kernel("norm")


@ct.kernel
def scale(X):
    pass


def plain(x):
    pass


def entered(manager):
    with manager:
        pass


MISUSES = [
    (lambda: entered(ts.remember), "remember is called first; write: with tiledsched.remember():"),
    (lambda: entered(importlib.import_module("tiledsched.remember")), "remember is called first"),
    (lambda: entered(ts.capture), "capture is called first; write: with tiledsched.capture():"),
    (lambda: entered(ts.configure), "configure is called first; write: with tiledsched.configure():"),
    (lambda: ts.remember(plain), "remember takes no <function plain"),
    (lambda: ts.remember("train.py"), "python -m tiledsched.remember SCRIPT"),
    (lambda: ts.capture(plain), "capture takes a folder"),
    (lambda: ts.tune(plain, arch="sm_121"), "is no kernel; give the class that declares it, without parentheses"),
    (lambda: ts.tune(scale, arch="sm_121"), "is no kernel; give the class that declares it"),
    (lambda: ts.tune(Attention(), arch="sm_121"), "is no kernel; give the class that declares it, without parentheses"),
    (lambda: ts.tune(None, arch="sm_121"), "None is no kernel; give the class"),
    (lambda: ts.tune("softmax", 5, arch="sm_121"), "5 is no list of problems"),
    (lambda: ts.tune("softmax", [(1, 2)], arch="sm_121"), "(1, 2) is no problem; give its values by name"),
    (lambda: list(ts.check(plain)), "is no kernel"),
    (lambda: ts.op("mine::plain", plain), "is no kernel"),
    (lambda: ts.load_kernel(scale), "is no kernel"),
]


@pytest.mark.parametrize(("use", "words"), MISUSES)
def test_hasty_use_explains_itself(use, words) -> None:
    with pytest.raises(errors.TiledschedError, match=re.escape(words)):
        use()


COPIED = """
import cuda.tile as ct
import tiledsched as ts


@ct.kernel
def copy(X, Y, TILE: ct.Constant[int]):
    ct.store(Y, index=(ct.bid(0),), tile=ct.load(X, index=(ct.bid(0),), shape=(TILE,)))


class Copy(ts.Kernel):
    function, n, dtype = copy, ts.dim(), ts.dtype("float16")
    X, Y = ts.array("n"), ts.out("n")
    knobs = {"TILE": [128, 256]}

    def grid(p, s, device):
        return (-(-p.n // s.TILE),)

    def reference(xp, X):
        return X
"""


@pytest.mark.parametrize(
    "line",
    [
        "db import {}",
        "compare {} shipped",
        "tune --replay {}",
        "tune --arch sm_90 --space {}",
        "tune --arch sm_90 --candidates {}",
        "bench --summary {}",
        "show --db {}",
        "study ablation --arch sm_90 --replay {}",
    ],
)
@pytest.mark.parametrize(("form", "unpack"), [(gzip, "gunzip -k"), (bz2, "bunzip2 -k")])
def test_a_compressed_file_says_so_and_how_to_unpack_it(line, form, unpack, tmp_path, cli) -> None:
    path = tmp_path / "kt.json.packed"
    path.write_bytes(form.compress(b"{}"))
    assert f"{path} is compressed; unpack it first: {unpack} {path}" in cli(line.format(path).split(), code=2).err


@pytest.mark.parametrize(
    "line",
    [
        "db import {}",
        "compare {} shipped",
        "tune --replay {}",
        "tune --arch sm_90 --space {}",
        "tune --arch sm_90 --candidates {}",
        "bench --summary {}",
        "explain {}:Copy --arch sm_90 -p n=20",
        "bake {}:Copy --arch sm_90 -p n=20 -o b.patch",
    ],
)
def test_a_file_in_another_encoding_says_so(line, tmp_path, cli, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("copied.py" if "Copy" in line else "table.json")
    path.write_bytes(f"# \xe9\n{COPIED}".encode("latin-1"))
    said = cli(line.format(path).split(), code=2).err
    assert re.search(
        rf"{path} is not (text in UTF-8 \(line 1\); save it in that encoding|JSON: 'utf-8'.*; give JSON)", said
    )
