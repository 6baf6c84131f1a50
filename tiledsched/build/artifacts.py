"""Built machine code on disk, addressed by content: one compressed file per host architecture, arch and fingerprint."""

from __future__ import annotations

import errno
import lzma
import os
import re
from pathlib import Path

from tiledsched.build.cubin import Artifact, read_artifact
from tiledsched.build.host_code import host_arch, host_folder
from tiledsched.core.errors import CompilerError, ConfigError, DatabaseError
from tiledsched.core.files import read_bounded, unpacked, user_folder, write_whole

CACHE_VARIABLE = "TILEDSCHED_CACHE"


def default_cache_folder(chosen: str | None = None) -> Path:
    """The folder that the setting `cache` chose; else `$TILEDSCHED_CACHE`, or the user's cache directory."""
    return Path(chosen or os.environ.get(CACHE_VARIABLE) or user_folder("cache"))


class ArtifactStore:
    """A folder of stripped cubins. Safe for several processes: files appear whole or not at all, and never change.

    Args:
        folder: the cache folder; the user's unless given. Hosts of several architectures may share it.
        host: the architecture of the hosts that its machine code is for; this one's unless given.
    """

    def __init__(self, folder: Path | None = None, host: str | None = None) -> None:
        self.host_arch, self._cache = host or host_arch(), folder or default_cache_folder()
        self.folder = host_folder(self._cache / "artifacts", self.host_arch)

    def for_host(self, host: str) -> ArtifactStore:
        """The store of machine code for hosts of another architecture in the same cache folder."""
        return ArtifactStore(self._cache, host)

    def path(self, arch: str, fingerprint: str) -> Path:
        """Where an artifact lies, or would.

        Raises:
            DatabaseError: arch or fingerprint is none: made of another's data, it could point outside the folder.
        """
        if not (re.fullmatch(r"sm_\w+", arch, re.ASCII) and re.fullmatch(r"[0-9a-f]+", fingerprint)):
            raise DatabaseError(
                f"{arch!r} and {fingerprint!r} name no machine code: an arch is sm_ and a number, a "
                "fingerprint hex digits; import the table or database they come from again"
            )
        return self.folder / arch / fingerprint[:2] / f"{fingerprint}.cubin.xz"

    def ready(self) -> None:
        """Make the folder, so that an unusable folder is found before anything is built.

        Raises:
            ConfigError: it cannot be made or written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        if not os.access(self.folder, os.W_OK):
            raise self._unusable(PermissionError(errno.EACCES, os.strerror(errno.EACCES)))

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot keep machine code in {self.folder}: {error.strerror}; free some space there, or name another "
            f"folder with {CACHE_VARIABLE}"
        )

    def put(self, artifact: Artifact) -> None:
        """Keep `artifact`. Keeping one twice changes nothing.

        Raises:
            ConfigError: the folder cannot be written to, or is full.
        """
        path = self.path(artifact.arch, artifact.fingerprint)
        if os.path.isfile(path):
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lzma.compress(artifact.cubin, preset=6))
        except OSError as error:
            raise self._unusable(error) from error

    def has(self, arch: str, fingerprint: str) -> bool:
        """Whether the artifact is here."""
        return os.path.isfile(self.path(arch, fingerprint))

    def get(self, arch: str, fingerprint: str) -> Artifact | None:
        """The artifact, or None where it is not here or the file is damaged or for other hosts (then it is removed)."""
        path = self.path(arch, fingerprint)
        try:
            artifact: Artifact | None = read_artifact(unpacked(read_bounded(path)), arch)
        except OSError:
            return None
        except (lzma.LZMAError, CompilerError, EOFError):
            artifact = None
        if artifact is None or artifact.fingerprint != fingerprint or artifact.host_arch not in ("", self.host_arch):
            path.unlink(missing_ok=True)
            return None
        return artifact
