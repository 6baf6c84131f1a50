"""Two schedules' machine code side by side, as NVIDIA's disassembler writes it. Nothing is run, so that no GPU is needed."""

from __future__ import annotations

import difflib
import itertools
import re
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiledsched.build.compiler import Built
from tiledsched.build.cubin import Artifact, parts
from tiledsched.core.errors import CompilerError, ConfigError
from tiledsched.core.files import OwnFolder
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.text import NOTHING, code, plural, short
from tiledsched.report.document import Block, Heading, Paragraph, Table, write_document
from tiledsched.studies.profile.run import find_program

PLACES = ("/usr/local/cuda*/bin/nvdisasm", f"{sysconfig.get_path('purelib')}/nvidia/cu*/bin/nvdisasm")
MISSING = (
    "nvdisasm, NVIDIA's disassembler, is neither on PATH nor in its usual folders; run `pip install nvidia-cuda-nvdisasm`, or "
    "name it with --nvdisasm FILE"
)
TIMEOUT_S = 120
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
REGISTER = re.compile(r"\b(U?[RPB])\d+\b|`\(\.L_\w+\)")
AROUND = 3
"""Instructions that are shown before and after each difference."""
MOST_KINDS = 20
"""Kinds of instruction in the table of counts, at most; those whose counts differ most are taken."""


MOST_EXACT = 5000
"""Of longer listings the comparison leaves frequent instructions out of account, because it takes quadratic time."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The machine code of one schedule."""

    schedule: Schedule
    """The schedule."""
    artifact: Artifact
    """What it is compiled to."""
    instructions: tuple[str, ...]
    """Its instructions in the order in which they stand, those of several launches one after the other."""

    def kinds(self) -> Counter[str]:
        """How often each kind of instruction stands in it, such as HGMMA or LDS."""
        return Counter(
            re.sub(r"^@!?U?P\w+ ", "", each).split(maxsplit=1)[0].split(".")[0] for each in self.instructions
        )


def find_nvdisasm(named: str | None = None, places: Sequence[str] = PLACES) -> str:
    """The path of NVIDIA's disassembler.

    Raises:
        ConfigError: it is not there.
    """
    return find_program("nvdisasm", named, places, MISSING)


def disassemble(schedule: Schedule, artifact: Artifact, nvdisasm: str) -> Listing:
    """The machine code of a schedule.

    Raises:
        ConfigError: the disassembler fails, as one does that is older than the GPU.
    """
    lines: list[str] = []
    with OwnFolder() as folder:
        file = Path(folder) / "kernel.cubin"
        for cubin in parts(artifact.cubin):
            file.write_bytes(cubin)
            try:
                done = subprocess.run(
                    [nvdisasm, "--print-code", str(file)], capture_output=True, text=True, timeout=TIMEOUT_S
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise ConfigError(f"{nvdisasm} cannot be run: {error}; {MISSING}") from error
            found = INSTRUCTION.findall(done.stdout)
            if done.returncode or not found:
                why = (done.stderr.strip() or "it printed no instruction").splitlines()[-1][:200]
                raise ConfigError(f"{nvdisasm} failed: {why}; run `pip install -U nvidia-cuda-nvdisasm`")
            lines += found
    return Listing(schedule=schedule, artifact=artifact, instructions=tuple(" ".join(each.split()) for each in lines))


def differences(first: Listing, second: Listing) -> list[tuple[str, str, str]]:
    """The rows of the comparison: an instruction of each, and how they differ: in nothing, in registers, or altogether. A longer
    run of rows that do not differ altogether is cut to its ends, and one row says how many are left out.
    """
    rows: list[tuple[str, str, str]] = []
    for same, run in itertools.groupby(_aligned(first.instructions, second.instructions), lambda row: row[2] != "≠"):
        members = list(run)
        if same and len(members) > 2 * AROUND:
            left_out = len(members) - 2 * AROUND
            cut = f"… {left_out:,} instructions that agree but for registers"
            members[AROUND:-AROUND] = [(cut, cut, "")]
        rows += members
    return rows


def _aligned(first: Sequence[str], second: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Instructions side by side. Two stand in one row if they agree in all but the numbers of registers and labels."""
    one, other = ([REGISTER.sub(r"\1", each) for each in listing] for listing in (first, second))
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=max(len(one), len(other)) > MOST_EXACT)
    for kind, start, end, begin, last in matcher.get_opcodes():
        for left, right in itertools.zip_longest(first[start:end], second[begin:last], fillvalue=""):
            yield left, right, "≠" if kind != "equal" else "" if left == right else "registers"


def document(problem: Problem, arch: str, compiler: str, pair: Sequence[Listing]) -> list[Block]:
    """The two schedules, what each takes of the GPU, how often each kind of instruction stands in it, and the instructions."""
    first, second = pair
    names = ("first", "second")
    facts = [
        (title, *(f"{getattr(each.artifact.facts, name):,}" for each in pair))
        for title, name in (
            ("registers per thread", "registers"),
            ("bytes spilled per thread", "spill_bytes"),
            ("threads per block", "threads"),
            ("bytes of shared memory per block", "shared_bytes"),
            ("blocks per SM", "ctas_per_sm"),
            ("bytes of code", "code_bytes"),
        )
    ]
    counts = [each.kinds() for each in pair]
    kinds = sorted({*counts[0], *counts[1]}, key=lambda kind: (-abs(counts[0][kind] - counts[1][kind]), kind))
    changed = [kind for kind in kinds if counts[0][kind] != counts[1][kind]]
    rows = differences(first, second)
    apart = [sum(bool(row[side]) for row in rows if row[2] == "≠") for side in (0, 1)]
    knobs = [knob for knob in first.schedule if first.schedule[knob] != second.schedule.get(knob)]
    if first.artifact.fingerprint == second.artifact.fingerprint:
        said = "Both schedules compile to the same machine code."
    else:
        most = ", ".join(f"{code(kind)} {counts[0][kind]:,} and {counts[1][kind]:,}" for kind in changed[:5])
        said = (
            f"The first has {len(first.instructions):,} instructions and the second {len(second.instructions):,}; "
            f"{apart[0]:,} of the first and {apart[1]:,} of the second have no counterpart that agrees in all but registers."
            + (f" The counts that differ most: {most}." if most else "")
        )
    return [
        Heading(text=f"Machine code of two schedules: {problem.kernel} {problem}", level=1),
        Paragraph(text=f"Compiled for {arch} by tileiras {compiler}; nothing was run.", warning=True),
        Paragraph(text=said, answer=True),
        Table(
            head=("", *names),
            rows=[
                ("schedule", *(short(each.schedule) for each in pair)),
                *((code(knob), *(str(each.schedule.get(knob, NOTHING)) for each in pair)) for knob in knobs),
                *facts,
            ],
        ),
        Heading(text="How often each kind of instruction stands in them", folded=True),
        Table(
            head=("instruction", *names),
            rows=[(code(kind), *(f"{count[kind]:,}" for count in counts)) for kind in kinds[:MOST_KINDS]],
        ),
        Heading(text=f"The instructions, side by side ({plural(len(rows), 'row')})"),
        Table(head=(*names, "differ"), rows=[(_cell(left), _cell(right), how) for left, right, how in rows]),
    ]


def _cell(text: str) -> str:
    return text if text.startswith("…") or not text else code(text.replace("`", ""))


def compare(
    folder: Path, problem: Problem, arch: str, compiler: str, pair: Sequence[Built], nvdisasm: str
) -> list[Path]:
    """Write sass_ID.html and .md of two schedules, ID being the problem's, and the whole listing of each; returns the files.

    Raises:
        CompilerError: one did not compile.
        ConfigError: the disassembler fails.
    """
    name, listings = f"sass_{problem.id}", list[Listing]()
    for each in pair:
        if each.artifact is None:
            why = each.failure.message if each.failure else ""
            raise CompilerError(f"{each.task.schedule.short()} does not compile: {why}; name another with --candidates")
        listings.append(disassemble(each.task.schedule, each.artifact, nvdisasm))
    return write_document(
        folder,
        document(problem, arch, compiler, listings),
        title=f"Machine code of {problem.kernel} {problem}",
        markdown=f"{name}.md",
        page=f"{name}.html",
        more={f"{name}_{one.schedule.id}.sass": "\n".join((*one.instructions, "")) for one in listings},
    )
