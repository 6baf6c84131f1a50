"""First calls: torch serves while a program is compiled by another process, and later calls and processes find it by its name."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import cuda.tile as ct
import op_kernels
from attention_gradients import errors, exact_gradients
from serve_on_cpu import TOLERANCE, Launches, capturing, expected, on_another_stream, runtime_on_cpu, tensors, using
from store_samples import entry
from torch.nn import functional

import tiledsched as ts
from tiledsched.build import compiler
from tiledsched.build.compiler import BuildTask, captured_values, compile_schedule, program_key
from tiledsched.build.cubin import read_artifact
from tiledsched.build.store import StoredProgram, read_program, write_program
from tiledsched.core import launches
from tiledsched.core.config import Settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import LaunchError
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.ops import plans, sdpa as serve
from tiledsched.ops.fallback import MOST_SCORES, computes_at_once
from tiledsched.ops.features import NO_FEATURES, AttentionFeatures
from tiledsched.rivals.offers import Offer, Rival
from tiledsched.serve import background, prebuilt, process
from tiledsched.serve.background import BackgroundBuilder, Build, BuildRequest
from tiledsched.serve.entries import layers
from tiledsched.store.captured_calls import read_seen
from tiledsched.store.db import TuningDB

CODE = StoredProgram(cubin=b"machine code", symbol="attention")
WORKER = (sys.executable, str(Path(__file__).parent / "fake_build_worker.py"))
PROBLEM = Attention.standard(seq_len=1024, head_dim=64)
SCHEDULE = space_for("sm_90", Attention).default(PROBLEM)


class Builds:
    """Stands in for the compiling processes: what is submitted is done when a test says so, or when a call waits for it."""

    def __init__(self) -> None:
        self.builds: dict[Path, Build] = {}
        self.requests: list[BuildRequest] = []
        self.awaited = 0

    def submit(self, request: BuildRequest) -> Build:
        if request.path not in self.builds:
            self.requests.append(request)
            self.builds[request.path] = build = Build(request)
            build.wait = lambda: self.await_one(build)
        return self.builds[request.path]

    def await_one(self, build: Build) -> None:
        if not build.is_done:
            self.awaited += 1
            build.end(CODE)

    def finish(self, outcome: StoredProgram | str = CODE) -> None:
        for each in self.builds.values():
            if not each.is_done:
                each.end(outcome)


class Serving:
    """A GPU whose programs have to be compiled."""

    def __init__(self) -> None:
        self.builds, self.launches, self.loaded = Builds(), Launches(), set()
        self.compiled_here: list[object] = []
        self.runtime = runtime_on_cpu(self.launch)
        self.runtime.builder = self.builds

    def launch(self, stream, grid, kernel, arguments) -> None:
        """As cuTile does: a kernel object is asked for its program with the first arguments of a kind."""
        signature = launches.signature(kernel.declaration, kernel.problem, kernel.schedule, kernel.step)
        if (kernel, str(signature)) not in self.loaded:
            kernel._compile(signature, None, (9, 0))
            self.loaded.add((kernel, str(signature)))
        self.launches(stream, grid, kernel, arguments)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Launches, programs compiled by calls, and programs that other processes were to compile."""
        return len(self.launches), len(self.compiled_here), len(self.builds.requests)


@pytest.fixture
def serving(monkeypatch, tmp_path, fresh):
    """Serve on it, in the background by default."""
    for name, value in (("DB", tmp_path / "none.db"), ("CACHE", tmp_path / "cache"), ("COMPILE", "background")):
        monkeypatch.setenv(f"TILEDSCHED_{name}", str(value))
    for module in (prebuilt, compiler):
        monkeypatch.setattr(module, "compiler_at_hand", lambda: "13.5.37")
    found = Serving()
    process.forget_plans()

    def compiles(self, *given):
        found.compiled_here.append(self)
        return b"compiled here", "attention", None, ()

    monkeypatch.setattr(ct.kernel, "_compile", compiles)
    with using(found.runtime):
        yield found


def call(*given, function=serve.sdpa) -> None:
    """Call attention on some tensors, by default the same ones each time; the result is checked."""
    q, k, v = given or tensors()
    torch.testing.assert_close(function(q, k, v), expected(q, k, v), **TOLERANCE[q.dtype])


def test_torch_serves_until_the_program_is_built(serving, caplog, tmp_path) -> None:
    """These calls are captured and counted as others are."""
    caplog.set_level("INFO")
    with ts.capture(tmp_path / "notes"):
        for _ in range(3):
            call(function=ts.sdpa)
        assert serving.counts == (0, 0, 1)
        assert caplog.text.count("compiling; torch serves until the program is built") == 1
        assert "  compiling   torch serves until the program is built" in str(serve.explain(*tensors()))
        serving.builds.finish()
        assert "compiling" not in str(serve.explain(*tensors()))
        for _ in range(2):
            call(function=ts.sdpa)
    call()
    assert (serving.counts, serving.builds.builds, len(plans.cache.ready)) == ((3, 0, 1), {}, 1)
    assert caplog.text.count("the program is built, and serves from now on") == 1
    assert [each.calls for each in read_seen(tmp_path / "notes").problems] == [5]


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_are_torchs_until_their_programs_are_built_or_waited_for_where_bits_matter(
    serving, deterministic
) -> None:
    q, k, v = given = [each.requires_grad_() for each in tensors()]
    heads, lengths = torch.tensor([0.5, -1.0]), torch.tensor([9])

    def gradients():
        out, lse = serve.sdpa(q, k, v, sinks=heads, key_lengths=lengths, return_lse=True, deterministic=deterministic)
        return torch.autograd.grad((out, lse), given, (dout, dlse))

    dout, dlse = torch.randn(q.shape).half(), torch.randn(q.shape[:3])
    wanted = exact_gradients(q, k, v, dout, dlse=dlse, sinks=heads, key_lengths=lengths)[:3]
    assert max(errors(gradients(), wanted)) < 4e-3
    assert bool(serving.compiled_here) is deterministic
    launched = len(serving.launches)
    assert bool(launched) is deterministic
    serving.builds.finish()
    assert max(errors(gradients(), wanted)) < 4e-3
    serving.builds.finish()
    assert max(errors(gradients(), wanted)) < 4e-3
    assert len(serving.launches) > launched
    assert bool(serving.builds.requests) is not deterministic


@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_torch_computes_a_mask_until_its_programs_are_built(serving, kind) -> None:
    """The program of the lists of blocks is not waited for either; until it is built, every block is visited."""
    q, k, v = given = [each.requires_grad_() for each in tensors(rows=70, keys=33)]
    seen = torch.rand(70, 33) > 0.3
    mask = seen if kind == "boolean" else torch.where(seen, 0.5, -math.inf).half()
    for launched in (0, None, 2):
        out = serve.sdpa(q, k, v, mask)
        wanted = functional.scaled_dot_product_attention(
            *(each.float() for each in (q, k, v)), mask.to(mask.dtype if kind == "boolean" else torch.float32)
        )
        torch.testing.assert_close(out.float(), wanted, **TOLERANCE[q.dtype])
        dout = torch.randn_like(out)
        for one, other in zip(
            torch.autograd.grad(out, given, dout), torch.autograd.grad(wanted, given, dout.float()), strict=True
        ):
            torch.testing.assert_close(one.float(), other.float(), **TOLERANCE[q.dtype])
        assert launched is None or bool(serving.launches) is bool(launched)
        serving.builds.finish()
    assert (serving.builds.awaited, serving.compiled_here) == (0, [])


@pytest.mark.slow
def test_compiled_code_is_served_alike(serving) -> None:
    compiled = torch.compile(lambda *given: serve.sdpa(*given), fullgraph=True, backend="aot_eager")
    call(function=compiled)
    assert serving.counts == (0, 0, 1)
    serving.builds.finish()
    call(function=compiled)
    assert serving.counts == (1, 0, 1)


@pytest.mark.parametrize("change", [{"compile": "wait"}, {"fallback": "error"}, {"rivals": "off"}])
def test_a_call_waits_where_settings_say_that_only_our_kernel_computes(serving, change) -> None:
    with ts.configure(**change):
        call()
    assert serving.counts == (1, 1, 0)


def test_a_call_that_warms_up_for_a_capture_waits_for_the_build_under_way(serving) -> None:
    call()
    assert serving.counts == (0, 0, 1)
    with on_another_stream():
        call()
    assert (serving.counts, serving.builds.awaited) == ((1, 0, 1), 1)
    with capturing():
        serve.sdpa(*tensors())
    assert len(serving.launches) == 2


def test_a_capture_holds_torchs_only_where_torch_has_run(serving, caplog) -> None:
    not_run = pytest.raises(LaunchError, match="has not run in this process yet")
    with capturing(), not_run:
        serve.sdpa(*tensors())
    serve.sdpa(*tensors())
    with capturing():
        for _ in range(2):
            call()
        with ts.configure(fallback="error"), not_run:
            serve.sdpa(*tensors())
    warned = [each for each in caplog.records if "a CUDA graph is being captured, which holds torch's" in each.message]
    assert [(each.levelname, "TILEDSCHED_COMPILE=wait" in each.message) for each in warned] == [("WARNING", True)]
    assert serving.launches == []


def test_what_the_compiler_refuses_gives_way_to_the_next_choice(serving, caplog) -> None:
    given = tensors(rows=200, columns=64)
    call(*given)
    first = serve.plan_for(*given).served.schedule
    serving.builds.finish(StoredProgram(error="Return code 5"))
    call(*given)
    assert "Return code 5" in caplog.text
    second = serve.plan_for(*given).served.schedule
    assert second != first
    assert [each.task.schedule for each in serving.builds.requests] == [first, second]
    serving.builds.finish()
    call(*given)
    assert serving.counts == (1, 0, 2)


def test_what_no_process_could_compile_is_compiled_by_the_call(serving, caplog) -> None:
    call()
    serving.builds.finish("compile process ended with code 7")
    call()
    assert serving.counts == (1, 1, 1)
    assert "ended with code 7; the program is compiled by the call instead" in caplog.text


def test_where_torch_fails_the_call_waits(serving, monkeypatch, caplog) -> None:
    def fails(*given, **more):
        raise torch.OutOfMemoryError("no memory for all scores")

    monkeypatch.setattr("tiledsched.ops.operator.attend_in_torch", fails)
    call()
    assert (len(serving.launches), serving.builds.awaited) == (1, 1)
    assert "no memory for all scores; the call waits for the program instead" in caplog.text


@pytest.mark.parametrize("where", ["__main__", "no compiler"])
def test_where_no_process_can_compile_the_call_does(serving, monkeypatch, where) -> None:
    """Another process would run a script once more to find what it declares."""
    if where == "__main__":
        Attention.source_hash()  # which is remembered: the `__main__` of a test is not where the kernel is
        monkeypatch.setattr(Attention, "__module__", where)
        monkeypatch.setattr(prebuilt, "_source_hash", lambda kernel: "abc")
    else:
        for module in (prebuilt, compiler):
            monkeypatch.setattr(module, "compiler_at_hand", lambda: "")
    call()
    assert serving.counts == (1, 1, 0)


def test_a_program_on_disk_is_launched_at_once_by_any_process(serving) -> None:
    call()
    (request,) = serving.builds.requests
    write_program(request.path, CODE)  # another rank has compiled it
    serving.builds.builds.clear()
    serve.reload()
    call()
    assert (serving.counts, serving.builds.builds) == ((1, 0, 1), {})


def test_all_launches_of_a_schedule_are_compiled_at_a_time(serving) -> None:
    given = tensors(rows=1, keys=2048, columns=64)
    with ts.configure(kv_splits=4, kv_combine="launch"):
        serve.sdpa(*given)
        assert [each.place for each in serving.builds.requests] == [0, 1]
        serving.builds.finish()
        call(*given)
    assert serving.counts == (2, 0, 2)


def test_a_rival_serves_while_our_program_is_compiled_and_is_kept_afterwards(serving, monkeypatch) -> None:
    """A rival that no graph holds: our program is loaded for graphs as soon as it is there."""
    called = []

    def rival(q, k, v):
        called.append(q)
        return functional.scaled_dot_product_attention(q, k, v)

    offer = Offer(name="other", ratio=0.5, capturable=False, reason="it is faster")
    monkeypatch.setattr(
        "tiledsched.serve.plan.choose_rivals", lambda served, make: (Rival(offer=offer, call=rival), None)
    )
    for calls in (1, 2):
        call()
        assert (len(called), serving.counts, len(plans.cache.ready)) == (calls, (0, 0, 1), 0)
    serving.builds.finish()
    call()
    assert (len(called), serving.counts, len(plans.cache.ready)) == (3, (1, 0, 1), 1)


@pytest.mark.parametrize(
    ("problem", "names"),
    [
        (Attention.standard(seq_len=256, head_dim=64, batch=1).replace(lengths=True), ("Lengths", "Sinks")),
        (kernel_named("matmul").problem(m=1, n=256, k=256), ("A", "C")),
    ],
)
def test_an_axis_of_one_element_is_no_program_of_its_own(problem, names) -> None:
    """cuTile infers that it is constant, which no machine code reads; programs built ahead would not be found."""
    from cuda.tile.compilation import KernelSignature

    kernel = problem.declaration
    schedule = space_for("sm_90", kernel).default(problem)
    (step,) = launches.steps(kernel, problem, schedule, arch_spec("sm_90"))
    built = launches.signature(kernel, problem, schedule, step)
    inferred = list(built.parameters)
    for place, argument in enumerate(step.arguments):
        if argument.name in names:
            each = inferred[place]
            inferred[place] = replace(each, shape_constant=(1, *each.shape_constant[1:]))
    assert inferred != list(built.parameters)
    asked = launches.assumed(kernel, KernelSignature(inferred, built.calling_convention), step)
    assert asked.parameters == built.parameters


FEATURES, OFFSETS = AttentionFeatures(softcap=30.0), torch.empty(4, device="meta")
PACKED = AttentionFeatures(cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS)
PAGES = AttentionFeatures(block_table=torch.empty(2, 8, device="meta"), key_lengths=OFFSETS[:2])


@pytest.mark.parametrize(
    ("rows", "keys", "causal", "lse", "features", "at_once"),
    [
        (1 << 14, 1 << 14, "top_left", False, NO_FEATURES, True),
        (1 << 10, 1 << 14, "bottom_right", False, NO_FEATURES, True),
        (1 << 14, 1 << 13, "bottom_right", False, NO_FEATURES, False),
        (1 << 14, 1 << 14, None, True, NO_FEATURES, False),
        (1 << 14, 1 << 14, None, False, FEATURES, False),
        (MOST_SCORES >> 13, 1 << 11, None, False, FEATURES, True),
        (300, 300, None, False, PACKED, False),  # only the GPU knows the lengths of the sequences
        (300, 300, None, False, PACKED._replace(max_seqlen_q=100, max_seqlen_k=100), True),
        (1, 300, None, False, PAGES, True),
    ],
)
def test_torch_stands_in_where_it_needs_no_gigabytes(rows, keys, causal, lse, features, at_once) -> None:
    q, k = (torch.empty(1, 4, each, 64, device="meta") for each in (rows, keys))
    assert computes_at_once(q, k, causal, lse, features) == at_once


@pytest.mark.parametrize("lse", [False, True])
def test_what_stands_in_is_laid_out_like_our_own_output(serving, lse) -> None:
    q, k, v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in tensors(value_columns=32))
    theirs = serve.sdpa(q, k, v, return_lse=lse)
    serving.builds.finish()
    ours = serve.sdpa(q, k, v, return_lse=lse)
    assert len(serving.launches) == 1
    for one, other in zip(theirs if lse else [theirs], ours if lse else [ours], strict=True):
        assert (one.stride(), one.dtype) == (other.stride(), other.dtype)
        torch.testing.assert_close(one, other, **TOLERANCE[q.dtype])


X, W = torch.randn(8, 64).half(), torch.randn(64).half()
ANGLES, LABELS = torch.ones(8, 32), torch.tensor([3, 63, 0, -100, 7, 1, 2, 5])
TURNED = torch.stack((X[:, ::2] - X[:, 1::2], X[:, 1::2] + X[:, ::2]), -1).reshape(1, 8, 64)
LOSS = functional.cross_entropy(X.float(), LABELS, label_smoothing=0.1, reduction="sum")


@pytest.mark.parametrize(
    ("call", "want"),
    [
        (lambda: ts.matmul(X, X.t()), X @ X.t()),
        (lambda: ts.softmax(X), torch.softmax(X, -1)),
        (lambda: ts.rms_norm(X, W, 1e-3), functional.rms_norm(X, (64,), W, 1e-3)),
        (lambda: ts.rms_norm(X, W, residual=X)[0], functional.rms_norm(2 * X, (64,), W, 1e-5)),
        (lambda: ts.rms_norm(X, W, residual=X)[1], 2 * X),
        (lambda: ts.layer_norm(X, W, W, 1e-3), functional.layer_norm(X, (64,), W, W, 1e-3)),
        (lambda: ts.layer_norm(X), functional.layer_norm(X, (64,))),
        (lambda: ts.swiglu(X), functional.silu(X[:, :32]) * X[:, 32:]),
        (lambda: ts.geglu(X, X, approximate="tanh"), functional.gelu(X, approximate="tanh") * X),
        (lambda: ts.rope(X[None], X[None], ANGLES, ANGLES, interleaved=True)[1], TURNED),
        (lambda: ts.cross_entropy(X, LABELS, label_smoothing=0.1, reduction="sum"), LOSS),
    ],
    ids=[
        "matmul",
        "softmax",
        "rms_norm",
        "residual",
        "sum",
        "layer_norm",
        "plain_norm",
        "swiglu",
        "geglu",
        "rope",
        "cross_entropy",
    ],
)
def test_torch_serves_for_the_operators_that_ship(serving, monkeypatch, call, want) -> None:
    monkeypatch.setenv("TILEDSCHED_RIVALS", "record")  # else cuBLAS serves so small a product
    torch.testing.assert_close(call(), want, **TOLERANCE[torch.float16])
    assert serving.counts == (0, 0, 1)
    serving.builds.finish()
    torch.testing.assert_close(call(), want, **TOLERANCE[torch.float16])
    assert serving.counts == (1, 0, 1)


class ProductWithRivals(op_kernels.Product):
    """A rival that compiles itself for seconds does not stand in; the next one does."""

    name = "product_with_rivals"
    compiled_rivals = ("slow",)

    def rivals(p):
        return {"slow": None, "torch": lambda a, b: a.float() @ b.float()}


def test_a_declared_operator_is_served_by_its_rival_or_waits(serving) -> None:
    a = torch.randn(16, 32).half()
    rival = ts.op("first_calls::product", ProductWithRivals)
    torch.testing.assert_close(rival(a, a.t()), a.float() @ a.t().float(), rtol=1e-3, atol=1e-3)
    assert serving.counts == (0, 0, 1)
    ts.op("first_calls::none", op_kernels.Product)(a, a.t())
    ts.op("first_calls::scale", op_kernels.Scale)(torch.ones(8))
    assert serving.counts == (2, 2, 1)


# Programs on disk


def key(problem=PROBLEM, schedule=SCHEDULE, source="abc", captured=(), hints=(("occupancy", 2),), arch="sm_90") -> str:
    (step,) = launches.steps(Attention, problem, schedule, arch_spec("sm_90"))
    signature = launches.signature(Attention, problem, schedule, step)
    return program_key(source, list(captured), dict(hints), signature, arch)


def test_a_programs_key_tells_everything_that_it_depends_on(monkeypatch) -> None:
    monkeypatch.setattr(compiler, "compiler_at_hand", lambda: "13.5.37")
    changes = [{}, {"source": "abd"}, {"captured": ["TILE", "1"]}, {"hints": (("occupancy", 3),)}, {"arch": "sm_121"}]
    changes += [{"problem": PROBLEM.replace(causal=True)}, {"schedule": SCHEDULE.replace(tile_m=128)}]
    found = [key(**each) for each in changes]
    assert key(PROBLEM.replace(seq_q=2048, seq_k=2048)) == found[0]  # another length of the same class
    for name, value in (("host_arch", "aarch64"), ("compiler_at_hand", "13.4.92")):
        monkeypatch.setattr(compiler, name, lambda value=value: value)
        found.append(key())
    assert len({*found}) == len(found)
    monkeypatch.setattr(compiler, "compiler_at_hand", lambda: "")
    assert key() == ""  # nothing is compiled here


def test_what_a_function_captures_is_part_of_its_programs_key() -> None:
    def made(tile):
        def inner():
            return tile

        return lambda: inner()

    assert captured_values(made(2)) == captured_values(made(2)) != captured_values(made(3))
    assert captured_values(made([2])) is None  # a list may change
    assert program_key("abc", None, {}, None, "sm_90") == ""


# The user's database


def test_a_first_call_reads_an_sqlite_file_as_it_is_without_sqlalchemy(tmp_path, monkeypatch) -> None:
    """Whose import takes half a second."""
    path, settings = tmp_path / "x.db", Settings(db=str(tmp_path / "x.db"), cache=str(tmp_path / "cache"))
    opened, open_db = [], TuningDB.open
    monkeypatch.setattr(TuningDB, "open", lambda *given, **named: opened.append(given) or open_db(*given, **named))
    for occupancy in (2, 3):
        with open_db(path) as db:
            db.put_entry(entry("modelled", problem=PROBLEM, schedule=SCHEDULE.replace(occupancy=occupancy)))
        (layer,) = [each for each in layers(settings, ["sm_90"], Attention) if each.name == "user"]
        found = [(each.schedule["occupancy"], each.problem, each.provenance) for each in layer.entries]
        assert (found, opened) == ([(occupancy, PROBLEM, "modelled")], [])


# The processes


@pytest.fixture
def builder():
    made = BackgroundBuilder(WORKER, processes=1)
    yield made
    made.close()


def built(builder, path, do="fine", waits=True) -> Build:
    task = BuildTask(kernel="attention", schedule=Schedule({"do": do}), problem=PROBLEM, arch="sm_90")
    found = builder.submit(BuildRequest(path=path, task=task, wide=False, place=0, parameters=()))
    if waits:
        found.wait()
    return found


def test_one_process_compiles_one_program_after_the_other_and_is_started_anew_where_it_dies(builder, tmp_path) -> None:
    first, second = (built(builder, tmp_path / name, waits=False) for name in "ab")
    assert built(builder, tmp_path / "a") is first
    second.wait()
    assert first.program.cubin == second.program.cubin != str(os.getpid()).encode()
    assert built(builder, tmp_path / "c", "refuse").program.error == "no such tile"
    assert built(builder, tmp_path / "d", "fail").failure == "OSError: no space"
    assert built(builder, tmp_path / "e", "die_once").program.symbol == "made"
    assert "ended with code 7" in built(builder, tmp_path / "f", "die").failure
    assert built(builder, tmp_path / "g").program.symbol == "made"


def test_a_process_that_hangs_is_ended_with_its_compiler(builder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(background, "ANSWER_S", 0.0)
    assert "no answer to build within 0 s" in built(builder, tmp_path / "a", "hang").failure
    assert builder._workers == []


def test_processes_end_when_there_is_nothing_to_do(tmp_path) -> None:
    builder = BackgroundBuilder(WORKER, idle_s=0.0)
    for name in "ab":
        assert built(builder, tmp_path / name).program.symbol == "made"
        for thread in [each for each in threading.enumerate() if each.name == "tiledsched-build"]:
            thread.join()  # of others, which were closed, too
        assert builder._workers == []
    builder.close()
    builder = BackgroundBuilder((str(tmp_path / "no such program"),))
    assert "No such file" in built(builder, tmp_path / "a").failure
    builder.close()


def test_a_forked_process_starts_anew(builder, tmp_path) -> None:
    waiting = built(builder, tmp_path / "a", "hang", waits=False)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            fine = waiting.is_done and built(builder, tmp_path / "b").program.symbol == "made"
            builder.close()
            os.write(write, b"y" if fine else b"n")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"y"
    assert not waiting.is_done
    builder.close()
    assert waiting.failure == "this process is ending"


PROGRAM = f"""
import sys
from pathlib import Path
from tiledsched.core.schedule import Schedule
from tiledsched.build.compiler import BuildTask
from tiledsched.serve.background import BackgroundBuilder, BuildRequest
path = Path(sys.argv[1])
task = BuildTask(kernel="", schedule=Schedule({{"do": "hang"}}), problem=None, arch="sm_90")
BackgroundBuilder({WORKER!r}).submit(BuildRequest(path=path, task=task, wide=False, place=0, parameters=()))
tried = path.with_suffix(".tried")
while not (tried.exists() and tried.read_text()):
    pass
"""


def test_a_program_ends_at_once_and_takes_its_processes_along(tmp_path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "a")], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    for pid in (tmp_path / "a.tried").read_text().split():  # of the worker and its compiler
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z"


COMPILES = """
import sys
from pathlib import Path
from tiledsched.build.store import Claims, StoredProgram, write_program
path = Path(sys.argv[1])
print(Claims(path.parent).claim(path), flush=True)
sys.stdin.read()
write_program(path, StoredProgram(cubin=b"machine code", symbol="attention"))
"""


def test_what_another_process_compiles_is_waited_for_and_then_read(tmp_path) -> None:
    path = tmp_path / "abcdef0"
    task = BuildTask(kernel="nowhere:Nothing", schedule=SCHEDULE, problem=PROBLEM, arch="sm_90")
    asked = BuildRequest(path=path, task=task, wide=False, place=0, parameters=())
    assert "nowhere" in background.build(asked)  # it cannot be compiled here
    command = [sys.executable, "-c", COMPILES, str(path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as other, ThreadPoolExecutor(1) as thread:
        assert other.stdout.readline() == "True\n"
        waits = thread.submit(background.build, asked)
        assert wait([waits], 0.2).not_done
        other.stdin.close()
        assert waits.result() == CODE


@pytest.mark.compiler
@pytest.mark.slow
def test_the_process_compiles_what_a_launch_would(tmp_path) -> None:
    """The machine code is that of a build."""
    problem, schedule = PROBLEM.replace(head_dim=32), SCHEDULE.replace(tile_m=64, tile_n=32)
    (step,) = launches.steps(Attention, problem, schedule, arch_spec("sm_90"))
    parameters = tuple(launches.signature(Attention, problem, schedule, step).parameters)
    task = BuildTask(kernel=Attention.locator(), schedule=schedule, problem=problem, arch="sm_90")
    asked = BuildRequest(path=tmp_path / "abcdef0", task=task, wide=False, place=0, parameters=parameters)
    builder = BackgroundBuilder()
    build = builder.submit(asked)
    build.wait()
    builder.close()
    assert build.failure == ""
    want = compile_schedule(Attention, problem, schedule, "sm_90")
    assert read_artifact(build.program.cubin, "sm_90").fingerprint == want.fingerprint
    assert read_program(asked.path) == build.program
