"""A machine for `tiledsched.remember` without a GPU and without a compiler: programs are told by their configuration and times are
made up, and everything that a real machine would do is counted."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tiledsched.build.cubin import Artifact
from tiledsched.build.toolchain import Toolchain
from tiledsched.core.device import ResourceFacts
from tiledsched.measure.runner import Conditions, Device
from tiledsched.remember.description import Request
from tiledsched.remember.machine import CallProgram, SearchMachine, run_time_numbers

H200 = Device(name="NVIDIA H200", arch="sm_90", sm_count=132, memory_bytes=1 << 37, l2_bytes=1 << 25, driver="580.1")
FACTS = ResourceFacts(
    registers=128, spill_bytes=0, threads=128, num_ctas=1, shared_bytes=1024, code_bytes=512, ctas_per_sm=2
)


def toolchain(tileiras: str = "13.5.37") -> Toolchain:
    return Toolchain(cuda_tile="1.7.0", tileiras=tileiras, ptxas=tileiras, nvvm=tileiras)


def time_of_text(program: CallProgram) -> float:
    """Microseconds that follow from a program's schedule: 50 to 150, the same in every process."""
    return 50 + int(hashlib.sha256(program.schedule.id.encode()).hexdigest()[:4], 16) % 100


class FakeMachine(SearchMachine):
    """A machine whose programs and times are made up.

    Args:
        time_us: a program's time, in microseconds; an exception that it raises is the launch's.
        code: what a program's machine code is made of; its schedule unless given. An exception is the compiler's.
        compute: what a launch does to its arguments.
        gpu: the GPU; None for none.
        compiler: version of the compiler.
        noise: the samples of a program are its time, plus up to so many microseconds.
    """

    def __init__(
        self,
        time_us: Callable[[CallProgram], float] = time_of_text,
        code: Callable[[CallProgram], object] = lambda program: program.schedule.id,
        compute: Callable[[CallProgram, tuple[Any, ...]], None] = lambda program, args: None,
        gpu: Device | None = H200,
        compiler: str = "13.5.37",
        noise: float = 0.0,
    ) -> None:
        self.time_us, self.code, self.compute, self.there, self.version = time_us, code, compute, gpu, compiler
        self.noise, self.done, self.graph = noise, Counter[str](), False
        self.others: tuple[int, ...] = ()
        self.compiled: list[Any] = []
        self.launched: list[Any] = []

    def gpu(self) -> tuple[str, str] | None:
        return (self.there.arch, self.there.name) if self.there else None

    def device(self) -> Device:
        return self.there

    def compiler(self) -> str:
        return self.version

    def toolchain(self) -> Toolchain:
        return toolchain(self.version)

    def capturing(self) -> bool:
        return self.graph

    @contextmanager
    def measuring(self, request: Request) -> Iterator[None]:
        self.done["measuring"] += 1
        yield

    def build(self, programs: Sequence[CallProgram], request: Request) -> None:
        for program in programs:
            self.done["compiles"] += 1
            self.compiled.append(program.config)
            program.numbers = run_time_numbers(program.kernel, request.args_fn(program.config))
            try:
                made = hashlib.sha256(repr(self.code(program)).encode()).hexdigest()[:24]
            except Exception as error:
                program.error = error
            else:
                program.artifact = Artifact(arch="sm_90", fingerprint=made, facts=FACTS, cubin=b"")

    def first_launch(self, program: CallProgram, request: Request) -> None:
        self.run(program, request.args_fn(program.config), request)

    def run(self, program: CallProgram, args: tuple[Any, ...], request: Request) -> None:
        self.done["launches"] += 1
        self.time_us(program)
        self.compute(program, args)

    def stopwatch(self, programs: Sequence[CallProgram], request: Request) -> FakeStopwatch:
        return FakeStopwatch(self, programs, request)

    def log(self) -> FakeLog:
        return FakeLog(self.others)

    def check_gpu(self, error: Exception) -> None:
        self.done["errors"] += 1


class FakeStopwatch:
    def __init__(self, machine: FakeMachine, programs: Sequence[CallProgram], request: Request) -> None:
        self._machine, self._programs, self._request = machine, programs, request

    def queue(self, index: int, *, paced: bool) -> int:
        machine, program = self._machine, self._programs[index]
        machine.run(program, self._request.args_fn(program.config), self._request)
        machine.launched.append(program.config)
        return index

    def read(self, queued: int) -> float:
        machine = self._machine
        return machine.time_us(self._programs[queued]) + machine.noise * (machine.done["launches"] * 7 % 10) / 10


class FakeLog:
    def __init__(self, others: tuple[int, ...]) -> None:
        self._others = others

    def poll(self) -> None:
        pass

    def summary(self) -> Conditions:
        return Conditions(sm_clock_mhz=1980, memory_clock_mhz=3201, concurrent_pids=self._others)
