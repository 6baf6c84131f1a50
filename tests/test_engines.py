"""Ways into serving engines: what vLLM and FlashInfer ask of us is honoured, and calls that are not ours stay theirs.

Where an engine is installed, its own registries are used. Elsewhere stand-ins have the names and the signatures of vllm 0.33.0
(vllm/ir/op.py, vllm/model_executor/custom_op.py) and of flashinfer-python 0.7.4 (flashinfer/trace_apply/apply.py, norm, activation).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import runpy
import sys
from importlib import import_module, util
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tiledsched.core.errors import ConfigError
from tiledsched.core.files import read_toml

torch = pytest.importorskip("torch")
functional = torch.nn.functional
door, provider = (import_module(f"tiledsched.ops.integrations.{name}") for name in ("flashinfer", "vllm"))
SIGNATURES = {
    "vllm.ir.op:IrOp.register_impl": "self, provider, *, supported=True, supports_args=None, inplace=False",
    "vllm.ir.op:IrOp.get_priority": "self",
    "vllm.ir.op:IrOp.set_priority": "self, priority",
    "vllm.ir.op:IrOp.dispatch": "self, *args, **kwargs",
    "vllm.model_executor.custom_op:CustomOp.register_oot": "_decorated_op_cls=None, name=None",
    "vllm.model_executor.layers.activation:SiluAndMul.forward_cuda": "self, x",
    "flashinfer.trace_apply:enable_apply": "solutions=None",
    "flashinfer:rmsnorm": "input, weight, eps=1e-06, out=None, enable_pdl=None",
    "flashinfer:silu_and_mul": "input, out=None, enable_pdl=None",
}
"""What our code calls, and what it may be called with."""
Tensor = torch.Tensor


class IrOp:
    """An operation of vLLM IR and its implementations."""

    registry: dict = {}

    def __init__(self, native):
        self.native, self.order = native, []
        self.impls = {"native": SimpleNamespace(provider="native", impl_fn=native, supports_args=lambda *args: True)}

    def register_impl(self, provider, *, supported=True, supports_args=None, inplace=False):
        def decorate(function):
            schemas = [
                inspect.signature(each, eval_str=True).parameters for each in (function, supports_args, self.native)
            ]
            if provider in self.impls or schemas != schemas[-1:] * 3:
                raise ValueError(f"{provider} is there, or does not match native schema {schemas[-1]}")
            self.impls[provider] = SimpleNamespace(
                provider=provider, impl_fn=function, supported=supported, supports_args=supports_args
            )

        return decorate

    def get_priority(self):
        return [each.provider for each in self.order]

    @contextlib.contextmanager
    def set_priority(self, priority):
        self.order = [self.impls[each] for each in priority]
        yield

    def dispatch(self, *args, **kwargs):
        return next(each for each in self.order if each.supports_args(*args, **kwargs))


class CustomOp:
    """A layer of vLLM that can be replaced."""

    @classmethod
    def register_oot(cls, _decorated_op_cls=None, name=None):
        sys.modules["vllm.model_executor.custom_op"].op_registry_oot[name] = _decorated_op_cls
        _decorated_op_cls.name = name


class SiluAndMul(CustomOp):
    name = "silu_and_mul"

    def forward_cuda(self, x):
        return silu_and_mul(x)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    return (functional.rms_norm(x.float(), x.shape[-1:], eps=epsilon) * weight).to(x.dtype)


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    return rms_norm(x + x_residual, weight, epsilon), x + x_residual


def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    return rms_norm(input, weight, eps)


def silu_and_mul(input, out=None, enable_pdl=None):
    gate, up = input.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(input.dtype)


def enable_apply(solutions=None):
    """Trace Apply's, which finds the definition of a call by its widths."""
    for name, run in solutions.items():
        word = name.rpartition("_h")[0]
        names = {"rmsnorm": ("hidden_states", "weight"), "silu_and_mul": ("input",)}[word]
        wrapper = functools.wraps(globals()[word])(
            lambda *given, run=run, names=names: run(**dict(zip(names, given, strict=True)))
        )
        setattr(sys.modules["flashinfer"], word, wrapper)
    return len(solutions)


ENVIRONMENT = SimpleNamespace(VLLM_PLUGINS=None)
GPU = SimpleNamespace(is_cuda=lambda: True, has_device_capability=lambda least: least == 80)
STAND_INS = {
    "vllm": {"envs": ENVIRONMENT},
    "vllm.envs": {},
    "vllm.ir": {},
    "vllm.ir.op": {"IrOp": IrOp},
    "vllm.ir.ops": {},
    "vllm.platforms": {"current_platform": GPU},
    "vllm.model_executor.custom_op": {"CustomOp": CustomOp},
    "vllm.model_executor.layers.activation": {"SiluAndMul": SiluAndMul},
    "flashinfer": {"rmsnorm": rmsnorm, "silu_and_mul": silu_and_mul, "gelu_and_mul": 0, "gelu_tanh_and_mul": 0},
    "flashinfer.trace_apply": {"enable_apply": enable_apply, "disable_apply": lambda: None, "stats": dict},
}


def stand_in(monkeypatch, engine):
    """Modules of these names, as if they were installed, and operations without implementations."""
    for name in (each for each in STAND_INS if each.startswith(engine)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(STAND_INS[name], op_registry_oot={})
    monkeypatch.setattr(IrOp, "registry", {each.__name__: IrOp(each) for each in (rms_norm, fused_add_rms_norm)})


@pytest.fixture
def vllm(monkeypatch):
    if util.find_spec("vllm") is None:
        stand_in(monkeypatch, "vllm")
    return import_module("vllm.ir.op").IrOp.registry


@pytest.fixture
def flashinfer(monkeypatch):
    if util.find_spec("flashinfer") is None:
        stand_in(monkeypatch, "flashinfer")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield import_module("flashinfer")
    import_module("flashinfer.trace_apply").disable_apply()


def halves(*shape):
    return torch.randn(shape).half()


close = functools.partial(torch.testing.assert_close, rtol=2e-3, atol=4e-3)


@pytest.mark.parametrize("name", provider.IMPLEMENTATIONS)
def test_vllm_has_our_norms_and_gives_us_the_calls_that_are_ours(vllm, launches, name):
    provider.register()
    assert provider.register()[name] == []
    operation, x, weight = vllm[name], halves(5, 3, 64), halves(64)
    operation.impls["tiledsched"].supported = True  # there is no GPU
    given = [x, halves(5, 3, 64), weight] if name == "fused_add_rms_norm" else [x, weight]
    others = {
        "float32": [*[each.float() for each in given], 1e-3],
        "another type": [*given[:-1], weight.float(), 1e-3],
        "another device": [*[each.to("meta") for each in given], 1e-3],
        "no weight": [*given[:-1], None, 1e-3],
        "part of the width": [*given, 1e-3, 32],
    } | ({"another shape": [x, given[1][:1], weight, 1e-3]} if len(given) == 3 else {})
    with operation.set_priority(["tiledsched", "native"]):
        assert provider.register()[name] == ["tiledsched", "native"]
        assert {other: operation.dispatch(*each).provider for other, each in others.items()} == dict.fromkeys(
            others, "native"
        )
        close(operation.dispatch(*given, 1e-3).impl_fn(*given, 1e-3), operation.impls["native"].impl_fn(*given, 1e-3))
    assert len(launches) == 1


def test_vllm_replaces_a_layer_only_where_it_names_the_plugin(vllm, launches, monkeypatch):
    layers, theirs = (import_module(f"vllm.model_executor.{each}") for each in ("custom_op", "layers.activation"))
    provider.plugin()
    assert "SiluAndMul" not in layers.op_registry_oot
    monkeypatch.setattr("vllm.envs.VLLM_PLUGINS", ["tiledsched"], raising=False)
    provider.plugin()
    provider.plugin()
    ours = layers.op_registry_oot["SiluAndMul"]
    assert issubclass(ours, theirs.SiluAndMul)
    assert ours.name == "silu_and_mul"
    layer, x = object.__new__(ours), halves(4, 128)
    close(layer.forward_cuda(x), silu_and_mul(x))
    assert len(launches) == 1
    monkeypatch.setattr(theirs.SiluAndMul, "forward_cuda", lambda self, x: "theirs")  # that of vLLM needs a GPU
    assert layer.forward_cuda(x.float()) == "theirs"


def test_vllm_without_the_registry_or_with_other_operations_runs_without_us(monkeypatch, caplog):
    stand_in(monkeypatch, "vllm")
    IrOp.registry["rms_norm"] = IrOp(fused_add_rms_norm)
    with pytest.raises(ConfigError, match=r"no rms_norm of the signature known .*install vllm 0\.33"):
        provider.register()
    del IrOp.registry["rms_norm"]
    with pytest.raises(ConfigError, match="no rms_norm of the signature known"):
        provider.register()
    monkeypatch.delattr(sys.modules["vllm.ir.op"], "IrOp")
    provider.plugin()
    assert "registers no operation with vLLM: vLLM with vllm.ir is needed" in caplog.text


def test_vllm_finds_the_plugin():
    groups = read_toml(Path(__file__).parent.parent / "pyproject.toml")["project"]["entry-points"]
    assert EntryPoint("tiledsched", groups["vllm.general_plugins"]["tiledsched"], "").load() is provider.plugin


def test_flashinfer_calls_our_solutions(flashinfer, launches):
    x, weight, gate = halves(4, 64), halves(64), halves(4, 128)
    solutions = {name: door.solution(name, eps=0.5) for name in ("rmsnorm_h64", "silu_and_mul_h128")}
    assert import_module("flashinfer.trace_apply").enable_apply(solutions) >= 2
    close(flashinfer.rmsnorm(x, weight), rms_norm(x, weight, 0.5))
    close(flashinfer.silu_and_mul(gate), silu_and_mul(gate))
    assert len(launches) == 2


@pytest.mark.parametrize(("name", "kind"), [("gelu_and_mul", "none"), ("gelu_tanh_and_mul", "tanh")])
def test_each_gate_is_the_one_of_its_name(flashinfer, launches, name, kind):
    x = 2 * halves(4, 128)
    expected = functional.gelu(x[:, :64].double(), approximate=kind) * x[:, 64:]
    torch.testing.assert_close(door.solution(f"{name}_h128")(input=x).double(), expected, rtol=1e-3, atol=1e-4)


def test_what_is_not_ours_goes_on_to_flashinfer_and_is_said(flashinfer, monkeypatch, caplog):
    applied = functools.wraps(rms_norm)(lambda *given: pytest.fail("the solution calls itself"))
    monkeypatch.setattr(flashinfer, "rmsnorm", applied)
    x, weight = torch.randn(4, 64), torch.randn(64)
    found = door.solution("rmsnorm_h64", eps=0.25)(hidden_states=x, weight=weight)
    torch.testing.assert_close(found, rms_norm(x, weight, 0.25))
    assert "FlashInfer's own rmsnorm serves a call of rmsnorm_h64" in caplog.text


WRONG = {
    "fused_add_rmsnorm_h64": "no kernel for",
    "rmsnorm": "no kernel for",
    "rmsnorm_hx": "no kernel for",
    "rmsnorm_h64": "give eps",
}


@pytest.mark.parametrize("name", WRONG)
def test_definitions_that_cannot_be_answered_are_refused(flashinfer, name):
    with pytest.raises(ConfigError, match=WRONG[name]):
        door.solution(name)


def test_solutions_are_written_for_definitions_that_flashinfer_wrote(flashinfer, launches, tmp_path, capsys):
    with pytest.raises(ConfigError, match="FLASHINFER_TRACE_DUMP=1"):
        door.main([str(tmp_path)])
    for name in ("rmsnorm_h64", "gqa_ragged_h32", "fused_add_rmsnorm_h64"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, "axes": {}}))
    with pytest.raises(ConfigError, match="give eps"):
        door.main([str(tmp_path)])
    assert door.main([str(tmp_path), "--eps", "0.5"]) == door.main([str(tmp_path), "--eps", "0.5"]) == 0
    path = tmp_path / "solutions" / "tiledsched_rmsnorm_h64.json"
    assert set(capsys.readouterr().out.split()) == {str(path)}
    found = json.loads(path.read_text())
    assert (found["definition"], found["spec"]["language"]) == ("rmsnorm_h64", "python")
    file, function = found["spec"]["entry_point"].split("::")
    (tmp_path / file).write_text({each["path"]: each["content"] for each in found["sources"]}[file])
    x, weight = halves(4, 64), halves(64)
    close(runpy.run_path(str(tmp_path / file))[function](hidden_states=x, weight=weight), rms_norm(x, weight, 0.5))
    assert len(launches) == 1
    (tmp_path / "broken.json").write_text('["name"]')
    with pytest.raises(ConfigError, match=r"broken\.json is no definition"):
        door.write_solutions(tmp_path, 0.5)


@pytest.mark.parametrize("place", SIGNATURES)
def test_signatures_are_those_known(place, request):
    """Of the stand-ins, and of the engines where they are installed."""
    module, _, names = place.partition(":")
    request.getfixturevalue(module.partition(".")[0])
    found = inspect.signature(functools.reduce(getattr, names.split("."), import_module(module)))
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    assert str(inspect.Signature(plain)) == f"({SIGNATURES[place]})"
