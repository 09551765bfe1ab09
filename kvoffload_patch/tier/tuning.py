"""Numbers that tune what a tier keeps: each with its unit, and what set it.

None of them decides what is right; a wrong one costs stores, or tokens that are recomputed.
"""

from __future__ import annotations

# For each block that the GPU lost before it was stored, so many are handed out until copies are
# given up again. Chosen by replays (docs/policies.md).
HELD_BACK_BLOCKS = 256
# That is counted up to so many times the tier's slots: it bounds how long one crowd is remembered.
# With 1 more is stored and no less recomputed, with 16 all is as with 4 (docs/policies.md, "Numbers
# that are not settings").
HELD_BACK_TIMES = 4
# In each step so many copies go back to the other policy where `auto` becomes eager again. 62,500
# took 62 steps of 0.15 ms, the longest of 0.65 ms, and 8 to 16 ms in one step.
GIVEN_BACK_BLOCKS = 1024
# How many of the GPU's free blocks are looked at before they are handed out: those of so many
# steps, so that a store has a step's time before its block is overwritten. Chosen by replays
# (docs/policies.md).
AHEAD_TIMES = 2
# And one of so many parts of the GPU at least, for loads, which take more at once than a step.
# Chosen by the same replays.
AHEAD_PARTS = 8
# Blocks that decodes fill are stored once they are those of so many steps, or so many: fewer plans,
# and fewer copies to be enqueued, are a third of the tier's calls in a step of 256 decodes
# (docs/mechanisms.md, "Stores of decodes", beside 1). To be measured on a GPU, with 4 and 16 steps,
# by `scripts/bench mechanisms`: a scheduler's step alone does not tell 8 from 1.
TOGETHER_STEPS, TOGETHER_BLOCKS = 8, 64
# Keys whose uses are counted where a block needs several before it is stored: so many for each slot
# of the tier. With 2 too many are forgotten where most prompts never come again, with 8 hardly less
# is recomputed (docs/policies.md, "Numbers that are not settings").
TRACKED_TIMES = 4
# Slots of the models that choose between two policies, at most; half as many at least, in a tier
# that has them. Chosen by replays (`scripts/simulate measure --sides lru adaptive`).
MODEL_BLOCKS = 1024
# Stored keys that the models are told of at once, at least. With 1 or 64 the same is recomputed
# within 3 %, and a block costs as much (docs/policies.md, "Numbers that are not settings").
MODEL_BATCH_BLOCKS = 16
# A count fades to a third while the models are told of so many keys for each of their slots. Chosen
# by the same replays.
MODEL_MEMORY_TIMES = 4
# ARC evicts once its model has recomputed less by one of so many parts of its slots, until it
# leads by a tenth of that. Chosen by the same replays.
MODEL_LEAD_PARTS = 200
# Recomputing a block costs about so many times what storing it does: `auto` gives up copies of what
# the GPU holds where that recomputes one block less for so many stores more. Measured on an H200 in
# a crowd of 12: 45 to 100 times; 16 tokens of Llama-3.1-8B alone take it 0.46 ms, and their 2 MiB
# the bus 0.04 (docs/policies.md, "Which to choose"; docs/performance.md, S2).
RECOMPUTE_TIMES = 16
# Keys are found by the neighbours of the first one's slot as long as each look finds so many at
# least: it takes as long as that many looks at a large dict (0.14 µs each in
# `scripts/bench step --only d`, of tables that are in no cache). So many are compared at first, and
# four times as many after each part that is the same. What leaves is taken as runs of neighbours as
# long as these have about so many slots each. Beside 2, 32 and 512: docs/mechanisms.md, "What a
# lookup costs".
NEIGHBOUR_BLOCKS = 8
# S3-FIFO counts so many uses of a block, for each of which it goes round the main queue once more.
# As its authors have it (Yang and others, 2023).
USED_TIMES = 3
# In one eviction so many blocks go round for each that is to leave, and no more: it bounds what a
# step costs where all of a large tier was used since. Chosen by replays of generated traces
# (`scripts/simulate replay --sides s3fifo`, three seeds): beside no bound, `documents` recomputed
# 4 % more with 16, and 1 % more with 32; `chat`, `scan` and `phases` are as before, `agents` less.
ROUND_TIMES = 32
# Uses of blocks between two of the same one are counted in so many parts of the GPU's blocks, up to
# so many times those; the counts fade to a third while the GPU's blocks are used so many times.
# Chosen by replays (docs/policies.md, "What the GPU keeps"), as are those below.
USES_PARTS, USES_TIMES, USES_MEMORY_TIMES = 16, 8, 4
# Of these blocks so many are in the sample, at most; half as many at least, of a GPU that has them.
# With 1024, 2 of 40 engines loaded more than half of 28 prompts that come back in turns, and not
# 28 % (docs/policies.md, "Numbers that are not settings").
USES_SAMPLE_BLOCKS = 4096
# A prefix is kept in so many parts or fewer; in fewer if one more use of so many is found that way,
# in a GPU smaller by one of so many parts: where prefixes come back in turns, one that is a little
# too small for their heads loses each before it is used again.
PREFIX_PARTS, PREFIX_LEAD_PARTS, PREFIX_MARGIN_PARTS = 16, 50, 7
# Of what was not found so far, one of so many parts is taken to be in a cache that is larger than
# could be seen.
UNSEEN_PARTS = 2
# The blocks for heads become those that requests show to be so within about so many of them, and
# all that nobody uses within so many; they are never more than nobody has used in so many.
HEADS_SHOWN_REQUESTS, HEADS_ROOM_REQUESTS, HEADS_FREE_REQUESTS = 8, 1024, 16
# No tail is handed out early while none of so many blocks that are handed out next holds a prefix:
# others are left that hold none. Besides as many as requests that end in the step may have left,
# which vLLM puts there. With 1 what takes turns is loaded up to 2.4 times as much, with 64 as much
# (docs/policies.md, "Numbers that are not settings").
HEADS_FRONT_BLOCKS = 16
