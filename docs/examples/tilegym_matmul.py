"""TileGym's matmul kernels, as its package has them, declared for tiledsched."""

from tilegym.ops.cutile import matmul as tilegym

import tiledsched as ts


class Matmul(ts.Kernel):
    """C = A @ B, row-major, by TileGym's plain kernel or by its persistent one."""

    m, n, k = ts.dim(), ts.dim(), ts.dim()
    dtype = ts.dtype("float16", "bfloat16")
    A, B, C = ts.array("m k"), ts.array("k n"), ts.out("m n")
    derived = {"M": lambda p: p.m, "N": lambda p: p.n, "K": lambda p: p.k}
    tiles = [128, 64, 256]
    knobs = {"persistent": [False, True], "TILE_SIZE_M": tiles, "TILE_SIZE_N": tiles, "TILE_SIZE_K": [64, 32, 128],
             "GROUP_SIZE_M": [8, 4], "LOAD_LATENCY": [-1, 4, 6], "num_ctas": [1, 2], "occupancy": [1, 2],
             "num_worker_warps": [0, 8]}  # fmt: skip
    exploring = {
        "persistent or (GROUP_SIZE_M == 8 and LOAD_LATENCY == -1)": "the plain kernel has neither",
        "TILE_SIZE_M * TILE_SIZE_N * occupancy <= 128 * 256 * num_ctas": "accumulators beyond the registers of an SM",
        "TILE_SIZE_K * (TILE_SIZE_M + TILE_SIZE_N) * 6 * occupancy <= shared_memory_bytes * num_ctas": "three stages fit",
    }
    suites = {"square": [dict(m=n, n=n, k=n) for n in (1024, 2048, 4096, 8192)]}

    def entry(p, s):
        return tilegym._static_persistent_matmul_kernel if s["persistent"] else tilegym._matmul_kernel

    def constants(p, s):
        return {"TRANSPOSE_A": False, "TRANSPOSE_B": False}

    def grid(p, s, device):
        tiles = -(-p.m // s["TILE_SIZE_M"]) * -(-p.n // s["TILE_SIZE_N"])
        return min(tiles, device.sm_count // s["num_ctas"] * s["occupancy"]) if s["persistent"] else tiles

    def reference(xp, A, B):
        return A @ B

    def flops(p):
        return 2 * p.m * p.n * p.k
