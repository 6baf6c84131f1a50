"""Kernels for vLLM, under the name `tiledsched` in its registries of implementations from outside.

vLLM finds :func:`plugin` by its entry point and calls it in each of its processes. It registers with two registries:

- vLLM IR (releases until 0.33; vLLM has announced its removal for 0.34) holds implementations of operations by name, in an order
  that the user gives: `--kernel-config '{"ir_op_priority": {"rms_norm": "tiledsched"}}'`. Until then nothing of ours is called. A
  call that is not ours goes to the next implementation of that order.
- `CustomOp.register_oot` replaces whole layers, without an order. It is used only where `VLLM_PLUGINS` names this plugin, and the
  layer's own code takes the calls that are not ours.

Not registered: linear layers in 8 bits, since `register_linear_kernel` puts a kernel behind all of vLLM's, where none is chosen;
rotary embeddings and attention, which vLLM calls with positions, pages and plans of its own.
"""

from __future__ import annotations

from torch import Tensor

from tiledsched.core.config import warn_once
from tiledsched.core.errors import ConfigError
from tiledsched.kernels.glu.front import swiglu
from tiledsched.kernels.rms_norm import front as norms
from tiledsched.ops.front import are_served

NAME = "tiledsched"


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """`x / sqrt(mean(x * x) + epsilon) * weight` over the last axis, with the signature that vLLM's operation has."""
    return norms.rms_norm(x, weight, epsilon)


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of `x + x_residual`, and this sum, with the signature that vLLM's operation has."""
    return norms.rms_norm(x, weight, epsilon, residual=x_residual)


def _takes_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and are_served(x, weight)


def _takes_added_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return variance_size is None and x.shape == x_residual.shape and are_served(x, x_residual, weight)


IMPLEMENTATIONS = {"rms_norm": (rms_norm, _takes_norm), "fused_add_rms_norm": (fused_add_rms_norm, _takes_added_norm)}
"""Operation of vLLM IR -> our implementation, and the function that says whether a call is ours. vLLM compares both signatures
with those of its own implementation."""


def register() -> dict[str, list[str]]:
    """Register our implementations with vLLM IR. Doing so twice changes nothing.

    Returns:
        Operation -> the implementations that serve it, first choice first; empty while vLLM has set no order, in which case its
        own, `native`, serves. `vllm.ir.ops.rms_norm.dispatch(x, weight, 1e-6).provider` names the one that serves a call.

    Raises:
        ConfigError: vLLM is missing, has no registry of this kind, or its operations have other signatures.
    """
    try:
        from vllm.ir.op import IrOp
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ConfigError(f"vLLM with vllm.ir is needed ({error}); install vllm 0.33") from error
    import vllm.ir.ops  # noqa: F401  which declares the operations

    supported = current_platform.is_cuda() and current_platform.has_device_capability(80)
    for name, (function, takes) in IMPLEMENTATIONS.items():
        try:
            if NAME not in IrOp.registry[name].impls:
                IrOp.registry[name].register_impl(NAME, supported=supported, supports_args=takes)(function)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this vLLM has no {name} of the signature known ({error}); install vllm 0.33") from error
    return {name: IrOp.registry[name].get_priority() for name in IMPLEMENTATIONS}


def register_layers() -> None:
    """Put our SwiGLU in the place of vLLM's layer `SiluAndMul`, which keeps the calls that are not ours. vLLM uses a layer's own
    code only where it is enabled: `--compilation-config '{"custom_ops": ["+silu_and_mul"]}'`. Doing so twice changes nothing.
    """
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.activation import SiluAndMul

    if SiluAndMul.__name__ in op_registry_oot:
        return

    class TiledschedSiluAndMul(SiluAndMul):
        def forward_cuda(self, x: Tensor) -> Tensor:
            return swiglu(x) if are_served(x) else super().forward_cuda(x)

    CustomOp.register_oot(TiledschedSiluAndMul, name=SiluAndMul.__name__)
    TiledschedSiluAndMul.name = SiluAndMul.name  # by which it is enabled, and which registering has changed


def plugin() -> None:
    """What vLLM calls in each process. What cannot be registered is a warning: vLLM runs without it."""
    import vllm.envs

    try:
        register()
    except ConfigError as error:
        warn_once(f"tiledsched registers no operation with vLLM: {error}")
    if NAME in (vllm.envs.VLLM_PLUGINS or ()):
        register_layers()
