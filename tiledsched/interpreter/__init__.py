"""cuTile kernels on the CPU, in NumPy: the unmodified kernel function, block after block, with every access checked."""

from tiledsched.interpreter.launch import SmallDevice, evaluate, run, run_schedule
from tiledsched.interpreter.programs import launches_on_cpu
from tiledsched.interpreter.values import InterpreterError, UnsupportedOperationError

__all__ = [
    "InterpreterError",
    "SmallDevice",
    "UnsupportedOperationError",
    "evaluate",
    "launches_on_cpu",
    "run",
    "run_schedule",
]
