"""Group sharding: ZeRO stages 1, 2 and 3 over one group of ranks (arXiv 1910.02054, section 5).

The words used here, and nowhere else with another meaning:

full parameter
    the tensor as the user's layer knows it, with its own shape.
group
    the parameters that share one flat buffer and one collective.
full buffer
    1-D, every parameter of a group one after the other, padded at the end to a multiple of the world size; while it
    exists, the parameters are views of it.
shard
    one rank's ``1/world_size`` of a full buffer.
piece
    the part of one parameter that lies in one shard.  It keeps its parameter's name and options, and is what the
    optimizer steps, what optimizer states belong to, and what checkpoints hold.
unit
    what the optimizer is given for one parameter: its piece, or at the owner the whole of it when the optimizer's
    rule needs whole tensors (LAMB).
level
    which of parameters, gradients and optimizer states are sharded: see :mod:`.level`.
"""
