"""The commands that compare a kernel with other implementations, or a schedule with plainer ones: bench and study."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiledsched.cli.app import (
    FILE,
    FOLDER,
    CommaList,
    CommandGroup,
    Decorated,
    Integer,
    Invocation,
    Seconds,
    command,
    jobs_option,
    kernel_argument,
    made_folder,
    option,
    problem_options,
    target_option,
)
from tiledsched.cli.output import note
from tiledsched.cli.problems import named_problems
from tiledsched.cli.result_commands import LAUNCHED_REGIME
from tiledsched.cli.served_output import print_ablation, print_bench
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass, Problem

if TYPE_CHECKING:
    from tiledsched.studies.ablation.ladder import AblationRow

MOST_PROFILES = 8
"""Problems that one `study profile` takes: each method spends seconds under the profiler."""
methods_option = option(
    "--methods", type=CommaList(), metavar="M[,M]", help="the methods that take part (default: all that are installed)"
)
rounds_option = option(
    "--rounds",
    type=Integer(1),
    default=30,
    metavar="N",
    help="samples of a quick method; slow ones get fewer (default: 30)",
)
regime_option = option(
    "--regime", type=LAUNCHED_REGIME, default="burst", help="at full clocks, or at the power cap (default: burst)"
)
budget_option = option(
    "--budget",
    type=Seconds(),
    metavar="SECONDS",
    help="stop after this long, all problems together (default: no limit)",
)
summary_flag = option("--summary", is_flag=True, help="measure nothing: write the tables of what the folder holds")


def out_option(folder: str | None, text: str) -> Callable[[Decorated], Decorated]:
    """`-o`, with a folder as its default."""
    return option("-o", "--out", type=FOLDER, default=folder, metavar="DIR", help=text)


def only_attention(kernel: KernelClass, study: str, other: str) -> None:
    """Make sure that a study of attention is run for attention.

    Raises:
        ConfigError: it is run for another kernel; the message names the command for that.
    """
    if kernel.name != "attention":
        raise ConfigError(f"study {study} is about attention; for {kernel.name} use: tiledsched {other} {kernel.name}")


@command("bench")
@kernel_argument
@problem_options
@methods_option
@option("--ceiling", is_flag=True, help="also an 8192^3 matmul, and every rate over its rate")
@option(
    "--regime",
    type=click.Choice(["burst", "sustained", "both"]),
    default="burst",
    help="at full clocks, at the power cap, or both one after the other (default: burst)",
)
@rounds_option
@budget_option
@option(
    "--csv",
    type=FILE,
    metavar="FILE",
    help="also write the rows to this file; what it holds already is not measured again",
)
@option("--verify", is_flag=True, help="check that the machine code that runs is the one that was measured")
@option(
    "--summary",
    multiple=True,
    type=FILE,
    metavar="FILE",
    help="measure nothing: sum up the rows of this file. May be repeated",
)
def bench(
    run: Invocation,
    kernel: KernelClass,
    problem: tuple[str, ...],
    suite: str | None,
    methods: list[str] | None,
    ceiling: bool,
    regime: str,
    rounds: int,
    budget: float | None,
    csv: str | None,
    verify: bool,
    summary: tuple[str, ...],
) -> None:
    """Time a kernel and its rivals on this GPU, interleaved.

    Attention's rivals are torch's backends, the untuned kernel, Triton, and what is installed of TileGym, flash-attn and
    FlashAttention-4. Errors are measured against float64.

    \b
    tiledsched bench -p B=4,H=16,S=4096,D=64:128 --csv rows.csv
    tiledsched bench --summary rows.csv     # needs no GPU
    """
    from tiledsched.cli.bench_summary import summarise, to_markdown
    from tiledsched.ops.bench import bench_here
    from tiledsched.rivals.rows import read_rows

    if summary:
        summaries = summarise([row for path in summary for row in read_rows(Path(path))])
        run.print({"summary": summaries}, to_markdown(summaries))
        return
    rows = bench_here(
        kernel,
        named_problems(kernel, problem, suite),
        db=run.db,
        methods=methods,
        ceiling=ceiling,
        regime=regime,
        rounds=rounds,
        budget_s=budget,
        verify=verify,
        path=Path(csv) if csv else None,
        progress=note,
    )
    summaries = summarise(rows)
    run.print({"rows": [row.to_csv() for row in rows], "summary": summaries}, lambda: print_bench(rows))
    if not run.json:
        print(to_markdown(summaries))


@command("paper")
@kernel_argument
@out_option("paper", "folder, where a second run goes on (default: paper)")
@methods_option
@regime_option
@rounds_option
@budget_option
@jobs_option
@option("--no-tiles", is_flag=True, help="leave out the tiling sensitivity")
@summary_flag
def paper(
    run: Invocation,
    kernel: KernelClass,
    out: str,
    methods: list[str] | None,
    regime: str,
    rounds: int,
    budget: float | None,
    jobs: int | None,
    no_tiles: bool,
    summary: bool,
) -> None:
    """Repeat the TiledAttention paper's evaluation on this GPU.

    It times 80 problems of attention (S 512 to 8192, D 64 to 160, both 16-bit types, with and without a mask) against torch's
    backends, attention in torch operators and Triton, races the tile sizes, and writes tables 3 and 4 and figures 3 to 7 of
    Khan 2026 (arXiv 2603.01960), with a page that sums up.

    \b
    tiledsched study paper
    tiledsched study paper --summary      # only tables and figures, without a GPU
    """
    from tiledsched.studies.evaluation.run import run_evaluation, write_pages

    only_attention(kernel, "paper", "bench")
    folder = Path(out)
    if not summary:
        run_evaluation(
            kernel,
            folder,
            db=run.db,
            methods=methods,
            regime=regime,
            rounds=rounds,
            budget_s=budget,
            jobs=jobs,
            tiles=not no_tiles,
            progress=note,
        )
    files, known, left = write_pages(kernel, folder, regime)
    if left:
        note(f"{left} of {known + left} problems are left; run the same command again to go on")
    run.print({"files": files, "problems": known, "left": left}, "\n".join(map(str, files)))


@command("ladder")
@kernel_argument
@problem_options
@out_option("ladder", "folder, where a second run goes on (default: ladder)")
@regime_option
@rounds_option
@budget_option
@option(
    "--targets",
    is_flag=True,
    help="measure nothing: print the tiles and hints of each arch as Python, for ct.kernel(**HINTS)",
)
@summary_flag
def ladder(
    run: Invocation,
    kernel: KernelClass,
    problem: tuple[str, ...],
    suite: str | None,
    out: str,
    regime: str,
    rounds: int,
    budget: float | None,
    targets: bool,
    summary: bool,
) -> None:
    """Climb from a naive attention kernel to the tuned one.

    Each edit on the way is checked against float64 and measured, over sequence lengths, all in one interleaved run. The page
    says what each adds and gains, beside NVIDIA's published figures for problems of its cuTile playbook. by_target.py holds
    tiles and hints of each arch to paste beside a kernel of your own, each marked as measured or modelled.

    \b
    tiledsched study ladder
    tiledsched study ladder --targets     # only tiles and hints, without a GPU
    """
    from tiledsched.ops.bench import bench_here
    from tiledsched.rivals.rows import read_rows
    from tiledsched.serve.entries import load_table
    from tiledsched.studies.ladder.pages import write_ladder
    from tiledsched.studies.ladder.rungs import methods, plain_problem, usual
    from tiledsched.studies.ladder.targets import by_target

    only_attention(kernel, "ladder", "study ablation")
    problems = named_problems(kernel, problem, suite) if problem or suite else usual()
    table = load_table(run.settings(), kernel=kernel)
    hints = by_target(kernel, problems, table)
    if targets:
        run.print({"targets": hints}, hints.rstrip())
        return
    for each in problems:
        plain_problem(each)  # raises where the naive kernel cannot compute it
    path = Path(out) / "ladder.csv"
    if not summary:
        how: dict[str, Any] = {"regime": regime, "rounds": rounds, "budget_s": budget, "progress": note}
        bench_here(kernel, problems, path=path, methods=methods(), **how)
    elif not path.exists():
        raise ConfigError(f"{out} holds no ladder; leave out --summary to measure one")
    rows = [row for row in read_rows(path) if row.regime == regime]
    files = write_ladder(Path(out), rows, hints)
    run.print({"files": files, "rows": [row.to_csv() for row in rows]}, "\n".join(map(str, files)))


@command("ablation")
@kernel_argument
@problem_options
@target_option
@out_option(None, "also write a page, its Markdown and the rows, as ablation.csv, to this folder")
@option(
    "--replay",
    multiple=True,
    type=FILE,
    metavar="FILE",
    help="measure nothing: use this recorded landscape. May be repeated",
)
@option(
    "--start",
    type=click.Choice(["untuned", "default"]),
    help="the first rung: 64x64 tiles without hints, or the space's default (default: untuned; with --replay, default)",
)
@option(
    "--regime",
    type=LAUNCHED_REGIME,
    help="at full clocks, or at the power cap (default: burst; with --replay, the recorded one)",
)
@rounds_option
@jobs_option
def ablation(
    run: Invocation,
    kernel: KernelClass,
    problem: tuple[str, ...],
    suite: str | None,
    arch: str | None,
    out: str | None,
    replay: tuple[str, ...],
    start: str | None,
    regime: str | None,
    rounds: int,
    jobs: int | None,
) -> None:
    """Measure what each knob of the tuned schedule is worth.

    A ladder leads from the plain schedule to the tuned one, the largest gain first; then the tuned schedule is measured with
    each knob turned back.

    \b
    tiledsched study ablation -p B=4,H=16,S=4096,D=128
    tiledsched study ablation --arch sm_90 --replay landscape.json.xz
    """
    from tiledsched.studies.ablation.ladder import write_rows
    from tiledsched.studies.ablation.pages import write_ablation
    from tiledsched.studies.ablation.run import replay_ablation, run_ablation

    arch = run.arch(arch)
    if replay:
        ladders = replay_ablation(replay, arch, start=start or "default", rounds=rounds, progress=note)
    else:
        problems, session = named_problems(kernel, problem, suite), run.session(arch, jobs, regime=regime)
        ladders = run_ablation(session, kernel, problems, start=start or "untuned", rounds=rounds, progress=note)
    path = made_folder(out) / "ablation.csv" if out else None
    rows: list[AblationRow] = []
    for found in ladders:
        rows += found
        if path:  # after each problem, so that only the one under way is lost when the command is interrupted
            write_rows(rows, path)
        if not run.json:
            print_ablation(found)
    if path:
        write_ablation(path.parent, rows)
    if run.json:
        run.print({"rows": [row.to_csv() for row in rows]})


@command("profile")
@kernel_argument
@problem_options
@option(
    "--methods", type=CommaList(), metavar="M[,M]", help="methods of `bench` (default: the kernel and its first rival)"
)
@out_option(None, "also write a page, its Markdown and a CSV file for each problem to this folder")
@option("--ncu", type=FILE, metavar="FILE", help="Nsight Compute (default: on PATH, or where it installs itself)")
@option(
    "--sass",
    is_flag=True,
    help="compare instead the machine code of two schedules; this runs nothing, and needs no GPU",
)
@option(
    "--candidates",
    metavar="FILE",
    help="with --sass, the two schedules: a file or a JSON list, as `tune` takes it (default: the one that is served, and "
    "the runner-up of its race; of a single one, that and the one that is served)",
)
@option("--nvdisasm", type=FILE, metavar="FILE", help="with --sass, NVIDIA's disassembler (default: as for ncu)")
@target_option
def profile(
    run: Invocation,
    kernel: KernelClass,
    problem: tuple[str, ...],
    suite: str | None,
    methods: list[str] | None,
    out: str | None,
    ncu: str | None,
    sass: bool,
    candidates: str | None,
    nvdisasm: str | None,
    arch: str | None,
) -> None:
    """Compare methods' use of the GPU under Nsight Compute, or two schedules' machine code.

    It shows duration, throughput, occupancy, registers, spills, what warps wait for, and the bytes through L2 and DRAM beside
    the least possible.

    \b
    tiledsched study profile -p B=4,H=32,S=4096,D=128 -o profiles
    tiledsched study profile -p B=4,H=32,S=4096,D=128 --sass
    """
    from tiledsched.studies.profile import pages
    from tiledsched.studies.profile.run import find_ncu, profile as run_profile, profiled_methods, versions

    problems = named_problems(kernel, problem, suite)
    if len(problems) > MOST_PROFILES:
        raise ConfigError(f"that is {len(problems)} problems; name at most {MOST_PROFILES} with -p")
    if sass:
        compare_code(run, kernel, problems, run.arch(arch), candidates, nvdisasm, made_folder(out or "profiles"))
        return
    program = find_ncu(ncu)
    if run.db:
        os.environ["TILEDSCHED_DB"] = run.db  # the profiled process reads its own settings
    here = next(iter(run.devices()), None)
    conditions = {"device": here.name if here else "", "versions": versions(program, here.driver if here else "")}
    rows: list[dict[str, object]] = []
    for each in problems:
        found = run_profile(kernel, each, profiled_methods(kernel, each, methods), ncu=program, progress=note)
        rows += [{"problem": str(each), **conditions, **one.to_csv(each.min_bytes)} for one in found]
        if out:
            pages.write_profile(made_folder(out), each, found, **conditions)
        if not run.json:
            print(pages.to_text(each, found, **conditions))
    if run.json:
        run.print({"rows": rows})


def compare_code(
    run: Invocation,
    kernel: KernelClass,
    problems: Sequence[Problem],
    arch: str,
    candidates: str | None,
    nvdisasm: str | None,
    folder: Path,
) -> None:
    """Write the machine code of two schedules of each problem side by side.

    Raises:
        ConfigError: fewer or more than two schedules are meant.
        CompilerError: one does not compile.
    """
    from tiledsched.build.compiler import BuildTask
    from tiledsched.serve.entries import load_table
    from tiledsched.studies.profile import sass

    program, files = sass.find_nvdisasm(nvdisasm), list[Path]()
    table = load_table(run.settings(), kernel=kernel, archs={arch})
    with run.session(arch) as session:
        space = session.space(kernel, None, candidates)
        for each in problems:
            served = table.resolve(each, arch)
            others = space.candidates or (served.entry and served.entry.runner_up,)
            pair = [space.complete(one) for one in (served.schedule, *others) if one is not None][-2:]
            if len({*pair}) != 2 or len(space.candidates) > 2:
                raise ConfigError(f"{each}: two schedules are compared; name two others with --candidates")
            tasks = [BuildTask(kernel=kernel.locator(), schedule=one, problem=each, arch=arch) for one in pair]
            built = {done.task.schedule: done for done in session.pool.build(tasks)}
            files += sass.compare(folder, each, arch, session.toolchain.tileiras, [built[one] for one in pair], program)
    run.print({"files": files}, "\n".join(map(str, files)))


study = CommandGroup(
    "study",
    help="Larger studies of a kernel on this GPU: paper, ladder, ablation, profile.",
    sections={"Studies": [paper, ladder, ablation, profile]},
)
