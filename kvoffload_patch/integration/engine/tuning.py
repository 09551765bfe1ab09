"""Numbers that tune the engine's side: each with its unit, and what set it.

None of them decides what is right; a wrong one costs time or memory.
"""

from __future__ import annotations

# Requests looked at in a step beyond those that can run: parked ones, and ones that wait for
# something else, are passed over on the way. Not measured: it bounds a step's work where hundreds
# wait.
SCAN_MARGIN_REQUESTS = 64
# No more loads are begun while the bus has so much to do: beginning one costs the step its time,
# and what is begun holds GPU blocks. Not measured alone; about seven prompts of 8,192 tokens at 20
# ms each (docs/performance.md, "Chosen loads").
BUS_AHEAD_MS = 150.0
# Requests behind the step's last token for which loads are begun already. Not measured alone: at
# 20 ms each they keep the bus busy beyond `BUS_AHEAD_MS`.
LOOK_AHEAD_REQUESTS = 16
# Of so many loads one is compared with checksums, unless all are (`Comparing.all`). It is parked,
# and over only when the worker has said so, which costs a first token 16 to 50 ms, and must not
# show in the slowest of a hundred (docs/measurements.md, "Conversations over HTTP").
SAMPLED_LOADS = 256
# A step of so many tokens computes prompts, and takes as long as these do. Not measured alone.
PREFILL_TOKENS = 512
# Steps under way that compute prompts, at most; older ones are lost. Not measured: a bound.
PREFILL_STEPS = 16
# What a token takes to compute is known from so many of them on, and of what is known this part
# stays with each step: some eight steps count. Not measured alone.
KNOWN_PREFILL_TOKENS, KEPT_PREFILL_PARTS = 2048, 7 / 8
# A prefix is computed again if its load takes so many times as long: where both take the same,
# computing keeps others waiting. No other value was replayed (`scripts/simulate loads`).
LONGER_LOAD_TIMES = 1.5
# Of so many such hits one is loaded all the same, to see how fast the bus is. Not measured.
TRIED_LOADS = 32
# Loads that take longer are better awaited by layer, in a step that computes a prompt's last block,
# than as a whole, in one that loads it and computes a token: a load of t ms ends these about
# max(t + 3, 11 + t / 4) and t + 6 ms later, with steps of 11 and 6 ms. Reckoned, not measured.
LAYERED_LOAD_MS = 7.0
# Copies do not fail on a sound machine, and each that does costs a recomputation: so many within
# so many seconds are a device or driver that has gone bad, and not an accident. Not measured.
FAILED_COPIES = 8
FAILED_WINDOW_S = 60.0
# The front end hears of the tier's figures no more often: Prometheus asks every 15 s as a rule, and
# the step that sends takes longer. Not measured by a script.
METRICS_INTERVAL_S = 1.0
# How long requests were parked is kept for so many of them, where nobody asks. Not measured.
PARKED_TIMES = 1024
# So many adapters' files are remembered as they were when these were loaded, a few hundred bytes of
# each: a trainer loads one every few seconds for weeks. Not measured.
REMEMBERED_ADAPTERS = 4096
# So many names of adapters are remembered exactly, 330 bytes each (21 MiB), and any number more in
# so many bytes, of which some are then taken for others. Not measured.
EXACT_ADAPTERS = 65_536
FORGOTTEN_NAMES_BYTES = 1 << 20
# Of those that the tier is not used for, so many are named in an answer, which has 64 KiB.
TOLD_ADAPTERS = 20
# Of what an error says, so much is told in an answer and in a label of /metrics. Not measured.
TOLD_CHARACTERS = 500
# What a worker may take to answer. Opening touches and registers memory, closing gives it back,
# both at some GiB a second (scripts/bench touch: 1.4 to 8.2); anything else waits behind a step at
# most, for which vLLM has 300 s, or what VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS says.
OPEN_TIMEOUT_S = 1800.0
RPC_TIMEOUT_S = 300.0
# What an engine core's own thread takes to send that it is dead, before its process ends: a moment,
# unless that thread has no turn at Python. Not measured.
SENDING_S = 2.0
# A command is withdrawn if no step has ended by then, which is a step that hangs: vLLM itself waits
# 300 s for one, which is too long for a user who types a command. Not measured.
CONTROL_TAKE_S = 30.0
# Until then it is also withdrawn if who asked has gone, which is looked for so often, and once more
# when the engine takes it up.
CONTROL_LOOK_S = 0.5
# One that is under way may wait for copies, which have a deadline of 60 s without progress.
CONTROL_APPLY_S = 75.0
