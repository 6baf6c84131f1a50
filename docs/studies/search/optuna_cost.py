"""Measures what Optuna itself costs a search: ``python -m docs.studies.search.optuna_cost``.

Asks and tells the schedules of a real space in order, so that no sampler's own work is in it.
"""

from __future__ import annotations

import time

from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.tuning.study import ScheduleStudy

TRIALS = 128


def main() -> None:
    """Print milliseconds of processor time for a trial, from ask to tell."""
    problem = Attention.standard(seq_len=4096, head_dim=128, causal=True)
    study = ScheduleStudy(
        space_for("sm_90", Attention).limited_to(
            each for each, _ in zip(space_for("sm_90", Attention).schedules(problem), range(2 * TRIALS), strict=False)
        ),
        problem,
        pinned={},
        sampler="exhaustive",
    )
    started = time.process_time()
    for schedule in study.ask(TRIALS):
        study.tell(schedule, 1.0)
    print(f"{1e3 * (time.process_time() - started) / TRIALS:.2f} ms a trial, with {len(study.study.best_params)} knobs")


if __name__ == "__main__":
    main()
