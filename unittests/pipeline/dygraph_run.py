"""Inside a trainer: pipelines of every schedule beside one process of plain Paddle."""

from __future__ import annotations

from collections import Counter
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from paddle_group_sharded import LayerDesc, pipeline_parallel
from paddle_group_sharded.pipeline.action import Action, Kind, Plan
from paddle_group_sharded.pipeline.schedules import one_f_one_b, zb_h1
from unittests.pipeline.plain_pipeline import accumulate, distance, pair


def entries(dropout: float) -> list[Any]:
    return [
        LayerDesc(nn.Linear, 6, 10),
        F.relu,
        LayerDesc(nn.Dropout, dropout),
        LayerDesc(nn.Linear, 10, 9, bias_attr=False),
        LayerDesc(nn.LayerNorm, 9),
        lambda x: paddle.tanh(x) * 1.5,
        LayerDesc(nn.Linear, 9, 9),
        LayerDesc(nn.Dropout, dropout),
        LayerDesc(nn.PReLU),
        LayerDesc(nn.Linear, 9, 8),
        F.gelu,
        LayerDesc(nn.Linear, 8, 5),
    ]


def parity(world_size: int, runs: list[tuple[Any, int, int]], dropout: float, steps: int) -> dict[str, Any]:
    """Largest differences of losses and weights, and activations that were kept, by run.

    ``runs``: (schedule, chunks, micro-batches).
    """
    loss_fn = nn.CrossEntropyLoss()
    seen = {}
    for schedule, chunks, count in runs:
        name = f"{schedule} {chunks} {count}"
        if schedule == "file":
            plan = one_f_one_b(world_size, count)
            with open(f"plan{paddle.distributed.get_rank()}.txt", "w") as out:
                out.write(str(plan))
            schedule = out.name
        elif schedule == "plan":
            schedule = mixed_plan(world_size, count)
        plain, layer = pair(
            lambda: entries(dropout), num_stages=world_size, loss_fn=loss_fn, num_virtual_pipeline_stages=chunks
        )
        optimizer = paddle.optimizer.AdamW(0.01, parameters=plain.parameters(), weight_decay=0.1)
        model, ours = pipeline_parallel(
            layer,
            paddle.optimizer.AdamW(0.01, parameters=layer.parameters(), weight_decay=0.1),
            count,
            schedule,
        )
        losses = 0.0
        for step in range(steps):
            paddle.seed(100 + step)
            batch = [paddle.randn([11, 6]), paddle.randint(0, 5, [11])]
            expected = accumulate(plain, loss_fn, batch, count, seeds=(layer.base_seed, step, 0))
            optimizer.step()
            optimizer.clear_grad()
            found = model.train_batch(batch, ours)
            assert found.shape == [] and found.dtype == paddle.float32
            losses = max(losses, abs(float(found.item()) - expected))
        rank = layer.grid.stage
        planned = model.planned_timeline
        assert [span.action for span in planned.spans if span.rank == rank] == list(model.plan.actions[rank])
        measured = model.gather_timeline()
        assert Counter(span[:2] for span in measured.spans) == Counter(span[:2] for span in planned.spans)
        assert measured.num_ranks == world_size and 0 < measured.duration < 60
        seen[name] = {
            "losses": losses,
            "weights": distance(plain, model),
            "live": model._engine.runner.most_live,
            "planned": int(planned.peak_live(rank) * chunks),
        }
        seen["report"] = model.report()
        model.close()
    return seen


def mixed_plan(world_size: int, count: int) -> Plan:
    """All forwards, then a backward in two halves of the first micro-batch and whole ones of the others."""
    rows = []
    for row in zb_h1(world_size, count).actions:
        first = [action for action in row if action.kind is Kind.F or action.micro_batch == 0]
        rows.append(first + [Action(row[0].stage, Kind.B, number) for number in range(1, count)])
    return Plan.from_rows(rows)
