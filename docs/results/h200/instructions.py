"""Counts of instructions in the machine code of attention's sm_90 programs, as the installed compiler builds them.

`python docs/results/h200/instructions.py > FILE` needs `nvdisasm` on PATH (`pip install nvidia-cuda-nvdisasm`) and no GPU.
Each row is a schedule that was measured under tileiras 13.4.92; the counts are of the whole kernel (docs/results/compilers.md).
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

from tiledsched.core.config import load_settings
from tiledsched.core.problem_lists import problems_of
from tiledsched.core.registry import load_kernel
from tiledsched.serve.entries import load_entries
from tiledsched.tuning.session import Session

COUNTED = ("HGMMA.", "WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR", "MUFU.EX2", "BAR.SYNC")


def main() -> None:
    """Print the rows as CSV."""
    kernel, arch = load_kernel("attention"), "sm_90"
    suite = set(problems_of(kernel, "attention"))
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings({"db": f"{folder}/builds.db"})
        entries = [
            entry
            for entry in load_entries(settings, {arch}, kernel.name)
            if entry.compiler == "13.4.92" and entry.problem in suite
        ]
        out = csv.writer(sys.stdout, lineterminator="\n")
        out.writerow(["compiler", "problem", "schedule", "fingerprint", "registers", "spill_bytes", *COUNTED])
        with Session(arch, settings=settings) as session:
            builder = session.builder(kernel)
            builder.build_for_each((entry.schedule, entry.problem) for entry in entries)
            for entry in sorted(entries, key=lambda entry: entry.problem):
                record = builder.record(entry.schedule, entry.problem)
                artifact = session.artifacts.get(arch, record.fingerprint)
                file = Path(folder, "program.cubin")
                file.write_bytes(artifact.cubin)
                text = subprocess.run(["nvdisasm", "-c", str(file)], capture_output=True, text=True, check=True).stdout
                out.writerow(
                    [
                        session.toolchain.tileiras,
                        entry.problem,
                        entry.schedule.short(),
                        record.fingerprint,
                        record.facts.registers,
                        record.facts.spill_bytes,
                        *map(text.count, COUNTED),
                    ]
                )


if __name__ == "__main__":
    main()
