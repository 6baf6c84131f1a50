"""One root exception, and the kinds of failure a candidate schedule can have.

An exception is for the person at the keyboard: its message says what was wrong and ends with what to do next. A
:class:`Failure` is data: a candidate that did not compile, launch or compute correctly becomes a row, never a crash.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class TiledschedError(Exception):
    """Root of every error this package raises on purpose."""

    exit_code = 2


class DeclarationError(TiledschedError, ValueError):
    """A kernel's declaration that is wrong; the message names the field and what is allowed."""


class ProblemError(TiledschedError, ValueError):
    """A problem its kernel cannot have (a negative length, an unknown dtype, ...)."""


class SpaceError(TiledschedError, ValueError):
    """A search-space file or a schedule that does not fit its space."""


class UnknownKnobError(KeyError):
    """A schedule was asked for a knob that it does not have."""

    def __str__(self) -> str:
        return str(self.args[0])


class ConfigError(TiledschedError, ValueError):
    """A wrong flag, environment variable or configuration file."""


class CompilerError(TiledschedError, RuntimeError):
    """The cuTile compiler is missing, mismatched or too old for the arch."""


class NoRoomError(CompilerError):
    """The disk that compilers write to was full. The message names the folder. The candidate itself did not fail."""


class MissingPackageError(TiledschedError, ImportError):
    """A package that is needed is not installed, or cannot be imported. The message ends with the command that installs it."""


class CompressedFileError(TiledschedError, RuntimeError):
    """A file is compressed and should not be. The message says how, and how to unpack it."""


class DatabaseError(TiledschedError, RuntimeError):
    """The tuning database cannot be opened, is newer than this program, or is damaged."""


class MeasureError(TiledschedError, RuntimeError):
    """Measuring cannot start or go on (no GPU of the arch, driver too old, worker cannot start)."""


class UnsupportedError(TiledschedError, ValueError):
    """The kernel of `sdpa` cannot serve the inputs, and the settings forbid to fall back on torch."""


class LaunchError(TiledschedError, RuntimeError):
    """A launch of `sdpa` failed, or cannot be made now; the message names the call."""


class RivalError(LaunchError):
    """A rival that was to be served refused its first call; our own kernel is served instead."""


class NoValidScheduleError(TiledschedError, RuntimeError):
    """Every candidate failed, or a space holds no valid schedule for a problem."""

    exit_code = 1


class FailureKind(str, Enum):
    """Why a candidate produced no usable measurement."""

    COMPILE_ERROR = "compile_error"
    COMPILE_TIMEOUT = "compile_timeout"
    COMPILER_KILLED = "compiler_killed"
    ARTIFACT_CORRUPT = "artifact_corrupt"
    LAUNCH_FAILURE = "launch_failure"
    ILLEGAL_ADDRESS = "illegal_address"
    HANG = "hang"
    OUT_OF_MEMORY = "out_of_memory"
    WORKER_KILLED = "worker_killed"
    GPU_LOST = "gpu_lost"
    DRIVER_MISMATCH = "driver_mismatch"
    WRONG_RESULT = "wrong_result"
    OTHER_NUMBERS = "other_numbers"
    """Right, and not bit for bit what was wanted: it says nothing against the program where any right numbers will do."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A candidate's failure, as stored."""

    kind: FailureKind
    """What went wrong, from a closed list."""
    message: str
    """One line for people: the compiler's or the driver's own words where there are any."""
