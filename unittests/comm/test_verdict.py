"""What happens when ranks do, and do not, ask for the same."""

from __future__ import annotations

from paddle_group_sharded.comm.verdict import Kind, Request, decide, explain

GATHER = Request("all_gather", "gather blocks.0", 8, "float32")
OTHER_GATHER = Request("all_gather", "gather blocks.1", 6, "float32")
STEP = Request("all_reduce", "step", 1, "float32", ("sum",))
SERVED = {"gather blocks.0": 8, "gather blocks.1": 6}


def test_equal_requests_run() -> None:
    verdict = decide([STEP, STEP, STEP], SERVED)
    assert verdict is not None and (verdict.kind, verdict.request) == (Kind.GO, STEP)


def test_a_served_gather_runs_for_those_who_ask() -> None:
    for requests in ([GATHER, STEP, STEP], [STEP, GATHER, GATHER], [STEP, STEP, GATHER]):
        verdict = decide(requests, SERVED)
        assert verdict is not None and (verdict.kind, verdict.request) == (Kind.SERVE, GATHER)


def test_the_lowest_rank_that_asks_alone_comes_first() -> None:
    verdict = decide([STEP, OTHER_GATHER, GATHER], SERVED)
    assert verdict is not None and (verdict.kind, verdict.request) == (Kind.SERVE, OTHER_GATHER)


def test_only_registered_gathers_of_the_registered_size_are_served() -> None:
    assert decide([GATHER, STEP], {}) is None
    assert decide([GATHER, STEP], {"gather blocks.0": 9}) is None
    assert decide([STEP, STEP._replace(label="clip")], SERVED) is None


def test_every_field_counts() -> None:
    changes = {"op": "broadcast", "label": "clip", "numel": 2, "dtype": "float64", "detail": ("max",)}
    for field, value in changes.items():
        assert decide([STEP, STEP._replace(**{field: value})], {}) is None, field


def test_ranks_without_any_gradient_take_the_dtype_of_the_others() -> None:
    full = Request("reduce_scatter", "reduce blocks.0", 8, "float32", (5, 3))
    zeros = full._replace(dtype="")
    for requests in ([full, zeros], [zeros, full]):
        verdict = decide(requests, {})
        assert verdict is not None and (verdict.kind, verdict.request) == (Kind.GO, full)
    verdict = decide([zeros, zeros], {})
    assert verdict is not None and verdict.request == zeros
    assert decide([zeros, full, full._replace(dtype="float64")], {}) is None


def test_the_explanation_names_every_rank_in_global_numbers() -> None:
    text = explain([GATHER, STEP], [4, 7])
    assert "rank 4 asks for all_gather 'gather blocks.0' (8 elements of float32)" in text
    assert "rank 7 asks for all_reduce 'step' (1 elements of float32)" in text
    assert "same calls in the same order" in text


def test_the_explanation_finds_the_part_that_differs() -> None:
    request = Request("reduce_scatter", "reduce blocks.0", 8, "float32", (5, 3))
    assert "part 1: 3 on rank 0, 2 on rank 1" in explain([request, request._replace(detail=(5, 2))], [0, 1])
    assert "the number of parts: 2 on rank 0, 1 on rank 2" in explain(
        [request, request, request._replace(detail=(5,))], [0, 1, 2]
    )
