"""The process that compiles programs for calls that do not wait: one at a time, until the process that started it ends it."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection

from tiledsched.build.compiler import export, says_nothing_of_program
from tiledsched.build.pool import start_process
from tiledsched.build.store import Claims, StoredProgram, read_program, write_program
from tiledsched.core.blame import first_line
from tiledsched.core.device import arch_spec
from tiledsched.core.registry import load_kernel
from tiledsched.serve.background import BuildRequest


def main(descriptor: str, folder: str, parent: str) -> None:
    """Say that this process is ready, and then compile what is asked for, until the other side closes.

    Args:
        descriptor: of the connection.
        folder: for temporary files.
        parent: id of the process that started this one. When that is gone this process ends, and with it its compiler.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when we end
    start_process(folder, int(parent))
    with Connection(int(descriptor)) as connection:
        try:
            connection.send((None, False))
            while True:
                _, request = connection.recv()
                connection.send((build(request), False))
        except (EOFError, ConnectionError):  # nobody is left to ask, or to be told
            return


def build(request: BuildRequest) -> StoredProgram | str:
    """The program of a request, from its file or compiled and kept there; or why it cannot be compiled by this process."""
    claims = Claims(request.path.parent)
    claims.claim(request.path, wait=True)
    try:
        program = read_program(request.path)
        if program is None:
            program = _compile(request)
            write_program(request.path, program)
        return program
    except Exception as error:  # whatever a compiler trips over must cost one program, not the process
        return first_line(error)
    finally:
        claims.close()


def _compile(request: BuildRequest) -> StoredProgram:
    import cuda.tile as ct
    from cuda.tile.compilation import CallingConvention, KernelSignature

    from tiledsched.core import launch as launches

    task = request.task
    if request.wide:
        vars(task.problem)["wide"] = True
    kernel = load_kernel(task.kernel)
    objects = launches.tile_kernels(kernel, {task.arch: task.schedule}, task.problem, arch_spec(task.arch))
    symbol = launches.symbol(kernel)
    signature = KernelSignature(request.parameters, CallingConvention.cutile_python_v2(), symbol=symbol)
    try:
        with ct.compiler_timeout(task.timeout_s):
            made = export([objects[request.place]], [signature], task.arch)
    except ct.TileError as error:
        if isinstance(error, ct.TileCompilerTimeoutError) or says_nothing_of_program(error):
            raise
        return StoredProgram(error=str(error).replace("\nUnknown location", "")[:2000])
    return StoredProgram(cubin=made.cubin, symbol=symbol)
