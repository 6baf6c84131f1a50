"""Search a recorded landscape with Kernel Tuner: `tiledsched db export --landscapes DIR --format kernel-tuner-cache` wrote it.

The simulation may only ask for what was recorded. One restriction for the first two knobs, one for the first three, and so on,
spares it listing every combination. Tried with Kernel Tuner 1.5.0; `greedy_ils` and `diff_evo` may end with an error where too
few schedules were recorded.
"""

import json
from pathlib import Path

from kernel_tuner import tune_kernel

cache = json.loads(Path("NAME.cache.json").read_text())
names = cache["tune_params_keys"]
recorded = [tuple(entry[name] for name in names) for entry in cache["cache"].values()]
restrictions = [f"({', '.join(names[:n])}) in { {row[:n] for row in recorded} }" for n in range(2, len(names) + 1)]
tune_kernel(
    cache["kernel_name"],
    "__global__ void attention() {}",
    cache["problem_size"],
    [],
    cache["tune_params"],
    restrictions=restrictions,
    cache="NAME.cache.json",
    simulation_mode=True,
    lang="CUDA",
    strategy="genetic_algorithm",
    strategy_options={"max_fevals": 100},
)
