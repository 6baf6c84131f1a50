"""The GPU suite: every kernel that ships, every program that the tables of sm_90 serve, by themselves and by transfer, on odd sizes
against float64, and all tests that need a GPU.

    python tests/gpu_suite.py build              the bundle of programs: needs the compiler and no GPU
    python tests/gpu_suite.py run                the bundle, on the GPU: needs no compiler
    python tests/gpu_suite.py all                build if there is no bundle, run, and run the tests marked `gpu`
    python tests/gpu_suite.py same --former FILE whether the bundle has the machine code of an earlier one, which ran: needs no GPU

`same` appends rows to docs/results/gpu_same_code.csv where the text of tile code changed and its machine code did not. `all` appends a row to docs/results/gpu_suite.csv once every program and every test has run.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [each for each in (str(ROOT), str(ROOT / "tests")) if each not in sys.path]

import gpu_programs

from tiledsched.core.errors import Failure
from tiledsched.core.processes import child_environment, python_command
from tiledsched.measure.gpu import WorkerProcess

RECORD = ROOT / "docs" / "results" / "gpu_suite.csv"
SAME_CODE = RECORD.with_name("gpu_same_code.csv")
SAME_HEAD = ("date", "commit", "compiler", "kernel", "former", "present", "programs", "problems")
"""Columns of :data:`SAME_CODE`: the hashes of a kernel's tile code before and after, and what was compared."""
HEAD = ("date", "commit", "compiler", "gpu", "driver", "programs", "cases", "failures", "tests", "tests_failed")
HEAD += ("seconds", "kernels")
START_S, BEGIN_S, LOAD_S, CHECK_S = 120.0, 120.0, 30.0, 60.0
"""Seconds after which the process on the GPU is taken for hung. At first CuPy compiles what references take."""
TESTS_S = 540.0
"""Seconds after which a file of tests is given up."""
SHARDS = 3
"""Processes that the tests of one file are shared out to: most of their time is the compiler's."""
WHOLE = ("test_gpu_integrations",)
"""Files whose tests share what takes long to make, and stay in one process."""
NO_TESTS = 5
"""What pytest ends with where no test of a file is chosen."""
TAIL = 25
"""Lines of a failed test's output that are printed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a program on a problem."""

    kernel: str
    program: str
    """Its fingerprint; what was called, where no program runs."""
    problem: str
    schedule: str
    message: str
    """What is wrong; empty where nothing is."""
    seconds: float


class Lane:
    """A process on the GPU, which is started again when it dies."""

    def __init__(self, codes: dict[str, bytes], command: Sequence[str] = python_command("gpu_worker")) -> None:
        self.codes, self.command = codes, command
        self.device: Any = None
        self._worker: WorkerProcess | None = None

    def start(self) -> WorkerProcess:
        """The process, alive.

        Raises:
            SystemExit: the GPU cannot be used.
        """
        if self._worker is None or not self._worker.alive():
            self.close()
            self._worker = WorkerProcess(self.command)
            answer = self._worker.answer(START_S, "start")
            if isinstance(answer, Failure):
                raise SystemExit(f"the GPU cannot be used: {answer.message}")
            self.device = answer[0]
        return self._worker

    def ask(self, seconds: float, verb: str, *arguments: Any) -> Any:
        """An answer; the death of the process is a Failure."""
        return self.start().ask(seconds, verb, *arguments)

    def outcomes(self, problem: Any, programs: Sequence[tuple[Any, Any]]) -> Iterator[Outcome]:
        """What comes of each program on a problem. After a fault, the rest runs in another process."""
        kernel, began = problem.declaration, None
        for schedule, launch in programs:
            started = time.perf_counter()
            worker, answer = self.start(), None
            if began is not worker:
                answer, began = self.ask(BEGIN_S, "begin", kernel.locator(), problem, 1), worker
            name, limits = launch.fingerprint, kernel.tolerance(problem, schedule)  # of today, not of when it was built
            if not isinstance(answer, Failure) and name not in worker.loaded:
                answer = self.ask(LOAD_S, "load", name, self.codes[name])
                worker.loaded.add(name)
            if not isinstance(answer, Failure):
                answer = self.ask(CHECK_S, "check", replace(launch, tolerance=limits))
            if isinstance(answer, Failure):
                worker.loaded.discard(name)
            message = f"{answer.kind}: {answer.message}" if isinstance(answer, Failure) else ""
            yield Outcome(
                kernel=kernel.name,
                program=name,
                problem=str(problem),
                schedule=schedule.short(),
                message=message,
                seconds=time.perf_counter() - started,
            )

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.kill()


def run_cases(
    bundle: dict[str, Any], lanes: int, seconds: float, command: Sequence[str] = ()
) -> tuple[list[Outcome], Any, int]:
    """Every program of a bundle on its problems, in several processes side by side: what came of them, the GPU, and how many problems
    were left after so many seconds.
    """
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for case in bundle["cases"]:
        waiting.put(case)
    found: list[Outcome] = []
    devices: list[Any] = []
    ends = time.monotonic() + seconds

    def work(_: int) -> None:
        lane = Lane(bundle["codes"], command or python_command("gpu_worker"))
        try:
            while time.monotonic() < ends:
                found.extend(lane.outcomes(*waiting.get_nowait()))
                devices.append(lane.device)
        except queue.Empty:
            pass
        finally:
            lane.close()

    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(work, range(lanes)))
    return found, devices[0] if devices else None, waiting.qsize()


def run_empty(device: str = "cuda") -> list[Outcome]:
    """What comes of calls of the public operators on tensors of which a size is 0, and of their gradients: nothing, or zeros."""
    import torch

    import tiledsched as ts

    eight, one = torch.float8_e4m3fn, torch.ones((), device=device)
    labels = torch.zeros(0, dtype=torch.int64, device=device)
    ends = torch.zeros(3, dtype=torch.int32, device=device)
    row, attended = (
        ((0, 64), (64,), (64,)),
        [((b, 2, m, 64), (b, 2, n, 64)) for b, m, n in ((0, 4, 4), (2, 0, 4), (2, 4, 0))],
    )
    turned = [((b, 4, s, 64), (b, 2, s, 64), (s, 32)) for b, s in ((0, 5), (2, 0))]
    calls: dict[str, tuple[Callable[..., Any], Any]] = {
        "softmax": (ts.softmax, [row[:1], [(2, 0, 96)]]),
        "rms_norm": (ts.rms_norm, [row[:2]]),
        "layer_norm": (ts.layer_norm, [row, [(2, 0, 96), (96,)]]),
        "glu": (ts.swiglu, [row[:1]]),
        "rms_norm_quantized": (
            lambda x, w: tuple(each.float() for each in ts.rms_norm(x, w, quantize="row")),
            [row[:2], [(2, 0, 96), (96,)]],
        ),
        "glu_quantized": (lambda x: ts.swiglu(x, quantize=one)[0].float(), [row[:1], [(2, 0, 96)]]),
        "matmul": (ts.matmul, [((m, k), (k, n)) for m, n, k in ((0, 64, 32), (64, 0, 32), (64, 32, 0))]),
        "matmul_epilogue": (
            lambda a, b: ts.matmul(a, b, None, "gelu", b, a @ b),
            [((m, k), (k, n)) for m, n, k in ((0, 64, 32), (64, 0, 32), (64, 32, 0))],
        ),
        "grouped_matmul": (lambda a, b: ts.grouped_matmul(a, b, ends), [((0, 64), (3, 64, 32))]),
        "grouped_matmul_epilogue": (
            lambda a, b: ts.grouped_matmul(a, b, ends, None, "silu", b),
            [((0, 64), (3, 64, 32))],
        ),
        "scaled_matmul": (
            lambda a, b: ts.scaled_matmul(a.to(eight), b.to(eight).t(), one, one),
            [((m, k), (32, k)) for m, k in ((0, 32), (32, 0))],
        ),
        "scaled_matmul_epilogue": (
            lambda a, b: ts.scaled_matmul(
                a.to(eight), b.to(eight).t(), one, one, activation="silu", gate=b.to(eight).t(), scale_gate=one
            ),
            [((m, k), (32, k)) for m, k in ((0, 32), (32, 0))],
        ),
        "rope": (lambda q, k, c: ts.rope(q, k, c, c), turned),
        "rope_in_place": (lambda q, k, c: ts.rope(q, k, c, c, inplace=True), turned),
        "cross_entropy": (lambda x: ts.cross_entropy(x, labels, reduction="none"), [((0, 50),)]),
        "attention": (lambda q, k: ts.sdpa(q, k, k), attended),
    }
    calls |= {f"{name}_backward": calls[name] for name in ("softmax", "rms_norm", "attention")}
    found = []
    for dtype, (kernel, (call, cases)) in itertools.product((torch.float16, torch.bfloat16), calls.items()):
        for shapes in cases:
            started, message, gradients = time.perf_counter(), "", kernel.endswith("_backward")
            given = [torch.ones(shape, device=device, dtype=dtype, requires_grad=gradients) for shape in shapes]
            try:
                made = call(*given)
                made = made if isinstance(made, tuple) else (made,)
                made += torch.autograd.grad(made, given, [torch.ones_like(each) for each in made]) if gradients else ()
                wrong = [tuple(each.shape) for each in made if bool((each != 0).any())]
                message = f"results of shapes {wrong} are not zero" if wrong else ""
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
            words, seconds = f"{shapes} {dtype}", time.perf_counter() - started
            found.append(
                Outcome(kernel=kernel, program="", problem=words, schedule="", message=message, seconds=seconds)
            )
    return found


def gpu_tests() -> list[Path]:
    """The files of tests that need a GPU."""
    files = sorted((*ROOT.glob("tests/test_*.py"), *ROOT.glob("docs/studies/tests/test_*.py")))
    return [path for path in files if "pytest.mark.gpu" in path.read_text()]


def run_tests(out: Path, measures: bool) -> dict[str, bool]:
    """Every file of tests that need a GPU in processes of its own; by file, whether it passed. What failed is printed. With
    `measures`, those tests that need the GPU for themselves, one file after another; else the rest, side by side.
    """

    def run(path: Path) -> bool:
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            f"gpu and {'' if measures else 'not '}measures",
            "-rfs",
            "--tb=short",
        ]
        shards = [] if measures or path.stem in WHOLE else ["-n", str(SHARDS), "--dist", "worksteal"]
        words += ["--durations=8", *shards, str(path)]
        started, log = time.perf_counter(), out / f"{path.stem}{'_alone' if measures else ''}.txt"
        with (
            log.open("w") as file,
            subprocess.Popen(words, stdout=file, stderr=file, cwd=ROOT, env=child_environment()) as process,
        ):
            try:
                passed = process.wait(TESTS_S) in (0, NO_TESTS)
            except subprocess.TimeoutExpired:
                process.kill()
                passed = False
        lines = log.read_text().splitlines() or ["no output"]
        print(f"{path.stem}: {lines[-1]} ({time.perf_counter() - started:.0f} s)", flush=True)
        if not passed:
            print("\n".join(f"    {line}" for line in lines[-TAIL:]), flush=True)
        return passed

    files = [path for path in gpu_tests() if not measures or "pytest.mark.measures" in path.read_text()]
    with ThreadPoolExecutor(1 if measures else len(files)) as pool:
        return dict(zip((path.stem for path in files), pool.map(run, files), strict=True))


def table(found: Sequence[Outcome]) -> str:
    """Programs, cases, failures and seconds of each kernel."""
    lines = [f"{'kernel':20}{'programs':>9}{'cases':>7}{'failures':>10}{'seconds':>9}"]
    for kernel in sorted({each.kernel for each in found}):
        of = [each for each in found if each.kernel == kernel]
        count, failed = len({each.program for each in of} - {""}), sum(bool(each.message) for each in of)
        lines.append(f"{kernel:20}{count:9}{len(of):7}{failed:10}{sum(each.seconds for each in of):9.1f}")
    return "\n".join(lines)


def record(path: Path, row: dict[str, Any], head: Sequence[str] = HEAD) -> None:
    """Append a row to the record of runs."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, head, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def compare_code(former: Path, bundle: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """By kernel whose tile code changed between two bundles, a row that says that all its programs are launched as before, by
    machine code that is the same bit for bit; and what is not.
    """
    abouts = [gpu_programs.read_about(each) for each in (former, bundle)]
    before, after = (
        {
            problem: {(schedule.id, launch.fingerprint, launch.steps, launch.scratch) for schedule, launch in found}
            for problem, found in gpu_programs.read(each)["cases"]
        }
        for each in (former, bundle)
    )
    rows, others = [], []
    for kernel, present in abouts[1]["kernels"].items():
        if present == abouts[0]["kernels"].get(kernel):
            continue
        own = {problem for problem in {*before, *after} if problem.kernel == kernel}
        differ = sorted(str(each) for each in own if before.get(each) != after.get(each))
        if differ or not own:
            others.append(
                f"{kernel}: {len(differ)} of {len(own)} problems differ, as {differ[0] if differ else 'none is there'}"
            )
            continue
        date, commit = f"{datetime.date.today():%Y-%m-%d}", abouts[1]["commit"]
        former_hash, programs = abouts[0]["kernels"][kernel], {each[1] for problem in own for each in after[problem]}
        values = (date, commit, abouts[1]["compiler"], kernel, former_hash, present, len(programs), len(own))
        rows.append(dict(zip(SAME_HEAD, values, strict=True)))
    if abouts[0]["compiler"] != abouts[1]["compiler"] or abouts[1]["left_out"]:
        others.append("the bundles are of different compilers, or programs were not built")
    return rows, others


def ran_hashes(last: dict[str, str], same: Sequence[dict[str, str]]) -> dict[str, set[str]]:
    """By kernel, the hashes of tile code whose machine code ran in a recorded run: its own, and those of the same machine code."""
    found = {name: {digest} for name, digest in (each.split("=") for each in last["kernels"].split())}
    for row in same:
        if row["compiler"] == last["compiler"] and row["former"] in found.get(row["kernel"], ()):
            found[row["kernel"]].add(row["present"])
    return found


def outdated(path: Path) -> list[str]:
    """The kernels of which a bundle does not hold this checkout's tile code and table: all of them where there is none."""
    built = gpu_programs.read_about(path)["kernels"] if path.is_file() else {}
    return [name for name, digest in gpu_programs.hashes().items() if built.get(name) != digest]


def run_suite(options: argparse.Namespace) -> int:
    """Run the bundle and perhaps the tests, print what failed, and record the run."""
    started, others = time.perf_counter(), outdated(options.bundle)
    if others:
        raise SystemExit(
            f"{options.bundle} is not of this tile code and these tables of {', '.join(others)}; where the compiler is, run: "
            "python tests/gpu_suite.py build"
        )
    about, bundle = gpu_programs.read_about(options.bundle), gpu_programs.read(options.bundle)
    options.out.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, __file__, "empty"]
    empty = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=child_environment()
    )
    beside = ThreadPoolExecutor(1)  # most of the tests' time is the compiler's, and the cases need none
    running = beside.submit(run_tests, options.out, False) if options.tests else None
    found, device, left = run_cases(bundle, options.lanes, options.seconds)
    said = empty.communicate()[0].strip().splitlines()
    if empty.returncode:
        raised = {
            "program": "",
            "problem": "calls with nothing to do",
            "schedule": "",
            "message": said[-1],
            "seconds": 0.0,
        }
        found.append(Outcome(kernel="all", **raised))
    else:
        found += [Outcome(**each) for each in json.loads(said[-1])]
    failed = [each for each in found if each.message]
    with (options.out / "failures.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("kernel", "program", "problem", "schedule", "message"))
        writer.writerows((each.kernel, each.program, each.problem, each.schedule, each.message) for each in failed)
    for each in failed[: 2 * TAIL]:
        print(f"{each.kernel} {each.problem} {each.schedule}: {each.message}")
    print(
        f"{len(failed)} failures of {len(found)} cases, in {options.out / 'failures.csv'}; {time.perf_counter() - started:.0f} s"
    )
    print(table(found), flush=True)
    tests = running.result() if running else {}
    for name, passed in run_tests(options.out, True).items() if running else ():
        tests[name] = tests[name] and passed
    seconds = round(time.perf_counter() - started)
    row = {
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "commit": gpu_programs.commit() or about["commit"],
        "compiler": about["compiler"],
        "gpu": getattr(device, "name", ""),
        "driver": getattr(device, "driver", ""),
        "programs": len({each.program for each in found} - {""}),
        "cases": len(found),
        "failures": len(failed),
        "tests": len(tests),
        "tests_failed": sum(not passed for passed in tests.values()),
        "seconds": seconds,
        "kernels": " ".join(f"{name}={digest}" for name, digest in about["kernels"].items()),
    }
    print(f"{seconds} s; " + ", ".join(f"{name} {value}" for name, value in row.items() if name in HEAD[5:10]))
    if about["left_out"] or left:
        print(
            f"not recorded: {about['left_out']} programs were not built, and {left} problems were left for want of time"
        )
    elif options.tests:
        record(options.record, row)
    return int(bool(failed or left) or not all(tests.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, run, or both."""
    parser = argparse.ArgumentParser(prog="python tests/gpu_suite.py", description=__doc__.partition("\n\n")[0])
    parser.add_argument("command", choices=("build", "run", "all", "empty", "same"))
    parser.add_argument("--bundle", type=Path, default=gpu_programs.BUNDLE, help="the bundle of programs")
    parser.add_argument("--former", type=Path, help="the bundle that ran (with same)")
    parser.add_argument("--tests", choices=("yes", "no"), help="whether the tests marked gpu run, too (with all)")
    parser.add_argument("--out", type=Path, default=gpu_programs.FOLDER / "out", help="a folder for what failed")
    parser.add_argument("--record", type=Path, default=RECORD, help="the file that a row is appended to")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no more is built (60)")
    parser.add_argument("--lanes", type=int, default=min(8, os.cpu_count() or 1), help="processes on the GPU (8)")
    parser.add_argument("--seconds", type=float, default=300.0, help="within which all cases must have run (300)")
    options = parser.parse_args(arguments)
    options.tests = options.tests == "yes" if options.tests else options.command == "all"
    if options.command == "empty":
        print(json.dumps([vars(each) for each in run_empty()]))
        return 0
    if options.command == "same":
        rows, others = compare_code(options.former, options.bundle)
        print("\n".join(others or ["the machine code is the same: " + ", ".join(row["kernel"] for row in rows)]))
        for row in rows if not others else ():
            record(SAME_CODE, row, SAME_HEAD)
        return int(bool(others))
    builds = options.command == "all" and gpu_programs.compiler() and outdated(options.bundle)
    if options.command == "build" or builds:
        gpu_programs.make_bundle(options.bundle, options.minutes)
    return 0 if options.command == "build" else run_suite(options)


if __name__ == "__main__":
    raise SystemExit(main())
