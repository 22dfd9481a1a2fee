"""Weights that several layers share, kept equal on all stages that hold one of them.

Words: the *owners* of a key are the layers that were described with it; the first one in the list is the *first
owner*.  Owners on one rank hold the same parameter; owners on several ranks hold copies, which the ranks of the key
keep equal: same values to begin with, summed gradients before each step, and the same options for the optimizer.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import paddle

from ..comm import Comm, create_comm
from ..comm.agreement import agree
from ..errors import UsageError
from ..paddle_compat import drop_grad, grad_of, host_view, is_sparse
from .desc import is_shared_desc
from .grid import Grid, Ranks
from .segment import Segmentation
from .tying import Held, Report, check_attr_counts, check_shapes, tie

__all__ = ["SharedWeights"]

Layer = Any
Tensor = Any


class _Key(NamedTuple):
    """The shared weights of one key, as far as this rank holds them."""

    name: str
    params: tuple[Tensor, ...]  # one per shared attribute
    names: Mapping[str, int]  # as :class:`Held` has them, of every owner anywhere
    comm: Optional[Comm]  # over the owners' ranks; None where one rank has them all
    first: int  # rank of the first owner in comm

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first owner."""
        return self.comm is None or self.comm.rank == self.first


class SharedWeights:
    """The shared weights of this rank's layers, one entry per key in the order of the list."""

    def __init__(
        self, entries: Sequence[Any], segmentation: Segmentation, grid: Grid, layers: Mapping[int, Layer], comm: Comm
    ) -> None:
        """Tie what stands on this rank and take over the first owner's values and options.

        ``layers``: all layers of this rank by their number in the list; ``comm``: over all ranks of the launch, over
        which this is collective.  Raises :class:`UsageError` on every rank for owners that do not go together.
        """
        owners: dict[str, list[int]] = {}
        for index, entry in enumerate(entries):
            if is_shared_desc(entry):
                owners.setdefault(entry.layer_name, []).append(index)
        held: dict[str, Held] = {}
        problem: Optional[UsageError] = None
        try:
            for key, indices in owners.items():
                check_attr_counts(key, indices, entries)
                held[key] = tie(key, {index: layers[index] for index in indices if index in layers}, entries)
        except UsageError as error:
            problem = error
        agree((comm,), "tie shared weights", problem)
        reports = comm.exchange({key: mine.report() for key, mine in held.items() if mine.params}, "shared weights")
        for key in owners:
            check_shapes(key, reports)

        comms: dict[tuple[int, ...], Comm] = {}
        self._keys: list[_Key] = []
        for key, indices in owners.items():
            ranks = [grid.pipeline_ranks[segmentation.rank_of_layer(index)] for index in indices]
            if grid.global_rank not in ranks:
                continue
            members = tuple(sorted(set(ranks)))
            if len(members) > 1 and members not in comms:
                # Every rank goes through the keys in the order of the list, so no two wait for each other crosswise.
                comms[members] = create_comm(Ranks(members))
            met = {rank: reports[rank][key] for rank in members}
            self._keys.append(
                _Key(key, held[key].params, _all_names(met), comms.get(members), members.index(ranks[0]))
            )
            _take_options(self._keys[-1], met[ranks[0]])
        self._finalizer = weakref.finalize(self, _close_all, tuple(comms.values()))
        self._followers = {id(param) for key in self._keys if not key.is_first for param in key.params}
        self.synchronize()

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of which this rank holds an owner."""
        return tuple(key.name for key in self._keys)

    def params(self, key: str) -> tuple[Tensor, ...]:
        """This rank's parameters of a key, one per shared attribute."""
        return next(found.params for found in self._keys if found.name == key)

    def aliases(self, name: str) -> tuple[str, ...]:
        """All names under which the one-process model has the weight called ``name``, the first owner's first."""
        for key in self._keys:
            if name in key.names:
                return tuple(other for other, position in key.names.items() if position == key.names[name])
        return (name,)

    def counted(self, param: Tensor) -> bool:
        """False for the copies of a shared weight on other ranks than the first owner's, so sums count it once."""
        return id(param) not in self._followers

    def synchronize(self) -> None:
        """Give every copy the first owner's values.  Collective over the owners; nothing to do for other ranks."""
        with paddle.no_grad():
            for key in self._spread():
                for position, param in enumerate(key.params):
                    key.comm.broadcast(param, key.first, _label(key, position)).wait()

    def synchronize_if_changed(self) -> None:
        """:meth:`synchronize` the keys whose copies have come to differ, as re-initialisation or an edit makes them.

        Collective over the owners; compares checksums, so it costs one look at each weight (a third of a second for
        1 GB in host memory; Paddle counts no version that ``set_value`` would change) and a small exchange per key.
        """
        for key in self._spread():
            seen = key.comm.exchange([_fingerprint(param) for param in key.params], f"compare shared {key.name!r}")
            for position, param in enumerate(key.params):
                if len({prints[position] for prints in seen}) > 1:
                    with paddle.no_grad():
                        key.comm.broadcast(param, key.first, _label(key, position)).wait()

    def begin_gradients(self) -> None:
        """A pass begins that adds to the gradients, summed or not yet there; no communication.

        The copies of a sum that an earlier pass has left are dropped but for the first owner's, or
        :meth:`reduce_gradients` would count it once per copy.
        """
        for key in self._spread():
            for param in () if key.is_first else key.params:
                drop_grad(param)

    def reduce_gradients(self) -> None:
        """Sum the gradients of every copy over the ranks, once per pass.  Collective over the owners.

        Gradients that are to accumulate over several passes need :meth:`begin_gradients` before each.
        A copy without a gradient counts as zero; where no copy has one, none gets one, as in one process.  Raises
        :class:`UsageError` on all owners if a weight is frozen on some ranks only, or has sparse gradients.
        """
        for key in self._spread():
            grads = [grad_of(param) for param in key.params]
            states = [
                (param.stop_gradient, grad is not None, grad is not None and is_sparse(grad))
                for param, grad in zip(key.params, grads)
            ]
            reports = key.comm.exchange(states, f"gradients of shared {key.name!r}")
            for position, param in enumerate(key.params):
                frozen, present, sparse = zip(*(report[position] for report in reports))
                if any(sparse):
                    raise UsageError(
                        f"{_label(key, position)} has sparse gradients, which cannot be summed over stages; build its "
                        f"layers with sparse=False"
                    )
                if any(frozen) and not all(frozen):
                    where = [rank for rank, is_frozen in zip(key.comm.ranks, frozen) if is_frozen]
                    raise UsageError(
                        f"{_label(key, position)} is frozen on rank {', '.join(map(str, where))} only; set its "
                        f"stop_gradient alike on ranks {list(key.comm.ranks)}"
                    )
                if any(present) and not any(frozen):
                    _sum_grad(key.comm, f"gradient of {_label(key, position)}", param)

    def close(self) -> None:
        """End the communication; safe to call twice."""
        self._finalizer()

    def _spread(self) -> list[Any]:
        """The keys that have owners on several ranks."""
        return [key for key in self._keys if key.comm is not None]


def _label(key: _Key, position: int) -> str:
    names = [name for name, place in key.names.items() if place == position]
    return f"shared {key.name!r} ({', '.join(names)})"


def _all_names(reports: Mapping[int, Report]) -> dict[str, int]:
    """Names of all owners in the order of the list."""
    names = {name: position for report in reports.values() for name, position in report.names.items()}
    return dict(sorted(names.items(), key=lambda item: int(item[0].partition(".")[0])))


def _take_options(key: _Key, first: Report) -> None:
    """Give this rank's copies the automatic name and the options of the first owner's."""
    for param, options in zip(key.params, first.options):
        for name, value in options.items():
            setattr(param, name, value)
        if key.comm is not None:
            param.is_firstly_shared = key.is_first  # Paddle's own clip counts by it


def _sum_grad(comm: Comm, label: str, param: Tensor) -> None:
    grad = grad_of(param)
    if grad is None or not grad.is_contiguous():  # weight.t() gives a transposed one
        param.grad = paddle.zeros_like(param) if grad is None else grad.contiguous()
        grad = grad_of(param)
    comm.all_reduce(grad, label).wait()


def _fingerprint(param: Tensor) -> int:
    """A checksum of all bytes; a weight that is not in host memory, or not contiguous, is copied for it."""
    value = param.detach()
    if not value.place.is_cpu_place():
        value = value.cpu()
    return zlib.crc32(host_view(value if value.is_contiguous() else value.contiguous()))


def _close_all(comms: Sequence[Comm]) -> None:
    for comm in comms:
        comm.close()
