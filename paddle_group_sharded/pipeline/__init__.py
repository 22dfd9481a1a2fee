"""The LayerDesc pipeline: describe a model as a list, cut it into stages, run micro-batches through them.

Words, each with one meaning throughout the package:

rank
    One process of a pipeline, counted from 0 along it.  ``num_stages`` in public signatures is the number of ranks,
    as in Paddle.
virtual stage
    One contiguous interval of the list of layers, counted from 0 in model order.  ``Action.stage`` counts these.
chunk
    One of the virtual stages that a rank holds.  With ``num_chunks`` chunks a rank ``r`` holds the virtual stages
    ``r, r + num_stages, r + 2 * num_stages ...``; with one chunk, virtual stage and rank are the same number.
micro-batch
    What one action works on; a batch is cut into ``num_micro_batches`` of them.
action
    One step of one rank, such as the forward of micro-batch 0 on stage 2, written ``2F0``.
plan
    Every rank's list of actions.  Schedules make plans, :mod:`.lowering` adds transfers to them, :mod:`.simulate`
    proves them, :mod:`.render` draws them, the runner executes them.
timeline
    When each action of a plan ran: predicted by the simulator or measured by the runner, the same type.
"""
