"""Find, prove, keep and serve the best schedule of a cuTile kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiledsched.core.arrays import Tolerance as Tolerance
    from tiledsched.core.config import configure as configure
    from tiledsched.core.cost import Cost as Cost
    from tiledsched.core.errors import TiledschedError as TiledschedError
    from tiledsched.core.fields import (
        array as array,
        arrays as arrays,
        choice as choice,
        copy as copy,
        dim as dim,
        dtype as dtype,
        flag as flag,
        inout as inout,
        knob as knob,
        out as out,
        outs as outs,
        scalar as scalar,
        sizes as sizes,
        workspace as workspace,
        zero as zero,
    )
    from tiledsched.core.kernel import Kernel as Kernel
    from tiledsched.core.problem import Problem as Problem
    from tiledsched.core.registry import load_kernel as load_kernel
    from tiledsched.core.schedule import Schedule as Schedule
    from tiledsched.core.similarity import Similarity as Similarity
    from tiledsched.core.space import SearchSpace as SearchSpace
    from tiledsched.core.space_files import load_space as load_space, space_for as space_for
    from tiledsched.kernels.attention.loads import load_by_distance as load_by_distance, load_tile as load_tile
    from tiledsched.kernels.attention.variants import flex_attention as flex_attention
    from tiledsched.kernels.cross_entropy.front import cross_entropy as cross_entropy
    from tiledsched.kernels.glu.front import geglu as geglu, swiglu as swiglu
    from tiledsched.kernels.grouped_matmul.front import grouped_matmul as grouped_matmul
    from tiledsched.kernels.layer_norm.front import layer_norm as layer_norm
    from tiledsched.kernels.matmul.front import matmul as matmul
    from tiledsched.kernels.rms_norm.front import rms_norm as rms_norm
    from tiledsched.kernels.rope.front import rope as rope
    from tiledsched.kernels.scaled_matmul.front import scaled_matmul as scaled_matmul
    from tiledsched.kernels.softmax.front import softmax as softmax
    from tiledsched.ops.block_masks import BlockMask as BlockMask, block_mask as block_mask
    from tiledsched.ops.flex import flex as flex
    from tiledsched.ops.sdpa import explain as explain, sdpa as sdpa
    from tiledsched.ops.varlen import sdpa_paged as sdpa_paged, sdpa_varlen as sdpa_varlen
    from tiledsched.remember.replacing import remember as remember
    from tiledsched.remember.search import exhaustive_search as exhaustive_search
    from tiledsched.serve.capture import capture as capture
    from tiledsched.serve.op import op as op
    from tiledsched.serve.process import batch_invariant as batch_invariant
    from tiledsched.serve.ranks import check_ranks as check_ranks
    from tiledsched.tuning.session import check as check, tune as tune

__version__ = "0.1.0"
_HOMES = {
    name: f"tiledsched.{module}"
    for module, names in {
        "core.arrays": "Tolerance",
        "core.config": "configure",
        "core.cost": "Cost",
        "core.errors": "TiledschedError",
        "core.fields": "array arrays choice copy dim dtype flag inout knob out outs scalar sizes workspace zero",
        "core.kernel": "Kernel",
        "core.problem": "Problem",
        "core.registry": "load_kernel",
        "core.schedule": "Schedule",
        "core.similarity": "Similarity",
        "core.space": "SearchSpace",
        "core.space_files": "load_space space_for",
        "kernels.attention.loads": "load_by_distance load_tile",
        "kernels.attention.variants": "flex_attention",
        "ops.block_masks": "BlockMask block_mask",
        "ops.flex": "flex",
        "ops.sdpa": "explain sdpa",
        "ops.varlen": "sdpa_paged sdpa_varlen",
        "remember.replacing": "remember",
        "remember.search": "exhaustive_search",
        "serve.capture": "capture",
        "serve.op": "op",
        "serve.process": "batch_invariant",
        "serve.ranks": "check_ranks",
        "tuning.session": "check tune",
    }.items()
    for name in names.split()
}
"""Public name -> the module that defines it. The functions of kernels that ship are public, too: `core.registry` finds them."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import tiledsched` costs next to nothing."""
    import importlib

    if name == "op" and _no_torch():
        return importlib.import_module("tiledsched.serve.later").LaterOperator
    if name not in _HOMES and (not name.startswith("_") or name == "__all__"):
        _HOMES.update(importlib.import_module("tiledsched.core.registry").shipped_functions())
    if name == "__all__":
        return ["__version__", *_HOMES]
    if name not in _HOMES:
        raise AttributeError(f"module 'tiledsched' has no attribute {name!r}")
    with importlib.import_module("tiledsched.core.extras").required():
        found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def _no_torch() -> bool:
    """Whether torch is not installed, or this process keeps it from being imported."""
    import importlib.util
    import sys

    try:
        return sys.modules.get("torch", 0) is None or importlib.util.find_spec("torch") is None
    except ImportError:
        return True


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
