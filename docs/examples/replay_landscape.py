"""Race the first 32 programs of a recorded landscape again, without a GPU."""

from tiledsched.build.cubin import Artifact
from tiledsched.core.registry import kernel_named
from tiledsched.measure.replay import ReplayRunner
from tiledsched.measure.runner import Candidate
from tiledsched.store.exchange import read_table
from tiledsched.tuning.race import race

table = read_table("landscape.json.xz")
measurements = [stored.measurement for stored in table.measurements]
problem = measurements[0].problem
best = min(measurements, key=lambda one: one.median_us)
print(f"{problem}: {len(measurements)} programs, best {problem.tflops(best.median_us):.0f} TFLOP/s")

runner = ReplayRunner(kernel_named("attention"), measurements, seed=0)  # stands in for the GPU
runner.begin(problem)
facts = {artifact.fingerprint: artifact.facts for artifact in table.artifacts}
candidates = [
    Candidate(
        schedule=one.schedule,
        artifact=Artifact(arch="sm_90", fingerprint=one.fingerprint, facts=facts[one.fingerprint], cubin=b""),
    )
    for one in measurements[:32]
]
print("winner", race(runner, problem, candidates).winner.schedule.short())
