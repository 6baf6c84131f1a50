"""Real machine code for hosts of two architectures: softmax for sm_90, 4096 rows of 512, by tileiras 13.4.92 with either
`--host-arch`."""

from __future__ import annotations

import lzma
from pathlib import Path

from tiledsched.build.cubin import read_artifact
from tiledsched.build.host_code import host_section

ARCH, HOSTS = "sm_90", ("x86_64", "aarch64")
CUBINS = {
    host: lzma.decompress((Path(__file__).parent / "data" / f"softmax.{host}.cubin.xz").read_bytes()) for host in HOSTS
}
REFERENCE = host_section(CUBINS["x86_64"])
MADE = {"x86_64": read_artifact(CUBINS["x86_64"], ARCH), "aarch64": read_artifact(CUBINS["aarch64"], ARCH, REFERENCE)}
