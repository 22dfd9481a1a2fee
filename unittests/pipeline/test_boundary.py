"""What crosses a stage boundary, packed and unpacked in one process; rows N4, N5 and N6 of user reports."""

from __future__ import annotations

import collections
import pickle
import threading
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest

from paddle_group_sharded.errors import UsageError
from paddle_group_sharded.pipeline.boundary import pack, pack_grads, unpack, unpack_grads


class Pair(NamedTuple):
    left: Any
    right: Any


def trained(*shape: int, dtype: str = "float32") -> Any:
    tensor = paddle.ones(shape, dtype="float32").astype(dtype)
    tensor.stop_gradient = False
    return tensor


def crossed(value: Any) -> tuple[Any, list[Any]]:
    """``value`` as another process would get it, and the tensors that were sent."""
    structure, tensors = pack(value, "stage 0")
    copies = [tensor.detach().clone() if tensor.size else tensor.detach() for tensor in tensors]
    return unpack(pickle.loads(pickle.dumps(structure)), copies), tensors


def test_any_nesting_comes_back_as_it_was() -> None:
    value = (
        {"x": trained(2, 3), "more": [paddle.arange(3), None, 2.5], "empty": {}},
        Pair(paddle.to_tensor([True, False]), ("text", b"bytes", 7, True, 1j, slice(1, 2), range(3))),
        collections.OrderedDict(a=paddle.to_tensor(3.0), b=np.float32(0.5)),
        (),
    )
    found, tensors = crossed(value)
    assert len(tensors) == 4
    assert type(found) is tuple and type(found[1]) is Pair and type(found[2]) is collections.OrderedDict
    assert found[0]["x"].shape == [2, 3] and not found[0]["x"].stop_gradient and found[0]["x"].is_leaf
    assert found[0]["more"][0].tolist() == [0, 1, 2] and found[0]["more"][1:] == [None, 2.5]
    assert found[1].left.tolist() == [True, False] and found[1].right == value[1].right
    assert found[2]["a"].shape == [] and found[2]["b"] == np.float32(0.5) and found[3] == ()
    assert crossed(None) == (None, [])


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64"])
def test_integers_never_ask_for_gradients(dtype: str) -> None:
    """N4, N5: also where their ``stop_gradient`` says otherwise."""
    tensor = paddle.ones([2]).astype(dtype)
    tensor.stop_gradient = False
    found, _ = crossed(tensor)
    assert str(found.dtype) == f"paddle.{dtype}" and found.stop_gradient


@pytest.mark.parametrize("shape", [[], [0], [3, 0], [1]])
@pytest.mark.parametrize("stop", [True, False])
def test_stop_gradient_and_shape_are_kept(shape: list[int], stop: bool) -> None:
    tensor = paddle.ones(shape)
    tensor.stop_gradient = stop
    found, _ = crossed((tensor,))
    assert found[0].stop_gradient == stop and found[0].shape == shape


def test_a_tensor_at_two_places_crosses_once_and_is_one_again() -> None:
    tensor = trained(2)
    (left, (right,)), tensors = crossed((tensor, [tensor]))
    assert len(tensors) == 1 and left is right
    (left + 2 * right).sum().backward()
    assert left.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("value", [threading.Lock(), lambda x: x, {1, 2}, object])
def test_n6_refuses_what_it_does_not_know(value: Any) -> None:
    """N6: the error names the layer and the type."""
    with pytest.raises(UsageError) as caught:
        pack((paddle.ones([1]), {"key": value}), "stage 1 (layers 2 to 3)")
    kind = type(value)
    assert str(caught.value).startswith(
        f"stage 1 (layers 2 to 3) returned an object of type {kind.__module__}.{kind.__qualname__}, which cannot cross"
    )


def test_gradients_that_did_not_arise_stay_absent() -> None:
    grads = [None, paddle.ones([2]), None, paddle.zeros([0])]
    present, tensors = pack_grads(grads)
    assert present == (False, True, False, True) and len(tensors) == 2
    found = unpack_grads(present, tensors)
    assert found[0] is None and found[2] is None and found[1] is grads[1] and found[3] is grads[3]
    assert unpack_grads(*pack_grads([])) == []
