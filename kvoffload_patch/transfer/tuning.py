"""Numbers that tune copies: each with its unit, and what set it.

None of them decides what is right; a wrong one costs time or memory. Copies were measured on one
H200 (PCIe Gen5 x16, 55 GB/s one way) if not said otherwise.
"""

from __future__ import annotations

# --- backends ---
# Each slice costs a thread that shares Python with the step its launches, so slices are large. What
# else crosses the bus waits for a piece of one: a step's tokens for a store, 0.6 ms; its inputs, if
# they have more than some 16 KiB, for a load, of which a piece of 128 MiB costs a step 2.1 ms and
# one of 32 MiB 0.2 (scripts/bench beside). Buffers, each of a slice: one on the bus, one being
# packed or unpacked, and for stores, whose packing may have to wait for room on the device, one
# more.
LOAD_SLICE_BYTES, LOAD_PIECE_BYTES, LOAD_BUFFERS = 128 << 20, 32 << 20, 2
STORE_SLICE_BYTES, STORE_BUFFERS = 32 << 20, 3
# Bytes of loads in which the average of their times comes half way to what they take now: about one
# prompt of 8,192 tokens. With 8 GiB steps wait for loads 7 times as long, with 128 MiB hardly at
# all, on a bus whose speed never varies (docs/admission.md, "Numbers that are not settings"). How
# much single loads vary is to be measured on a GPU, by `kvoffload_load_slowdown` on /metrics beside
# `scripts/bench chats`.
LOAD_TIMES_BYTES = 1 << 30
# Blocks made ready for copying at a time: a batch may have tens of thousands, and the bus would be
# idle until the last of them is (scripts/bench transfer, blocks of 256 KiB).
READY_BLOCKS = 1024
# Groups of rows in which a load comes where the forward pass waits for it by layer: enough of them
# for compute to begin early, each large enough for the bus. The first of 2, 4 and 8 is there after
# 7.5, 4.0 and 2.3 of 14.4 ms; 8 take the host up to 0.8 ms more than 4 (scripts/bench tuned).
LOAD_GROUPS, LOAD_GROUP_BYTES = 4, 256 << 10
# Blocks of a run of slots, on average, from which on a run is one copy of the driver's where loads
# come by layer, and not each row of its own: the host has less to do then, and the bus takes
# longer. For 354 blocks in runs of 2, 3 and 4 that is 0.5, 0.3 and 1.1 ms less, and 1.5, 1.3 and
# 0.8 ms longer (scripts/bench tuned).
RUN_BLOCKS = 4
# What torch's own copies pack before they cross, each way in a buffer: the next is packed when it
# has crossed, so a load of 708 MiB takes 23 ms with 32 MiB, and 18 with 128 (scripts/bench tuned).
STAGING_BYTES = 128 << 20
# What a program of the kernel moves, and programs per launch: enough to keep the memory busy, few
# enough to leave room beside them. Other values gain a tenth at most (scripts/bench tuned).
TILE_BYTES = 8192
LAUNCHED_PROGRAMS = 4096
# Copies that are timed when the tier opens: enough for the bus to run at speed, little enough for
# it all to take a moment (64 MiB are 1.2 ms). The best of so many counts. To be measured: how much
# what `doctor` says of the bus varies with a quarter and four times as many, on a GPU.
TIMED_BYTES = 64 << 20
TIMED_REPEATS = 3
# Numbers of blocks that a program copies: fewer than 512 take longer (scripts/bench tuned).
IDS_PROGRAM_BLOCKS = 1024

# --- queues, and the thread that enqueues ---
# Slices that the thread keeps under way: of loads 2.4 ms of the bus each, of stores 0.6 ms, so
# more than its sleep lasts (scripts/bench copy_thread).
THREAD_LOAD_SLICES = 3
THREAD_STORE_SLICES = 8
# How long it sleeps meanwhile. Each time it wakes, it takes Python away from the step
# (scripts/bench copy_thread).
THREAD_SLEEP_S = 0.002
# Slices of loads under way when a step has been launched: about 15 to 30 ms of the bus. While the
# next is launched, the copy thread hardly gets to run: with calls as short as launches, Python
# gives another thread its turn every 5 ms at most. With 3 and with 24 turns of 60 sessions took as
# long, within what turns differ by (docs/history.md, "Tried and dropped").
STEP_LOAD_SLICES = 12
# Slices of stores that a step enqueues itself, as many as the thread: with 2 the thread enqueued
# most stores of decodes, beside steps that were late (docs/mechanisms.md, "Stores of decodes").
STEP_STORE_SLICES = THREAD_STORE_SLICES
# Between looks at a copy that the host waits for. More than a look takes, some µs, or it would keep
# Python from others; less than `IDLE_WAIT_S` (1 ms), the shortest of such waits.
POLL_S = 0.0001
# For how long the oldest copy of a link may be due without a slice enqueued or a ticket done. The
# largest copy that is enqueued at once is a load that a step needs, of some ten GB: 45 GB/s were
# measured, and 1 GB/s would do. Below the 300 s after which vLLM gives up.
DEADLINE_S = 60.0
# For how long such a copy may then hold up the step that would raise it, before the process of the
# rank ends. Between `DEADLINE_PERIOD_S`, so that many steps can raise it, and the 240 s that are
# left of the 300 s after which vLLM gives up, with several processes only.
GRACE_S = 30.0
# Between looks for both: more than a step (5.7 ms of decodes), from which each takes Python, and
# less than either of them.
DEADLINE_PERIOD_S = 1.0

# --- memory ---
# Registered in one call of the driver, 0.7 to 6 ms. Such a call holds up other calls that the
# process makes: half of the time if nothing is done about it, a fifth of it with the pause.
PIECE_BYTES = 32 << 20
# The pause after a call beside steps, in times of what it took.
PAUSE_TIMES = 4
# What the launch of a step is let pass for, at most, before each piece: the driver's lock is this
# thread's again at once where calls follow each other without a pause, and a launch of prompts
# took 2 to 11 s beside them. More than a launch takes alone (scripts/bench serve, S3), and than a
# step of decodes (35 ms at p99 beside loads, docs/mechanisms.md, "When a request joins a step"): so
# long after the last step there are no pauses.
LAUNCH_PASSES_S = 0.1
# What loads under way, which requests wait for, are let pass for, at most, before each piece: one
# prompt of 8,192 tokens is 20 ms of the bus (docs/performance.md, "Chosen loads").
LOADS_PASS_S = 0.025
# There are no pauses while stores use the last of so many parts of what is ready: what is not
# stored is computed again, and what fills the tier so fast are long steps of prompts, for which the
# GPU needs longer than the host (docs/measured/current/serve-first.json).
GROWTH_PARTS = 8
# Touched in one go: little enough to be asked to stop between two of them, 4 ms of a thread at 8
# GiB/s, and 75 at 0.42 (scripts/bench touch).
TOUCH_BYTES = 32 << 20
# Threads that touch: half of the cores, so that they leave as many to the loading of the model, but
# at least and at most so many. Memory that a virtual machine has not had yet came at 0.4 to 0.6
# GiB/s for each thread that had a core, and at 14 for two once it had had it (scripts/bench touch).
TOUCH_THREADS, MOST_TOUCH_THREADS = 2, 8
# How often the memory available is looked up: what threads take until the next time is so many
# bytes for each, or one of so many parts of what may still be taken, if that is more. With looks
# every 64 MiB a thread that runs Python took 1.4 times as long (docs/history.md, "Starting").
CHECKED_BYTES, LOOK_PARTS = 64 << 20, 64
# For how long memory that is missing is looked for again: a virtual machine may be given more only
# as it uses what it has. More than threads take for `CHECKED_BYTES` at the slowest (0.15 s at 0.42
# GiB/s), and less than the 1,800 s that the engine waits for memory (`OPEN_TIMEOUT_S`).
MEMORY_PATIENCE_S = 10.0
