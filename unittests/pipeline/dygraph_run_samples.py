"""Inside a trainer: what micro-batches of unequal sizes weigh, in every form of labels, and data that ends."""

from __future__ import annotations

import functools
from typing import Any, Callable

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from paddle_group_sharded import LayerDesc, PipelineLayer, pipeline_parallel
from unittests.pipeline.layer_models import message_of
from unittests.pipeline.plain_pipeline import distance, pair

Tensor = Any
optim = paddle.optimizer


def entries() -> list[Any]:
    return [LayerDesc(nn.Linear, 6, 8), F.tanh, LayerDesc(nn.Linear, 8, 8), F.tanh, LayerDesc(nn.Linear, 8, 5)]


def weighted(output: Tensor, label: Any) -> Tensor:
    weights, y = label
    return ((output - y).square() * weights).mean()


def alone(output: Tensor, label: Any) -> Tensor:
    return output.square().mean()


def only_weights(output: Tensor, label: Any) -> Tensor:
    return (output.square() * label).mean()


def counting(world_size: int) -> dict[str, float]:
    """A batch of 10 in 4 is 3, 3, 2, 2: the mean over it is that of one process over the whole batch."""
    weights = paddle.to_tensor(np.array([1.0, 2.0, 0.5, 3.0, 1.5], "float32"))
    forms: dict[str, tuple[Callable[[Any, Any], Tensor], Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
        "no labels": (alone, lambda y: None, lambda y: None),
        "weights first": (weighted, lambda y: ([weights] * 4, y), lambda y: (weights, y)),
        "weights last": (
            lambda output, label: weighted(output, label[::-1]),
            lambda y: (y, [weights] * 4),
            lambda y: (y, weights),
        ),
        "weights only": (only_weights, lambda y: [weights] * 4, lambda y: weights),
    }
    seen = {}
    for name, (loss_fn, labels, whole) in forms.items():
        plain, layer = pair(entries, num_stages=world_size, loss_fn=loss_fn)
        reference = optim.SGD(0.5, parameters=plain.parameters())
        model, optimizer = pipeline_parallel(layer, optim.SGD(0.5, parameters=layer.parameters()), 4)
        worst = 0.0
        for step in range(3):
            rng = np.random.RandomState(step)
            x, y = (paddle.to_tensor(rng.randn(10, width).astype("float32")) for width in (6, 5))
            expected = loss_fn(plain(x), whole(y))
            expected.backward()
            evaluated = float(model.eval_batch([x, labels(y)], compute_loss=True).item())
            trained = float(model.train_batch([x, labels(y)], optimizer).item())
            worst = max(worst, *(abs(found - float(expected.item())) for found in (evaluated, trained)))
            reference.step()
            reference.clear_grad()
        seen[f"{name}, loss"], seen[f"{name}, weights"] = worst, distance(plain, model)
        if name == "no labels":  # fewer samples than micro-batches; micro-batches of an iterator
            small = [float(model.eval_batch([x[:3], None], compute_loss=True).item())]
            small.append(float(model.eval_batch(iter([(x[:2], None), (x[2:3], None)]), compute_loss=True).item()))
            expected_small = float(loss_fn(plain(x[:3]), None).item())
            seen["few"] = max(abs(found - expected_small) for found in small)
        model.close()
    return seen


def ending(world_size: int) -> list[str]:
    """Iterators of unequal lengths: the data has ended when no rank has enough, whatever is left on each."""
    layer = PipelineLayer(entries(), num_stages=world_size, loss_fn=nn.MSELoss())
    model, optimizer = pipeline_parallel(layer, optim.SGD(0.1, parameters=layer.parameters()), 4)
    x, y = paddle.ones([2, 6]), paddle.ones([2, 5])
    first = model.is_pipeline_first_stage()
    messages = []
    for lengths in ((6, 5), (5, 6), (6, 4), (6, 3)):
        stream = iter([(x, y)] * lengths[0 if first else 1])
        messages.append(message_of(lambda stream=stream: [model.train_batch(stream, optimizer) for _ in range(2)]))
    assert model.random_step == 3
    return messages


def plateau(num_stages: int) -> dict[str, Any]:
    """A scheduler that looks at the loss, beside a loop in plain Paddle; replicas have no common loss."""
    seen: dict[str, Any] = {"rates": [], "refused": "accepted"}
    for losses in (1, 2):
        plain, layer = pair(entries, num_stages=num_stages, loss_fn=[F.mse_loss, F.l1_loss][:losses])
        rates = [optim.lr.ReduceOnPlateau(0.5, factor=0.5, patience=0, threshold=0.05) for _ in range(2)]
        reference = optim.SGD(rates[0], parameters=plain.parameters())
        model, optimizer = pipeline_parallel(layer, optim.SGD(rates[1], parameters=layer.parameters()), 2)
        for step in range(6):
            rng = np.random.RandomState(step)
            x, y = (paddle.to_tensor(rng.randn(4, width).astype("float32")) for width in (6, 5))
            if layer.grid.num_replicas > 1:
                seen["refused"] = message_of(functools.partial(model.train_batch, [x, y], optimizer, rates[1]))
                return {**seen, "runs": model.random_step}
            loss = [F.mse_loss, F.l1_loss][losses - 1](plain(x), y)
            loss.backward()
            reference.step()
            reference.clear_grad()
            rates[0].step(float(loss.item()))
            model.train_batch(
                [x, y], optimizer, rates[1], loss_fn_idx=losses - 1, return_micro_batch_loss=step % 2 == 1
            )
            seen["rates"].append([rate() for rate in rates])
        seen[f"weights {losses}"] = distance(plain, model)
        model.close()
    return seen
