"""The commands that compare: `bench` with other attentions, `ablate` a tuned schedule with the plain one."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tiledsched.cli import output
from tiledsched.cli.commands import _print_json, _problems, _said, _session, _settings
from tiledsched.core.errors import ConfigError

if TYPE_CHECKING:
    from tiledsched.core.problem import Problem
    from tiledsched.core.schedule import Schedule
    from tiledsched.core.space import SearchSpace
    from tiledsched.studies.ablation.rows import AblationRow


MOST_PROFILES = 8
"""Problems of one `profile`: each method takes seconds under the profiler."""


def bench(options: argparse.Namespace) -> int:
    """Time a kernel beside its rivals; or sum up rows that were measured before."""
    if options.summary:
        return _bench_summary(options)
    from tiledsched.bench.job import bench_here
    from tiledsched.bench.rows import append_rows, finished_cells
    from tiledsched.bench.summary import summarise, to_markdown

    path = Path(options.csv) if options.csv else None
    if options.resume and path is None:
        raise ConfigError("--resume goes on with a file; pass --csv FILE, too")
    if path is not None and path.exists() and not options.resume:
        raise ConfigError(f"{path} is there already; go on with it with --resume, or choose another file")
    rows = bench_here(
        options.declaration,
        _problems(options),
        db=options.db,
        methods=options.methods,
        ceiling=options.ceiling,
        regime=options.regime,
        rounds=options.rounds,
        budget_s=options.budget,
        verify=options.verify,
        done=lambda methods: finished_cells(path, methods) if path else set(),
        keep=lambda found: append_rows(found, path) if path else None,
        progress=output.note,
    )
    summaries = summarise(rows)
    if options.json:
        _print_json({"rows": [row.to_json() for row in rows], "summary": [each.to_json() for each in summaries]})
    else:
        output.print_bench(rows)
        print(to_markdown(summaries))
    return 0


def _bench_summary(options: argparse.Namespace) -> int:
    from tiledsched.bench.rows import read_rows
    from tiledsched.bench.summary import summarise, to_markdown

    summaries = summarise([row for path in options.summary for row in read_rows(Path(path))])
    _said(options, {"summary": [each.to_json() for each in summaries]}, to_markdown(summaries))
    return 0


def profile(options: argparse.Namespace) -> int:
    """Nsight Compute on each problem and method; Markdown to stdout."""
    from tiledsched.bench.methods import OURS, SERVED, methods_of
    from tiledsched.core.files import write_whole
    from tiledsched.measure.nvml import devices
    from tiledsched.studies.profile import pages
    from tiledsched.studies.profile.run import find_ncu, versions
    from tiledsched.studies.profile.run import profile as profiled

    problems, ncu = _problems(options), find_ncu(options.ncu)
    if options.db:
        os.environ["TILEDSCHED_DB"] = options.db  # what is launched reads its own settings
    if len(problems) > MOST_PROFILES:
        raise ConfigError(f"that is {len(problems)} problems; name at most {MOST_PROFILES} with --problem")
    here = next(iter(devices()), None)
    device, told = (here.name, versions(ncu, here.driver)) if here else ("", versions(ncu, ""))
    rows: list[dict[str, object]] = []
    for problem in problems:
        known = methods_of(options.declaration, [problem])
        rivals = [
            name for name in ("torch_auto", *known) if name in known and name not in (OURS, SERVED, "untuned", "matmul")
        ]
        unknown = [name for name in options.methods or () if name not in known]
        if unknown:
            raise ConfigError(f"unknown method {unknown[0]!r}; known are {', '.join(known)}")
        methods = options.methods or [OURS, *rivals[:1]]
        found = profiled(options.declaration, problem, methods, ncu=ncu, progress=output.note)
        text = pages.to_text(problem, found, device=device, versions=told)
        shared = {"problem": str(problem), "device": device, "versions": told}
        rows += [{**shared, **each.to_csv(problem.min_bytes)} for each in found]
        if options.out:
            folder = Path(options.out)
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / f"profile_{problem.id}.md", text.encode())
            as_csv = pages.to_csv(problem, found, device=device, versions=told)
            write_whole(folder / f"profile_{problem.id}.csv", as_csv.encode())
        if not options.json:
            print(text)
    if options.json:
        _print_json({"rows": rows})
    return 0


def ladder(options: argparse.Namespace) -> int:
    """Every rung from the naive kernel to what is served, each cell kept as it is measured; or only the hints of every arch."""
    from tiledsched.bench.rows import append_rows, finished_cells, read_rows
    from tiledsched.serve.entries import load_table
    from tiledsched.studies.ladder.pages import write_ladder
    from tiledsched.studies.ladder.rungs import methods, plain_problem, usual
    from tiledsched.studies.ladder.targets import by_target

    kernel = options.declaration
    if kernel.name != "attention":
        raise ConfigError(
            f"the ladder is of attention; `tiledsched ablate {options.kernel}` says what each knob of another kernel is worth"
        )
    problems = _problems(options) if options.problem or options.suite else usual()
    table = load_table(_settings(options), kernel=kernel)
    targets = "\n\n".join(by_target(kernel, problem, table) for problem in problems)
    if options.targets:
        _said(options, {"targets": targets}, targets.rstrip())
        return 0
    for problem in problems:
        plain_problem(problem)
    folder = Path(options.out)
    path = folder / "ladder.csv"
    if options.summary and not path.exists():
        raise ConfigError(f"{folder} holds no ladder; leave out --summary to measure one")
    if not options.summary:
        from tiledsched.bench.harness import TorchHarness
        from tiledsched.bench.run import BenchOptions, run_bench
        from tiledsched.measure.lock import holding_current_gpu

        steps = methods()
        how = BenchOptions(
            methods=tuple(steps), regimes=(options.regime,), rounds=options.rounds, budget_s=options.budget
        )
        done = finished_cells(path, [step.name for step in steps])
        with holding_current_gpu():
            run_bench(
                problems,
                how,
                TorchHarness(),
                done=done,
                keep=lambda found: append_rows(found, path),
                progress=output.note,
            )
    rows = [row for row in read_rows(path) if row.regime == options.regime]
    files = write_ladder(folder, rows, targets)
    _said(
        options,
        {"files": [str(each) for each in files], "rows": [row.to_json() for row in rows]},
        "\n".join(map(str, files)),
    )
    return 0


def study(options: argparse.Namespace) -> int:
    """The paper's evaluation: bench, tiles, tables and figures, each cell kept as it is measured."""
    from tiledsched.bench.rows import append_rows, finished_cells, read_rows
    from tiledsched.studies.evaluation import rows as grid
    from tiledsched.studies.evaluation.pages import write_evaluation
    from tiledsched.studies.evaluation.tiles import race_tiles, tiling_rows

    if options.declaration.name != "attention":
        raise ConfigError(
            f"the study is of attention; `tiledsched bench {options.kernel}` times other kernels beside their rivals"
        )
    folder = Path(options.out)
    path = folder / "bench.csv"
    began = time.monotonic()

    def left() -> float | None:
        return None if options.budget is None else max(0.0, options.budget - (time.monotonic() - began))

    if options.summary:
        if not path.exists():
            raise ConfigError(f"{folder} holds no study; leave out --summary to measure one")
    else:
        if options.db:
            os.environ["TILEDSCHED_DB"] = options.db  # what is launched reads its own settings
        from tiledsched.bench.harness import TorchHarness
        from tiledsched.bench.methods import choose_methods
        from tiledsched.bench.run import BenchOptions, run_bench
        from tiledsched.measure.lock import holding_current_gpu

        chosen = choose_methods(options.declaration, options.methods or list(grid.METHODS))
        methods = [method for method in chosen if method.name in grid.METHODS]
        if not methods:
            raise ConfigError(f"the study knows {', '.join(grid.METHODS)}; name some of them with --methods")
        done = finished_cells(path, [method.name for method in methods])
        how = BenchOptions(methods=tuple(methods), regimes=(options.regime,), rounds=options.rounds, budget_s=left())
        with holding_current_gpu():
            harness = TorchHarness()
            run_bench(
                grid.problems(),
                how,
                harness,
                done=done,
                keep=lambda found: append_rows(found, path),
                progress=output.note,
            )
        if not options.no_tiles:
            race_tiles(harness.arch, folder, options.declaration, budget_s=left(), jobs=options.jobs)
    rows = [row for row in read_rows(path) if row.regime == options.regime]
    files = write_evaluation(folder, rows, tiling_rows(folder, options.declaration))
    missing = len(grid.problems()) - len({row.problem for row in rows})
    if missing:
        output.note(f"{missing} of {len(grid.problems())} problems are left; run the same command again to go on")
    _said(
        options,
        {"files": [str(each) for each in files], "problems": len(grid.problems()) - missing, "left": missing},
        "\n".join(map(str, files)),
    )
    return 0


def ablate(options: argparse.Namespace) -> int:
    """Climb from the plain schedule to the tuned one, on the GPU or over recorded landscapes."""
    from tiledsched.studies.ablation.rows import write_rows

    rows: list[AblationRow] = []
    for ladder in _replayed(options) if options.replay else _ablated(options):
        rows += ladder
        if options.csv:  # after each problem: what ends the command early loses only the one under way
            write_rows(rows, Path(options.csv))
        if not options.json:
            output.print_ablation(ladder)
    if options.json:
        _print_json({"rows": [row.to_csv() for row in rows]})
    return 0


def _replayed(options: argparse.Namespace) -> Iterator[list[AblationRow]]:
    """The rows of each recorded problem."""
    from tiledsched.core.space_files import space_for
    from tiledsched.measure.replay import ReplayRunner
    from tiledsched.store.exchange import read_table
    from tiledsched.studies.ablation.ladder import Ladder
    from tiledsched.studies.ablation.sources import Recorded

    for path in options.replay:
        table = read_table(path)
        first = table.measurements[0].measurement if table.measurements else None
        if first is not None and first.device.arch != options.arch:
            raise ConfigError(f"{path} was recorded on {first.device.arch}; pass --arch {first.device.arch}")
        kernel = first.problem.declaration if first is not None else options.declaration
        space = space_for(options.arch, kernel)
        recorded = Recorded(table, space)
        ladder = Ladder(
            ReplayRunner(kernel, recorded.measurements),
            recorded,
            space,
            kernel,
            recorded.problem,
            regime=recorded.regime,
            rounds=options.rounds,
            recorded=recorded.holds,
            progress=output.note,
        )
        yield ladder.climb(_plain(options.start or "default", space, recorded.problem), recorded.best.schedule)


def _ablated(options: argparse.Namespace) -> Iterator[list[AblationRow]]:
    """The rows of each problem, measured."""
    from tiledsched.serve.entries import load_table
    from tiledsched.studies.ablation.ladder import Ladder
    from tiledsched.studies.ablation.sources import Built

    kernel = options.declaration
    with _session(options) as session:
        space = session.space(kernel)
        runner = session.open_runner(kernel, "gpu", seed=options.seed, without="--replay FILE")
        assert runner is not None
        served, source = load_table(session.settings, kernel=kernel), Built(session.builder(kernel))
        for problem in _problems(options):
            found = served.resolve(problem, options.arch, runner.device.name)
            output.note(f"{problem}: {found.provenance} schedule {found.schedule.short()}")
            ladder = Ladder(
                runner,
                source,
                space,
                kernel,
                problem,
                regime=session.settings.regime,
                rounds=options.rounds,
                progress=output.note,
            )
            yield ladder.climb(_plain(options.start or "untuned", space, problem), space.complete(found.schedule))


def _plain(start: str, space: SearchSpace, problem: Problem) -> Schedule:
    """Rung 0: the space's default schedule, or the kernel as one would first write it."""
    from tiledsched.bench.rivals import untuned
    from tiledsched.core.space import accuracy_class

    if start == "default":
        return space.default(problem, pinned=accuracy_class(space, "fp32"))
    return untuned(space, problem)
