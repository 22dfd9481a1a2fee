"""Inside a trainer: whole weights, gradients and states of a sharded model, read and written by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_group_sharded import group_sharded_parallel, unwrap
from paddle_group_sharded.paddle_compat import allocated_bytes, has_memory
from unittests.harness import fresh
from unittests.sharding.dygraph_optimizers import Factored
from unittests.sharding.optim_cases import Net, OptimCase
from unittests.sharding.parity import AVERAGED, LEVELS, Run, average_grads, to_array

Tensor = Any
optim = paddle.optimizer


def adam(net: nn.Layer) -> Any:
    return optim.AdamW(0.01, parameters=net.parameters())


def names_of(net: nn.Layer) -> dict[str, Tensor]:
    """Every name that a user may give, the second one of the tied weight too."""
    return {**dict(net.named_parameters()), "tied.weight": net.inner.weight}


def message_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


# -------------------------------------------------------------------------------------------------------- gradients


def grads(level: str) -> dict[str, Any]:
    """Views of gradients beside averaged ones of a plain model, and what setting them does to a step."""
    case = OptimCase(adam, reference=AVERAGED)
    plain, ours = Run(case, AVERAGED), Run(case, level)
    views = ours.optimizer.views
    seen: dict[str, Any] = {"before": views.grad("inner.weight"), "reading": 0.0, "grown": 0}
    for step in range(3):
        for run in (plain, ours):
            case.loss(run, case.batch(run.rank, step)).backward()
        average_grads(plain.layer)
        ours.optimizer._engine.finish_grads()
        before = allocated_bytes()
        for name, param in names_of(plain.layer).items():
            found = views.grad(name)
            by_param = views.grad(names_of(ours.layer)[name])
            assert (found is None) == (by_param is None) == (param.grad is None), name
            if found is not None:
                assert found.shape == param.grad.shape and (found == by_param).all()
                seen["reading"] = max(seen["reading"], float((found - param.grad).abs().max().item()))
        del found, by_param
        seen["grown"] = max(seen["grown"], allocated_bytes() - before)
        # The user replaces one gradient, gives one to a parameter that no rank reached, and scales what is there.
        value = np.random.RandomState(step).randn(8, 13)
        unused = paddle.full([3, 5], 0.25)
        kept = unused.clone()
        plain.layer.inner.weight.grad = paddle.to_tensor(value.astype("float32"))
        plain.layer.unused.weight.grad = unused.clone()
        views.set_grad("tied.weight", value)
        views.set_grad(ours.layer.unused.weight, unused)
        expected = paddle.nn.utils.clip_grad_norm_(plain.layer.parameters(), 0.5)
        norm = ours.optimizer.clip_grad_norm_(0.5)
        assert abs(float(expected) - norm) < 1e-4 and (unused == kept).all()
        for run in (plain, ours):
            run.optimizer.step()
            run.optimizer.clear_grad()
    pairs = zip(plain.model.state_dict().values(), ours.model.state_dict().values())
    seen["weights"] = max(float((a - b).abs().max().item()) for a, b in pairs)
    seen["errors"] = [
        message_of(lambda: views.grad("nowhere.weight")),
        message_of(lambda: views.grad(3)),
        message_of(lambda: views.set_grad("inner.weight", np.zeros([13, 8]))),
    ]
    return seen


# ----------------------------------------------------------------------------------------------------------- states


def states(level: str) -> dict[str, Any]:
    """Views of states beside those of a plain optimizer, for pieces, whole tensors and a user's own shapes."""
    result = {}
    builders = {
        "AdamW": adam,
        "SGD": lambda net: optim.SGD(0.01, parameters=net.parameters()),
        "Lamb": lambda net: optim.Lamb(0.01, parameters=net.parameters()),
        "Factored": lambda net: Factored(0.01, parameters=net.parameters()),
    }
    if hasattr(optim, "ASGD"):
        builders["ASGD"] = lambda net: optim.ASGD(0.01, batch_num=3, parameters=net.parameters())
    for name, build in builders.items():
        case = OptimCase(build, reference=AVERAGED)
        plain, ours = Run(case, AVERAGED), Run(case, level)
        views = ours.optimizer.views
        assert views.state_names("inner.weight") == []
        for step in range(4):
            for run in (plain, ours):
                case.train_step(run, case.batch(run.rank, step))
            for key, param in names_of(plain.layer).items():
                table = {kind: by for kind, by in plain.optimizer._accumulators.items() if param.name in by}
                assert sorted(views.state_names(key)) == sorted(table), (name, key)
                for kind, by_name in table.items():
                    expected, found = by_name[param.name], views.state(key, kind)
                    assert found.shape == expected.shape and found.dtype == expected.dtype, (name, key, kind)
                    distance = float((found - expected).abs().max().item())
                    assert distance <= (0.0 if run.world_size < 3 else 1e-6), (name, key, kind)
            if step == 1:  # the user doubles every state of one parameter but products of betas
                for by_name in plain.optimizer._accumulators.values():
                    own = by_name[plain.layer.out.weight.name]
                    paddle.assign(own * 2 if own.size > 1 else own, own)
                for kind in views.state_names("out.weight"):
                    value = views.state("out.weight", kind)
                    views.set_state("out.weight", kind, value * 2 if value.size > 1 else value)
        pairs = zip(plain.model.state_dict().values(), ours.model.state_dict().values())
        result[name] = max(float((a - b).abs().max().item()) for a, b in pairs)
    views = ours.optimizer.views
    result["errors"] = [
        message_of(lambda: views.state("unused.weight", "d")),
        message_of(lambda: views.state("out.weight", "moment7")),
        message_of(lambda: views.set_state("out.weight", next(iter(views.state_names("out.weight"))), np.zeros([2]))),
    ]
    return result


class Cast(nn.Layer):
    """16-bit weights that compute in float32; the one of float16 is on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        ones = nn.initializer.Constant(1.0)
        self.weight = self.create_parameter([8, 5], dtype="bfloat16", default_initializer=ones)
        self.single = self.create_parameter([1], dtype="bfloat16", default_initializer=ones)
        self.lonely = self.create_parameter([1], dtype="float16", default_initializer=ones)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.single.astype("float32") * self.lonely.astype("float32")
        return x @ self.weight.astype("float32") * factor


def masters(level: str) -> dict[str, Any]:
    """Views of float32 master weights.  F9: the master follows its weight, and the weight its master."""
    fresh()
    net = Cast()
    optimizer = optim.AdamW(0.01, parameters=net.parameters(), multi_precision=True, weight_decay=0.0)
    model, optimizer, _ = group_sharded_parallel(net, optimizer, level, offload=True)
    model(paddle.ones([4, 8])).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
    views = optimizer.views
    seen: dict[str, Any] = {
        "names": views.state_names("weight"),
        "keys": sorted(optimizer.state_dict()),
        "masters": {key: to_array(value) for key, value in optimizer.state_dict()["master_weights"].items()},
        "dtypes": sorted({str(value.dtype) for value in optimizer.state_dict()["master_weights"].values()}),
    }
    views.set_state("weight", "master_weight", np.full([8, 5], 2.001, "float32"))
    seen["weight"] = to_array(model.state_dict()["weight"])
    seen["master"] = to_array(views.state("weight", "master_weight"))
    model.set_state_dict({"single": paddle.full([1], 3.0).astype("bfloat16")})
    model(paddle.ones([4, 8])).mean().backward()
    optimizer.set_lr(0.0)
    optimizer.step()
    seen["single"] = to_array(views.state("single", "master_weight"))
    seen["still"] = to_array(views.state("weight", "master_weight"))
    return seen


# --------------------------------------------------------------------------------------------------------- gathered


def gathered(level: str) -> dict[str, Any]:
    """What ``gathered`` shows for every kind of argument, what it leaves behind, and what it writes back."""
    case = OptimCase(adam, reference=AVERAGED)
    run = Run(case, level)
    for step in range(2):
        case.train_step(run, case.batch(run.rank, step))
    model, net, optimizer = run.model, run.layer, run.optimizer
    whole = {name: to_array(value) for name, value in model.state_dict().items()}
    params = dict(net.named_parameters())
    kinds = {
        "model": (None, list(whole)),
        "layer": (net.out, ["out.weight", "out.bias"]),
        "tied layer": (net.tied, ["inner.weight"]),
        "parameter": (params["scale"], ["scale"]),
        "name": ("tied.weight", ["inner.weight"]),
        "list": ([net.norm, "frozen.weight", net.out.bias], ["norm.weight", "norm.bias", "frozen.weight", "out.bias"]),
    }
    before = allocated_bytes()
    seen: dict[str, Any] = {}
    for kind, (what, names) in kinds.items():
        with model.gathered(what) as shown:
            assert shown is net
            seen[kind] = all(np.array_equal(to_array(names_of(net)[name]), whole[name]) for name in names)
            seen[kind] &= bool((net.out.weight.numpy() == whole["out.weight"]).all())  # a read through the layer too
            inside = allocated_bytes()
        seen[f"{kind}, left"] = allocated_bytes() - before
    seen["inside"] = inside >= before
    # Nested, with an exception inside.
    try:
        with model.gathered(net.out), model.gathered():
            with model.gathered("out.weight"):
                pass
            seen["nested"] = has_memory(params["out.weight"]) and has_memory(params["inner.weight"])
            raise KeyError("inside")
    except KeyError as error:
        seen["exception"] = repr(error)
    seen["exception, left"] = allocated_bytes() - before
    # Without write_back changes are undone where parameters are sharded.
    if level == "p_g_os" and run.world_size > 1:
        for held in (False, True):  # a read outside any call keeps the group whole until the step
            if held:
                first = net.scale.numpy()
            with model.gathered():
                for param in net.parameters():
                    param.set_value(paddle.zeros_like(param))
                net.inner.weight.set_value(paddle.ones_like(net.inner.weight))
            if held:
                seen["undone though held"] = bool((params["scale"].numpy() == first).all())
            after = {name: to_array(value) for name, value in model.state_dict().items()}
            seen[f"undone, held {held}"] = all(np.array_equal(value, whole[name]) for name, value in after.items())
            del param, after  # the copies that were compared, and the last one that was written
            if not held:
                seen["undone, left"] = allocated_bytes() - before
        before = allocated_bytes()
    # With it, the values of rank 0 are everyone's, and training goes on from them.
    with model.gathered(["inner.weight", net.frozen], write_back=True):
        net.inner.weight.set_value(paddle.full([8, 13], 0.1 + run.rank))
        params["frozen.bias"].set_value(paddle.full([8], 7.0 + run.rank))
    seen["left"] = allocated_bytes() - before
    after = {name: to_array(value) for name, value in model.state_dict().items()}
    seen["written"] = bool((after["tied.weight"] == np.float32(0.1)).all() and (after["frozen.bias"] == 7.0).all())
    seen["changed"] = [name for name in whole if not np.array_equal(after[name], whole[name])]
    plain = Run(case, AVERAGED)
    plain.layer.set_state_dict({name: paddle.to_tensor(value) for name, value in after.items()})
    plain.optimizer.set_state_dict({key: value.clone() for key, value in optimizer.state_dict().items()})
    run.layer, run.model, run.optimizer = net, model, optimizer
    for step in range(3):
        losses = [case.train_step(each, case.batch(run.rank, step)) for each in (plain, run)]
        assert abs(losses[0] - losses[1]) <= 1e-6 * max(1.0, losses[0]), losses
    pairs = zip(plain.model.state_dict().values(), model.state_dict().values())
    seen["trained on"] = max(float((a - b).abs().max().item()) for a, b in pairs)
    # The whole model may be called inside, and what it leaves is trained on outside.
    del plain, pairs
    before = allocated_bytes()
    with model.gathered():
        loss = case.loss(run, case.batch(run.rank, 0))
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    del loss
    seen["called inside, left"] = allocated_bytes() - before
    seen["error"] = message_of(lambda: model.gathered("nowhere").__enter__())
    seen["levels"] = level in LEVELS
    return seen


__all__ = ["Net", "gathered", "grads", "masters", "states"]


def unwrapped_between_backward_and_step(level: str, parts: tuple[str, ...]) -> dict[str, float]:
    """The gradients that unwrap() leaves, and a step of the plain optimizer with them, beside hand-made averages."""
    world_size = dist.get_world_size()

    def passes(model: Any, rank: int) -> None:
        for _ in parts:
            x = paddle.to_tensor(np.random.RandomState(rank).randn(3, 4).astype("float32"))
            (model(x) ** 2).mean().backward()

    def made() -> tuple[Any, Any]:
        fresh(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        net.unused = net.create_parameter([3])
        return net, paddle.optimizer.Momentum(0.1, parameters=net.parameters())

    net, optimizer = made()
    for rank in range(world_size):
        passes(net, rank)
    for param in net.parameters():
        if param.grad is not None:
            param.grad = param.grad / world_size
    expected = [None if param.grad is None else param.grad.numpy() for param in net.parameters()]
    optimizer.step()
    layer, inner = made()
    model, sharded, _ = group_sharded_parallel(layer, inner, level)
    passes(model, dist.get_rank())
    layer, inner = unwrap(model, sharded)
    found = [None if param.grad is None else param.grad.numpy() for param in layer.parameters()]
    inner.step()
    return {
        "none alike": [each is None for each in found] == [each is None for each in expected],
        "grads": max(float(np.abs(a - b).max()) for a, b in zip(found, expected) if a is not None),
        "weights": max(
            float(np.abs(a.numpy() - b.numpy()).max()) for a, b in zip(layer.parameters(), net.parameters())
        ),
    }
