"""What operators make of unusual inputs: traced, on the CPU, empty, negated, or in a transform; and operators as objects."""

# Declarations are never instantiated, and their functions take no self.

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

import op_kernels as kernels
from serve_on_cpu import changed
from test_shapes import GroupSums, Scaled
from torch._subclasses import FakeTensorMode

import tiledsched as ts
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.serve.op import _unpickled

pytestmark = pytest.mark.usefixtures("fresh")

norm = ts.op("tiledsched_tests::inputs_norm", kernels.RmsNorm)
product = ts.op("tiledsched_tests::inputs_product", kernels.Product)
group_sums = ts.op("tiledsched_tests::inputs_group_sums", GroupSums)
scaled = ts.op("tiledsched_tests::inputs_scaled", Scaled, group=32)
add_groups = ts.op("tiledsched_tests::inputs_add_groups", kernels.AddGroups)
scale_ = ts.op("tiledsched_tests::inputs_scale_", kernels.Scale)


def tensor(*shape, dtype=torch.float16):
    return torch.zeros(shape, dtype=dtype)


WRONG = {
    "size": lambda: (norm, tensor(5, 100), tensor(7)),
    "type": lambda: (norm, tensor(5, 100), tensor(100, dtype=torch.bfloat16)),
    "type of all": lambda: (norm, tensor(5, 100, dtype=torch.float32), tensor(100, dtype=torch.float32)),
    "axes": lambda: (norm, tensor(100), tensor(100)),
    "optional": lambda: (norm, tensor(5, 100), tensor(100), tensor(4, 100)),
    "choice": lambda: (product, tensor(8, 16), tensor(16, 8), "int8"),
    "list": lambda: (add_groups, [tensor(5, dtype=torch.float32)], [tensor(6, dtype=torch.float32)], [5]),
    "sum": lambda: (group_sums, tensor(9, 20, dtype=torch.float32), tensor(0, dtype=torch.int32)),
    "required": lambda: (scaled, tensor(3, 40, dtype=torch.float32), tensor(3, 2, dtype=torch.float32)),
    "empty": lambda: (norm, tensor(0, 100), tensor(7)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_traced_call_is_refused_in_the_same_words(launches, name) -> None:
    operator, *given = WRONG[name]()
    with pytest.raises(ProblemError) as real:
        operator(*given)
    with FakeTensorMode() as mode, pytest.raises(ProblemError) as traced:
        operator(
            *(
                [mode.from_tensor(each) for each in one]
                if isinstance(one, list) and torch.is_tensor(one[0])
                else mode.from_tensor(one)
                if torch.is_tensor(one)
                else one
                for one in given
            )
        )
    assert str(traced.value) == str(real.value)
    assert not launches


def test_symbolic_sizes_are_compared_and_stay_symbolic(launches) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: norm(x, w), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 6, 9):
        x, w = torch.randn(rows, 64).half(), torch.randn(64).half()
        torch.testing.assert_close(compiled(x, w), norm(x, w))
    with pytest.raises(Exception, match=r"W, axis 0 \(columns\): must be"):
        compiled(tensor(5, 64), tensor(63))
    compiled = torch.compile(group_sums, fullgraph=True, dynamic=True, backend="aot_eager")
    for groups in (3, 4):
        offsets = torch.linspace(0, 9, groups + 1).int()
        x = torch.randn(9, 20)
        torch.testing.assert_close(compiled(x, offsets), group_sums(x, offsets))


@pytest.mark.parametrize("name", ["norm", "product", "in place", "sums"])
def test_operators_are_well_made_where_no_gpu_is(launches, monkeypatch, name) -> None:
    monkeypatch.setenv("TILEDSCHED_FALLBACK", "torch")
    operator, *given = {
        "norm": lambda: (norm, torch.randn(5, 64).half(), torch.randn(64).half()),
        "product": lambda: (product, torch.randn(8, 16).half(), torch.randn(16, 8).half()),
        "in place": lambda: (scale_, torch.randn(40)),
        "sums": lambda: (group_sums, torch.randn(9, 20), torch.tensor([0, 0, 4, 9]).int()),
    }[name]()
    wanted = [each.clone() for each in given]
    wanted = operator(*wanted) if name != "in place" else wanted[0] * 2
    with changed(device_type="cuda"):
        torch.library.opcheck(operator._overload, tuple(given), rtol=1e-2, atol=1e-2)
        found = operator(*given)
    torch.testing.assert_close(given[0] if name == "in place" else found, wanted, rtol=1e-2, atol=1e-2)


def test_operators_are_sent_and_copied_by_name() -> None:
    assert pickle.loads(pickle.dumps(norm)) is norm
    assert copy.deepcopy({"op": norm})["op"] is norm
    assert copy.copy(norm) is norm
    make, (_, *rest) = scaled.__reduce__()
    other = make("tiledsched_tests::inputs_scaled_elsewhere", *rest)
    assert make is _unpickled
    assert (other.kernel.name, other.schema.pinned) == (Scaled.name, {"group": 32})


class Largest(GroupSums):
    """The largest of each column, of which there is none in no rows."""

    Offsets = ts.array("groups", dtype="int32", below="rows")
    suites = {}

    def reference(xp, X, Offsets, groups):
        return xp.stack([X.max(0)] * groups)


def test_what_no_elements_have_is_refused(launches) -> None:
    largest = ts.op("tiledsched_tests::inputs_largest", Largest)
    with pytest.raises(
        UnsupportedError, match=r"inputs_largest: for rows=0 .* its reference raises ValueError: zero-size"
    ):
        largest(torch.zeros(0, 20), torch.zeros(3).int())
    assert group_sums(torch.zeros(0, 20), torch.zeros(4).int()).tolist() == [[0] * 20] * 3
    assert group_sums(torch.zeros(5, 0), torch.zeros(4).int()).shape == (3, 0)


def test_what_transforms_cannot_have_is_refused_in_a_sentence(launches) -> None:
    x, w = torch.randn(5, 64).half(), torch.randn(64).half()
    with pytest.raises(
        UnsupportedError, match=r"torch\.func takes no gradients of operators; use tensors that require"
    ):
        torch.func.grad(lambda x: norm(x, w).sum())(x)
    torch.testing.assert_close(torch.vmap(norm, in_dims=(0, None))(x[None], w)[0], norm(x, w))
    with pytest.raises(ProblemError, match="X is changed in place, and several of its elements lie in one place"):
        scale_(torch._neg_view(torch.ones(1).expand(40)))
    assert launches
