"""Inside a trainer: options of training a pipeline, each beside one process of plain Paddle."""

from __future__ import annotations

import re
from typing import Any, Callable
from unittest import mock

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from paddle_group_sharded import LayerDesc, PipelineLayer, PipelineParallel, SharedLayerDesc, pipeline_parallel
from unittests.harness import fresh
from unittests.pipeline.plain_pipeline import accumulate, distance, pair
from unittests.sharding.dygraph_scaler import PlainScaler, amp_global_state, enabled_scaler

Tensor = Any
optim = paddle.optimizer


def batch_of(step: int, samples: int = 6, width: int = 6, classes: int = 5, replica: int = 0) -> list[Tensor]:
    rng = np.random.RandomState(1000 * replica + step)
    x = rng.randn(samples, width).astype("float32")
    return [paddle.to_tensor(x), paddle.to_tensor(rng.randint(0, classes, [samples]))]


def mlp(depth: int = 4, dropout: float = 0.0) -> list[Any]:
    entries: list[Any] = [LayerDesc(nn.Linear, 6, 8)]
    for _ in range(depth):
        entries += [F.tanh, LayerDesc(nn.Dropout, dropout), LayerDesc(nn.Linear, 8, 8), LayerDesc(nn.LayerNorm, 8)]
    return [*entries, LayerDesc(nn.Linear, 8, 5)]


LOSS = nn.CrossEntropyLoss()


# -------------------------------------------------------------------------------------------- clipping, tied weights


def tied(keys: int) -> list[Any]:
    """An embedding on the first and the last stage, with three and more stages on a middle one too."""

    def head(layer: nn.Layer, x: Tensor) -> Tensor:
        return paddle.matmul(x, layer.weight, transpose_y=True)

    def middle(layer: nn.Layer, x: Tensor) -> Tensor:
        return x + 0.1 * paddle.matmul(paddle.matmul(x, layer.weight, transpose_y=True), layer.weight)

    entries = [
        SharedLayerDesc("word", nn.Embedding, None, "weight", 11, 8),
        LayerDesc(nn.Linear, 8, 8),
        F.gelu,
        LayerDesc(nn.Linear, 8, 8),
        LayerDesc(nn.LayerNorm, 8),
        LayerDesc(nn.Linear, 8, 8),
        SharedLayerDesc("word", nn.Embedding, head, "weight", 11, 8),
    ]
    if keys > 2:
        entries.insert(3, SharedLayerDesc("word", nn.Embedding, middle, "weight", 11, 8))
    return entries


def clipping(world_size: int) -> dict[str, float]:
    """Every kind of clip, over tied weights that count once; norms well above and below the limit."""
    clips: dict[str, Callable[[], Any]] = {
        "global": lambda: nn.ClipGradByGlobalNorm(0.05),
        "global, not reached": lambda: nn.ClipGradByGlobalNorm(1e4),
        "norm": lambda: nn.ClipGradByNorm(0.02),
        "value": lambda: nn.ClipGradByValue(0.003),
    }
    seen = {}
    for name, clip in clips.items():
        plain, layer = pair(lambda: tied(world_size), num_stages=world_size, loss_fn=LOSS)
        for net in (plain, layer):
            for param in net.parameters():
                if param.name == "linear_1.b_0":
                    param.need_clip = False
                if param.name == "embedding_0.w_0" and name == "value":
                    param.stop_gradient = True
        # Plain SGD: the step is the clipped gradient, whose size Adam would hide.
        reference = optim.SGD(1.0, parameters=plain.parameters(), grad_clip=clip())
        model, optimizer = pipeline_parallel(
            layer, optim.SGD(1.0, parameters=layer.parameters(), grad_clip=clip()), 3, "zb_h1"
        )
        for step in range(4):
            rng = np.random.RandomState(step)
            batch = [paddle.to_tensor(rng.randint(0, 11, [6, 4])), paddle.to_tensor(rng.randint(0, 11, [6, 4]))]
            accumulate(plain, LOSS, batch, 3)
            reference.step()
            reference.clear_grad()
            model.train_batch(batch, optimizer)
        seen[name] = distance(plain, model)
        # A10: weights that are initialised again on one rank only come to be equal again by themselves.
        rank = layer.grid.stage
        with paddle.no_grad():
            if rank == 0:
                layer.shared.params("word")[0].set_value(paddle.full([11, 8], 0.25))
            plain.state_dict()["0.weight"].set_value(paddle.full([11, 8], 0.25))
        accumulate(plain, LOSS, batch, 3)
        reference.step()
        model.train_batch(batch, optimizer)
        seen[f"{name}, again"] = distance(plain, model)
        model.close()
    return seen


# ------------------------------------------------------------------------------------------------------ loss scaling


def scaling(world_size: int) -> dict[str, Any]:
    """A GradScaler whose scale rises and falls; only one stage sees the overflow of step 2."""

    def poisoned(stage: int, state: dict[str, int]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            x = x * 1.0
            if not x.stop_gradient and state["step"] == 2 and state["at"] == stage:
                x.register_hook(lambda grad: grad * float("inf"))
            return x

        return run

    def build(net: Any, scaler: type) -> tuple[Any, Any]:
        options = {"init_loss_scaling": 1024.0, "incr_every_n_steps": 2, "decr_every_n_nan_or_inf": 1}
        clip = nn.ClipGradByGlobalNorm(0.5)
        optimizer = optim.AdamW(0.01, parameters=net.parameters(), grad_clip=clip)
        return optimizer, enabled_scaler(scaler, **options)

    def entries(state: dict[str, int]) -> list[Any]:
        return [
            LayerDesc(nn.Linear, 6, 8),
            poisoned(0, state),
            F.tanh,
            LayerDesc(nn.Linear, 8, 8),
            poisoned(1, state),
            LayerDesc(nn.Linear, 8, 5),
        ]

    seen: dict[str, Any] = {"weights": 0.0, "scales": [], "skipped": []}
    for at, by_hand in ((0, False), (1, False), (1, True)):
        state = {"step": 0, "at": at}
        plain, layer = pair(lambda state=state: entries(state), num_stages=world_size, loss_fn=LOSS)
        reference, reference_scaler = build(plain, PlainScaler)
        ours, scaler = build(layer, PlainScaler if by_hand else paddle.amp.GradScaler)
        model, optimizer = pipeline_parallel(layer, ours, 2)
        for step in range(6):
            state["step"] = step
            batch = batch_of(step)
            with mock.patch.object(amp_global_state(), "amp_dtype", "float16"):  # as in auto_cast on an accelerator
                expected = accumulate(plain, LOSS, batch, 2, scale=reference_scaler.scale)
                if by_hand:
                    loss = float(model.forward_backward_pipeline(batch, scaler).item())
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.clear_grad()
                else:
                    loss = float(model.train_batch(batch, optimizer, scaler=scaler).item())
            reference_scaler.step(reference)
            reference_scaler.update()
            reference.clear_grad()
            assert abs(loss - expected) < 1e-6, (step, loss, expected)
            scales = [float(each._scale.reshape([]).item()) for each in (scaler, reference_scaler)]
            seen["scales"].append(scales)
        seen["weights"] = max(seen["weights"], distance(plain, model))
        seen["skipped"].append(optimizer.skipped_steps)
        if not by_hand:
            model.train_batch(batch_of(9), optimizer, scaler=paddle.amp.GradScaler(enable=False))
        model.close()
    return seen


# ----------------------------------------------------------------------------------------- recompute, modes, auto_cast


def random_things(x: Tensor) -> Tensor:
    """Randomness of NumPy and Python, which recompute has to repeat too."""
    import random

    return x * float(0.5 + np.random.rand()) + random.random()


def recomputing(world_size: int) -> dict[str, Any]:
    """N9, N10: dropout and all randomness equal with and without recompute, on a first stage of integers too."""

    def entries() -> list[Any]:
        return [
            LayerDesc(nn.Embedding, 7, 8),
            LayerDesc(nn.Dropout, 0.3),
            random_things,
            LayerDesc(nn.Linear, 8, 8),
            LayerDesc(nn.Dropout, 0.5),
            F.gelu,
            LayerDesc(nn.Linear, 8, 7),
        ]

    states, losses = [], []
    for interval, schedule in ((0, "1f1b"), (1, "1f1b"), (2, "1f1b"), (0, "zb_h1"), (3, "zb_h1")):
        fresh()
        layer = PipelineLayer(
            entries(), num_stages=world_size, loss_fn=LOSS, recompute_interval=interval, seed=4
        )
        model, optimizer = pipeline_parallel(layer, optim.AdamW(0.01, parameters=layer.parameters()), 3, schedule)
        outside = paddle.randn([2]), np.random.rand()
        found = []
        for step in range(3):
            rng = np.random.RandomState(step)
            batch = [paddle.to_tensor(rng.randint(0, 7, [6, 4])), paddle.to_tensor(rng.randint(0, 7, [6, 4]))]
            with paddle.amp.auto_cast(enable=step == 1, dtype="bfloat16"):
                found.append(float(model.train_batch(batch, optimizer).item()))
        losses.append(found)
        states.append({name: value.numpy() for name, value in model.state_dict().items()})
        states[-1]["draws after"] = np.array([*paddle.randn([2]).tolist(), np.random.rand()])
        states[-1]["draws before"] = np.array([*outside[0].tolist(), outside[1]])
        model.close()
    worst = max(float(np.abs(state[name] - states[0][name]).max()) for state in states for name in states[0])
    return {"weights": worst, "losses": losses}


def modes(world_size: int) -> dict[str, Any]:
    """BatchNorm in train and eval, evaluations between steps and before any, outputs, fewer micro-batches."""

    def entries() -> list[Any]:
        return [
            LayerDesc(nn.Linear, 6, 8),
            LayerDesc(nn.BatchNorm1D, 8),
            LayerDesc(nn.Dropout, 0.5),
            F.relu,
            LayerDesc(nn.Linear, 8, 8),
            LayerDesc(nn.BatchNorm1D, 8),
            LayerDesc(nn.Linear, 8, 5),
        ]

    plain, layer = pair(entries, num_stages=world_size, loss_fn=LOSS)
    reference = optim.Momentum(0.05, parameters=plain.parameters())
    params = layer.parameters()  # of three stages the middle one has none
    model, optimizer = pipeline_parallel(layer, optim.Momentum(0.05, parameters=params) if params else None, 2)
    is_last = model.is_pipeline_last_stage()
    worst = 0.0

    def evaluate(batch: list[Tensor]) -> None:
        nonlocal worst
        plain.eval()
        with paddle.no_grad():
            outputs = plain(batch[0])
        expected = float(LOSS(outputs, batch[1]).item())
        worst = max(worst, abs(float(model.eval_batch(batch, compute_loss=True).item()) - expected))
        found = model.eval_batch([batch[0], None])
        assert (found is not None) == is_last
        if is_last:
            assert all(part.stop_gradient for part in found)
            worst = max(worst, float((paddle.concat(found) - outputs).abs().max().item()))

    evaluate(batch_of(50, 5))
    for step in range(4):
        batch = batch_of(step, 5)
        expected = accumulate(plain, LOSS, batch, 2, seeds=(layer.base_seed, step, 0))
        reference.step()
        reference.clear_grad()
        worst = max(worst, abs(float(model.train_batch(batch, optimizer).item()) - expected))
        if step == 1:
            evaluate(batch_of(60, 1))
            evaluate(batch_of(61, 9))
    assert not any(param.grad is not None and param.grad.abs().max() > 0 for param in layer.parameters())
    seen = {"worst": worst, "weights": distance(plain, model), "runs": model.random_step}
    # A run that goes on from these weights, in another process as it might be, draws the same random numbers.
    fresh(9)
    again = PipelineLayer(entries(), num_stages=world_size, loss_fn=LOSS, seed=layer.base_seed)
    resumed, its_optimizer = pipeline_parallel(
        again, optim.SGD(0.1, parameters=again.parameters()) if params else None, 2, "gpipe"
    )
    assert resumed.set_state_dict(model.state_dict()) == ([], [])
    resumed.random_step = model.random_step
    batch = batch_of(7, 5)
    losses = [each.train_batch(batch, own).item() for each, own in ((model, optimizer), (resumed, its_optimizer))]
    assert losses[0] == losses[1]
    return seen


# ---------------------------------------------------------------------------------------------- forms of data, losses


class Carry(nn.Layer):
    """Works on ``x`` of a dict and carries everything else along."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        x = F.tanh(self.linear(value["x"])) * value["mask"].astype("float32").unsqueeze(-1)
        assert value["ids"].dtype == paddle.int32 and value["mask"].dtype == paddle.bool
        assert value["nothing"] is None and value["number"] == 2.5 and value["empty"].shape == [0, 3]
        assert value["still"].stop_gradient and value["scalar"].shape == []
        return {**value, "x": x, "twice": (x, [x]), "unused": x * 3}


class Start(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.aside = nn.Linear(6, 6)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> dict[str, Any]:
        ids, mask = inputs
        x = self.table(ids)
        return {
            "x": x,
            "ids": ids.astype("int32"),
            "mask": mask,
            "nothing": None,
            "number": 2.5,
            "empty": paddle.zeros([0, 3]),
            "still": x.detach(),
            "scalar": x.mean(),
            "skip": x,
            "aside": self.aside(x),  # never used: its weights get no gradient
        }


def finish(value: dict[str, Any]) -> Tensor:
    first, (second,) = value["twice"]
    scale = value["number"] + value["scalar"]
    return first + second * scale + value["skip"] + value["ids"].astype("float32").unsqueeze(-1) * 0.01


def boundaries(world_size: int) -> dict[str, Any]:
    """Everything that may cross a boundary; lengths that change; gradients that do not arise stay absent."""

    def entries() -> list[Any]:
        return [LayerDesc(Start), LayerDesc(Carry, 6), LayerDesc(Carry, 6), LayerDesc(Carry, 6), finish]

    seen = {}
    for schedule, chunks in (("1f1b", 1), ("zb_h1", 1), ("interleaved", 2)):
        if chunks * world_size > 5:
            continue
        plain, layer = pair(
            entries, num_stages=world_size, loss_fn=nn.MSELoss(), num_virtual_pipeline_stages=chunks
        )
        reference = optim.AdamW(0.01, parameters=plain.parameters(), weight_decay=0.3)
        model, optimizer = pipeline_parallel(
            layer, optim.AdamW(0.01, parameters=layer.parameters(), weight_decay=0.3), 3, schedule
        )
        for step in range(4):
            rng = np.random.RandomState(step)
            length = 2 + step  # another one at each step, and below at each micro-batch
            ids = paddle.to_tensor(rng.randint(0, 9, [7, length]))
            mask = paddle.to_tensor(rng.rand(7, length) > 0.3)
            batch = [(ids, mask), paddle.to_tensor(rng.randn(7, length, 6).astype("float32"))]
            accumulate(plain, nn.MSELoss(), batch, 3)
            reference.step()
            reference.clear_grad(set_to_zero=False)
            model.forward_backward_pipeline(batch)
            if layer.grid.stage == 0:
                assert layer.state_dict()[next(n for n in layer.state_dict() if "aside" in n)].grad is None
            optimizer.step()
            optimizer.clear_grad(set_to_zero=False)
        seen[schedule] = distance(plain, model)
        model.close()
    return seen


def data_forms(world_size: int) -> dict[str, Any]:
    """N1, N2, N13: the same batch in every form; iterators that end; micro-batches of several lengths."""
    plain, layer = pair(lambda: mlp(2), num_stages=world_size, loss_fn=LOSS)
    model, optimizer = pipeline_parallel(layer, optim.SGD(0.0, parameters=layer.parameters()), 3)
    first, last = model.is_pipeline_first_stage(), model.is_pipeline_last_stage()
    x, y = batch_of(0, 8)
    cuts = [(0, 3), (3, 6), (6, 8)]
    xs, ys = [x[a:b] for a, b in cuts], [y[a:b] for a, b in cuts]
    expected = accumulate(plain, LOSS, [x, y], 3)
    forms: dict[str, Any] = {
        "tensors": (x, y),
        "arrays": [x.numpy(), y.numpy()],
        "lists of micro-batches": [xs, ys],
        "iterator": zip(xs, ys),
        "function": lambda: iter([list(each) for each in zip(xs, ys)]),
        "only what is needed": [x if first else None, y if last else None] if first or last else None,
    }
    seen = {name: abs(float(model.train_batch(data, optimizer).item()) - expected) for name, data in forms.items()}
    shares = model.train_batch([x, y], optimizer, return_micro_batch_loss=True)
    assert shares.shape == [3]
    seen["shares"] = abs(float(shares.sum().item()) - expected)

    endless = ((each, label) for each, label in zip(xs + xs, ys + ys))
    first_loss = float(model.train_batch(endless, optimizer).item())
    second_loss = float(model.train_batch(endless, optimizer).item())
    assert first_loss == second_loss
    errors = [_message(lambda: model.train_batch(endless, optimizer))]
    errors.append(_message(lambda: model.train_batch(iter(zip(xs[:2], ys[:2])), optimizer)))
    given = 3 if first else 2
    errors.append(_message(lambda: model.train_batch(iter(zip(xs[:given], ys[:given])), optimizer)))
    errors.append(_message(lambda: model.train_batch({"x": x} if last else [x, y], optimizer)))
    errors.append(_message(lambda: model.train_batch([x[:2], y[:2]], optimizer)))
    errors.append(_message(lambda: model.train_batch([x, y], optimizer, loss_fn_idx=1)))
    model.accumulate_steps = 2 if first else 4
    errors.append(_message(lambda: model.train_batch([x, y], optimizer)))
    model.accumulate_steps = 4
    seen["another number"] = abs(float(model.train_batch([x, y], optimizer).item()) - expected)
    evaluated = float(model.eval_batch(zip(xs, ys), compute_loss=True).item())
    seen["evaluated"] = abs(evaluated - expected)
    return {"seen": seen, "errors": errors}


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def losses_and_schedulers(world_size: int) -> dict[str, Any]:
    """Several losses, one of them differentiated; a scheduler steps once a batch; fleet's wrappers and strategy."""
    from paddle.distributed import fleet

    def second(output: Tensor, label: Tensor) -> Tensor:
        return output.square().mean()

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": world_size}
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 3}
    hcg = None
    if world_size > 1 and not paddle.is_compiled_with_cuda():  # else fleet.init looks for NCCL
        fleet.init(is_collective=True, strategy=strategy)
        hcg = fleet.get_hybrid_communicate_group()
    plain, layer = pair(
        lambda: mlp(2), topology=None if hcg is None else hcg.topology(), num_stages=world_size, loss_fn=[LOSS, second]
    )
    decays = lambda name: name.endswith("w_0") and not name.startswith("linear_1")  # noqa: E731

    def build(net: Any) -> tuple[Any, Any]:
        scheduler = optim.lr.StepDecay(0.05, step_size=2, gamma=0.5)
        clip = nn.ClipGradByGlobalNorm(0.3)
        optimizer = optim.AdamW(
            scheduler, parameters=net.parameters(), weight_decay=0.5, apply_decay_param_fun=decays, grad_clip=clip
        )
        return optimizer, scheduler

    (reference, reference_rate), (ours, rate) = build(plain), build(layer)
    model = PipelineParallel(layer, hcg, strategy)
    wrapped = ours if hcg is None else fleet.distributed_optimizer(ours)
    worst = 0.0
    for step in range(6):
        batch = batch_of(step)
        index = step % 2
        expected = accumulate(plain, [LOSS, second][index], batch, 2)
        reference.step()
        reference.clear_grad()
        reference_rate.step()
        found = model.train_batch(batch, wrapped, lr_scheduler=rate, loss_fn_idx=index)
        assert len(found) == 2
        worst = max(worst, abs(float(found[index].item()) - expected))
        assert rate.get_lr() == reference_rate.get_lr()
    assert (model.num_stages, model.stage_id) == (world_size, layer.grid.stage)
    assert model.is_pipeline_first_stage() == (layer.grid.stage == 0)
    assert model.get_static_scheduler() == model.forward_backward_pipeline(None, static_scheduler=True)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in layer.named_parameters()]
    assert [id(param) for param in model.parameters()] == [id(param) for param in layer.parameters()]
    model.set_virtual_pipeline_rank(0)
    if world_size == 1:
        assert float((model(batch[0]) - plain(batch[0])).abs().max().item()) < 1e-5
    keys, known = ({re.sub(r"_\d+$", "", key) for key in each.state_dict()} for each in (ours, reference))
    assert keys <= known, keys - known
    return {"losses": worst, "weights": distance(plain, model), "steps": model.accumulate_steps}


# ------------------------------------------------------------------------------------- replicas, optimizers, odd stages


class Gated(nn.Layer):
    """Reaches one of its layers only where the first input is positive, so replicas may differ in what they reach."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if float(x[0, 0].item()) > 0 else y


def replicated(num_stages: int, schedule: str, chunks: int) -> dict[str, Any]:
    """Replicas train on batches of their own: gradients are averaged; what no replica reaches stays untouched."""

    def entries() -> list[Any]:
        return [
            LayerDesc(nn.Linear, 6, 8),
            LayerDesc(Gated),
            LayerDesc(nn.Dropout, 0.3),
            SharedLayerDesc("tied", nn.Linear, None, "weight", 8, 8),
            F.tanh,
            SharedLayerDesc("tied", nn.Linear, None, "weight", 8, 8),
            LayerDesc(Gated),
            LayerDesc(nn.Linear, 8, 5),
        ]

    plain, layer = pair(
        entries, num_stages=num_stages, loss_fn=LOSS, num_virtual_pipeline_stages=chunks, seg_method="uniform"
    )
    replicas = layer.grid.num_replicas
    clip = nn.ClipGradByGlobalNorm(0.4)
    reference = optim.AdamW(0.02, parameters=plain.parameters(), weight_decay=0.2, grad_clip=clip)
    model, optimizer = pipeline_parallel(
        layer, optim.AdamW(0.02, parameters=layer.parameters(), weight_decay=0.2, grad_clip=clip), 3, schedule
    )
    worst = 0.0
    for step in range(5):
        expected = [
            accumulate(
                plain,
                LOSS,
                batch_of(step, 7, replica=replica),
                3,
                seeds=(layer.base_seed, step, replica),
                replicas=replicas,
            )
            for replica in range(replicas)
        ]
        reference.step()
        reference.clear_grad(set_to_zero=False)
        found = float(model.train_batch(batch_of(step, 7, replica=layer.grid.replica), optimizer).item())
        optimizer.clear_grad(set_to_zero=False)
        worst = max(worst, abs(found - expected[layer.grid.replica]))
    return {"losses": worst, "weights": distance(plain, model), "replicas": replicas}


def optimizers(world_size: int) -> dict[str, float]:
    """Optimizers of every kind; a frozen weight; a stage without parameters, which begins with writing in place."""
    builders: dict[str, Callable[[Any], Any]] = {
        "Momentum": lambda params: optim.Momentum(0.05, parameters=params, use_nesterov=True),
        "Lamb": lambda params: optim.Lamb(0.01, parameters=params),
        "Adagrad": lambda params: optim.Adagrad(0.05, parameters=params),
        "RMSProp": lambda params: optim.RMSProp(0.01, parameters=params),
        "Adam": lambda params: optim.Adam(0.01, parameters=params, grad_clip=nn.ClipGradByNorm(0.1)),
    }

    def entries() -> list[Any]:
        return [LayerDesc(nn.Linear, 6, 8), F.tanh, LayerDesc(nn.Linear, 8, 5), F.relu_, F.tanh, lambda x: x * 2]

    seen = {}
    for name, build in builders.items():
        bounds = [0, 2, 3, 6][: world_size] + [6]  # from three stages on, the last one has no parameters
        plain, layer = pair(entries, num_stages=world_size, loss_fn=LOSS, seg_method=bounds)
        for net in (plain, layer):
            for param in net.parameters():
                param.stop_gradient = param.name == "linear_0.b_0"
        reference = build(plain.parameters())
        params = layer.parameters()
        has_some = bool(params) or name != "Momentum"  # of which Paddle makes none over an empty list
        model, optimizer = pipeline_parallel(layer, build(params) if has_some else None, 2, "zb_h1")
        scaler = enabled_scaler(paddle.amp.GradScaler, init_loss_scaling=1024.0)
        for step in range(6):
            batch = batch_of(step)
            accumulate(plain, LOSS, batch, 2)
            reference.step()
            reference.clear_grad()
            if step < 2:
                model.train_batch(batch, optimizer)
            elif step < 4:
                model.forward_backward_pipeline(batch)
                optimizer.step()
                optimizer.clear_grad()
            else:
                with mock.patch.object(amp_global_state(), "amp_dtype", "float16"):
                    model.train_batch(batch, optimizer, scaler=scaler)
        if has_some:
            assert optimizer.get_lr() == reference.get_lr() and bool(optimizer.state_dict()) >= bool(params)
        seen[name] = distance(plain, model)
        model.close()
    return seen
