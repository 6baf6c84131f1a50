"""cuTile kernels on the CPU, in NumPy: the unmodified kernel function, block after block, with every access checked."""

from tiledsched.interpreter.launch import run, run_outputs, run_problem
from tiledsched.interpreter.values import InterpreterError

__all__ = ["InterpreterError", "run", "run_outputs", "run_problem"]
