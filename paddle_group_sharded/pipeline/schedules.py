"""Schedules: functions from (stages, micro-batches, chunks) to a :class:`~.action.Plan` of compute actions.

Each exists once, here, as data.  In all of them every stage takes the backwards of its micro-batches in the order 0,
1, 2..., so gradients are summed in the same order and the sums are equal to the last bit whatever the schedule.

In the formulas below ``p`` is ``num_stages``, ``m`` is ``num_micro_batches``, ``v`` is ``num_chunks``, and ``F``,
``I``, ``W``, ``B = I + W`` are the times of one micro-batch on one rank.  The *bubble* is the time in which the first
rank computes nothing.  In the grids a column is one unit of time, a whole backward takes two units, ``---`` continues
an action and ``.`` is a rank that waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Callable, Union

from ..errors import UsageError
from .action import Action, Kind, Plan, round_robin

__all__ = [
    "SCHEDULES",
    "Schedule",
    "forward_only",
    "gpipe",
    "interleaved",
    "make_plan",
    "one_f_one_b",
    "read_plan",
    "zb_h1",
]

Schedule = Callable[[int, int, int], Plan]  # (num_stages, num_micro_batches, num_chunks)


def forward_only(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> Plan:
    """All forwards and nothing else: the plan of an evaluation.

    >>> from paddle_group_sharded.pipeline.render import grid
    >>> print(grid(forward_only(3, 4)))
    rank 0 | 0F0 0F1 0F2 0F3  .   .
    rank 1 |  .  1F0 1F1 1F2 1F3  .
    rank 2 |  .   .  2F0 2F1 2F2 2F3
    """

    def row(rank: int) -> Iterator[Action]:
        for chunk in range(num_chunks):
            for batch in range(num_micro_batches):
                yield Action(chunk * num_stages + rank, Kind.F, batch)

    return _plan(num_stages, num_micro_batches, num_chunks, row)


def gpipe(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> Plan:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965).

    Bubble ``(p-1)(F+B)``; every rank keeps the activations of all ``m`` micro-batches.

    >>> from paddle_group_sharded.pipeline.render import grid
    >>> print(grid(gpipe(3, 4)))
    rank 0 | 0F0 0F1 0F2 0F3  .   .   .   .   .   .  0B0 --- 0B1 --- 0B2 --- 0B3 ---
    rank 1 |  .  1F0 1F1 1F2 1F3  .   .   .  1B0 --- 1B1 --- 1B2 --- 1B3 ---  .   .
    rank 2 |  .   .  2F0 2F1 2F2 2F3 2B0 --- 2B1 --- 2B2 --- 2B3 ---  .   .   .   .
    """
    forwards = forward_only(num_stages, num_micro_batches, num_chunks)

    def row(rank: int) -> Iterator[Action]:
        yield from forwards.actions[rank]
        for chunk in reversed(range(num_chunks)):
            for batch in range(num_micro_batches):
                yield Action(chunk * num_stages + rank, Kind.B, batch)

    return _plan(num_stages, num_micro_batches, num_chunks, row)


def one_f_one_b(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> Plan:
    """One forward, one backward: each rank starts backwards as soon as it can, and so keeps few activations.

    The schedule of arXiv 2104.04473, section 2.2.1.
    Bubble ``(p-1)(F+B)`` as for :func:`gpipe`; rank ``r`` keeps ``min(p-r, m)`` micro-batches.

    >>> from paddle_group_sharded.pipeline.render import grid
    >>> print(grid(one_f_one_b(3, 4)))
    rank 0 | 0F0 0F1 0F2  .   .   .   .  0B0 --- 0F3 0B1 ---  .  0B2 ---  .  0B3 ---
    rank 1 |  .  1F0 1F1  .   .  1B0 --- 1F2 1B1 --- 1F3 1B2 ---  .  1B3 ---  .   .
    rank 2 |  .   .  2F0 2B0 --- 2F1 2B1 --- 2F2 2B2 --- 2F3 2B3 ---  .   .   .   .
    """
    _one_chunk("1f1b", num_chunks)
    return interleaved(num_stages, num_micro_batches, 1)


def interleaved(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> Plan:
    """1F1B over ``v`` chunks per rank, which makes the bubble ``v`` times shorter and sends ``v`` times as much.

    After arXiv 2104.04473, section 2.2.2, for any number of micro-batches.
    Micro-batches pass the chunks in groups.  A group has at least ``p`` of them, so that its first one is back from
    the other ranks when the rank is through with the group; within this limit groups are as small and as equal as can
    be, the larger ones first, since the first group's size ``g`` decides how much is kept.  Any ``m`` will do.

    * Bubble ``(p-1)(F+B)/v`` for ``m >= p``.  With fewer micro-batches there is too little work to fill the ranks:
      the whole then takes ``(p + (m-1)/v) (F+B)``.
    * The first rank keeps ``min(m, ((v-1) g + 2p - 1) / v)`` micro-batches for ``v > 1``, which is ``p + (p-1)/v``
      when ``p`` divides ``m``.  With one chunk this is 1F1B.

    The grid is of 3 stages with 2 chunks, a backward drawn as long as a forward:

    >>> from paddle_group_sharded.pipeline.render import grid
    >>> from paddle_group_sharded.pipeline.simulate import Costs
    >>> print(grid(interleaved(3, 4, 2), Costs(weight_grad=0)))
    rank 0 | 0F0 0F1 0F2 0F3 3F0 3F1 3F2 3F3  .  3B0  .  3B1  .  3B2  .  3B3 0B0 0B1 0B2 0B3
    rank 1 |  .  1F0 1F1 1F2 1F3 4F0 4F1 4F2 4B0 4F3 4B1  .  4B2  .  4B3 1B0 1B1 1B2 1B3  .
    rank 2 |  .   .  2F0 2F1 2F2 2F3 5F0 5B0 5F1 5B1 5F2 5B2 5F3 5B3 2B0 2B1 2B2 2B3  .   .
    """
    _check_sizes(num_stages, num_micro_batches, num_chunks)
    groups = list(_groups(num_stages, num_micro_batches))
    forwards = [(chunk, batch) for group in groups for chunk in range(num_chunks) for batch in group]
    backwards = [(num_chunks - 1 - chunk, batch) for chunk, batch in forwards]

    def row(rank: int) -> Iterator[Action]:
        # Forwards that the rank runs ahead of its first backward.  With one chunk they cover the way to the last rank;
        # with several, the first group's pass through all chunks but the last, then the way there and back.
        ahead = num_stages - 1 - rank
        if num_chunks > 1:
            ahead = (num_chunks - 1) * len(groups[0]) + 2 * ahead
        for step in range(-ahead, len(forwards)):
            if 0 <= step + ahead < len(forwards):
                chunk, batch = forwards[step + ahead]
                yield Action(chunk * num_stages + rank, Kind.F, batch)
            if step >= 0:
                chunk, batch = backwards[step]
                yield Action(chunk * num_stages + rank, Kind.B, batch)

    return _plan(num_stages, num_micro_batches, num_chunks, row)


def zb_h1(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> Plan:
    """1F1B with the backward split: weight gradients, for which nobody waits, fill most of the bubble.

    The schedule H1 of "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241).  Rank ``r`` puts weight gradients off by
    ``r`` micro-batches, so that every rank keeps the activations of ``min(p, m)`` micro-batches, as 1F1B's first does.

    Bubble ``(p-1)(F+I-W)`` for ``W <= min(F, I)`` and ``m >= p``, a third of 1F1B's when ``F = I = W``.  With fewer
    micro-batches than stages the whole takes ``m (F+I) + (p-1)(F+I) + W``.

    >>> from paddle_group_sharded.pipeline.render import grid
    >>> print(grid(zb_h1(3, 4)))
    rank 0 | 0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 |  .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2 |  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    _one_chunk("zb_h1", num_chunks)

    whole = one_f_one_b(num_stages, num_micro_batches)

    def row(rank: int) -> Iterator[Action]:
        for action in whole.actions[rank]:
            if action.kind is Kind.F:
                yield action
            elif action.micro_batch is not None:
                yield action._replace(kind=Kind.I)
                if action.micro_batch >= rank:
                    yield Action(rank, Kind.W, action.micro_batch - rank)
        for batch in range(max(0, num_micro_batches - rank), num_micro_batches):
            yield Action(rank, Kind.W, batch)

    return _plan(num_stages, num_micro_batches, 1, row)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb_h1": zb_h1, "forward_only": forward_only}
)

# Other spellings in use, without regard to case, "-", "_" and blanks; "F-then-B" is of Paddle's schedule_mode.
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "fthenb": "gpipe",
        "vpp": "interleaved",
        "interleaved1f1b": "interleaved",
        "zbh1": "zb_h1",
        "forwardonly": "forward_only",
    }
)


def make_plan(
    schedule: Union[str, Path, Plan, Schedule, None], num_stages: int, num_micro_batches: int, num_chunks: int = 1
) -> Plan:
    """Find or make the plan that ``schedule`` means.

    ``schedule`` is a name of :data:`SCHEDULES` (or another spelling of one, such as Paddle's ``"F-then-B"``), a
    function of the same form, a ready :class:`~.action.Plan`, the path of a plan in a ``.txt`` or ``.csv`` file, or
    None for ``1f1b``, ``interleaved`` when there are several chunks.  A plan that was made elsewhere has to fit the
    sizes; :class:`UsageError` says both where it does not.
    """
    if schedule is None:
        schedule = "1f1b" if num_chunks == 1 else "interleaved"
    if isinstance(schedule, str) and not schedule.lower().endswith((".txt", ".csv")):
        schedule = _by_name(schedule)
    if isinstance(schedule, (str, Path)):
        plan = read_plan(schedule)
    elif isinstance(schedule, Plan):
        plan = schedule
    elif callable(schedule):
        plan = schedule(num_stages, num_micro_batches, num_chunks)
    else:
        raise UsageError(
            f"schedule is a name, a Plan, a path of one, or a function that makes one; got {type(schedule).__name__}"
        )
    sizes = (plan.num_ranks, plan.num_micro_batches, plan.num_virtual_stages)
    if sizes != (num_stages, num_micro_batches, num_stages * num_chunks):
        raise UsageError(
            f"the plan is for {sizes[0]} ranks, {sizes[1]} micro-batches and {sizes[2]} virtual stages, asked for are "
            f"{num_stages} stages with {num_chunks} chunks each and {num_micro_batches} micro-batches"
        )
    return plan


def read_plan(path: Union[str, Path]) -> Plan:
    """Read a plan from a file: CSV (``.csv``, one row per rank) or text (``rank 0: 0F0 0F1 ...``)."""
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    return Plan.from_csv(text) if path.suffix.lower() == ".csv" else Plan.parse(text)


def _by_name(name: str) -> Schedule:
    plain = "".join(c for c in name.lower() if c not in "-_ ")
    plain = _ALIASES.get(plain, plain)
    if plain not in SCHEDULES:
        raise UsageError(f"unknown schedule {name!r}; there are {', '.join(SCHEDULES)}, and files (.txt, .csv)")
    return SCHEDULES[plain]


def _check_sizes(num_stages: int, num_micro_batches: int, num_chunks: int) -> None:
    for what, count in (("stages", num_stages), ("micro-batches", num_micro_batches), ("chunks", num_chunks)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UsageError(f"the number of {what} is a whole number from 1 on; got {count!r}")


def _one_chunk(name: str, num_chunks: int) -> None:
    if num_chunks != 1:
        raise UsageError(f"{name} runs one chunk per rank, not {num_chunks}; use 'interleaved' or 'gpipe'")


def _plan(num_stages: int, num_micro_batches: int, num_chunks: int, row: Callable[[int], Iterator[Action]]) -> Plan:
    _check_sizes(num_stages, num_micro_batches, num_chunks)
    actions = tuple(tuple(row(rank)) for rank in range(num_stages))
    return Plan(actions, round_robin(num_stages, num_chunks), num_micro_batches)


def _groups(num_stages: int, num_micro_batches: int) -> Iterator[range]:
    """Cut the micro-batches into groups of at least ``num_stages``, as many and as equal as possible."""
    count = max(1, num_micro_batches // num_stages)
    size, larger = divmod(num_micro_batches, count)
    start = 0
    for index in range(count):
        stop = start + size + (index < larger)
        yield range(start, stop)
        start = stop
