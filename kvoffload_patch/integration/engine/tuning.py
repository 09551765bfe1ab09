"""Numbers that tune the engine's side: each with its unit, and what set it.

None of them decides what is right; a wrong one costs time or memory.
"""

from __future__ import annotations

# Requests looked at in a step beyond those that can run: parked ones, and ones that wait for
# something else, are passed over on the way. More than `LOOK_AHEAD_REQUESTS`, which may be behind
# as many of these; each that is passed over takes the step a moment.
SCAN_MARGIN_REQUESTS = 64
# No more loads are begun while the bus has so much to do: beginning one costs the step its time,
# and what is begun holds GPU blocks. About seven prompts of 8,192 tokens at 20 ms each. With less
# fewer tokens are answered where the bus is slow (docs/admission.md, "Numbers that are not
# settings"), and without a limit 5 % fewer where it is slower (docs/mechanisms.md, "Loads ahead of
# others on the bus").
BUS_AHEAD_MS = 150.0
# Requests behind the step's last token for which loads are begun already. Between the seven that
# `BUS_AHEAD_MS` allows of 20 ms each, and what their lookups may take of a step: 0.3 to 0.4 ms for
# each of 129 blocks (docs/admission.md, "Room and head-room").
LOOK_AHEAD_REQUESTS = 16
# Of so many loads one is compared with checksums, unless all are (`Comparing.all`). It is parked,
# and over only when the worker has said so, which costs a first token 16 to 50 ms, and must not
# show in the slowest of a hundred (docs/measurements.md, "Conversations over HTTP").
SAMPLED_LOADS = 256
# A step of so many tokens computes prompts, and takes as long as these do; with 64 the ends of
# prompts that were hit count, whose tokens take long (docs/admission.md, "Numbers that are not
# settings").
PREFILL_TOKENS = 512
# Of what a token takes to compute this part stays with each step: some eight steps count. It shows
# where such steps differ, which needs a GPU: in `scripts/bench trace` what a token of them takes.
KEPT_PREFILL_PARTS = 7 / 8
# A prefix is computed again if its load takes so many times as long: where both take the same,
# computing keeps others waiting. With 1 fewer tokens are answered where a load takes 1.4 times as
# long, with 3 a bus that is slower is used on (docs/admission.md, as above).
LONGER_LOAD_TIMES = 1.5
# Of so many such hits one is loaded all the same, to see how fast the bus is, which is idle beside
# what is computed. With 32 and 128 fewer tokens are answered (docs/admission.md, as above).
TRIED_LOADS = 8
# Loads that take longer are better awaited by layer, in a step that computes a prompt's last block,
# than as a whole, in one that loads it and computes a token: a load of t ms ends these about
# max(t + 3, 11 + t / 4) and t + 6 ms later, with steps of 11 and 6 ms. To be measured with 0, 7 and
# 1,000 by first tokens of `scripts/bench chats --phases quiet`, "ends on a block".
LAYERED_LOAD_MS = 7.0
# Copies do not fail on a sound machine, and each that does costs a recomputation: so many within
# so many seconds are a device or driver that has gone bad. More than the one load and the stores of
# a step that one accident fails; and few enough for recomputing 8,192 tokens so often to take the
# GPU 2 of 60 s (217 ms each, docs/performance.md).
FAILED_COPIES = 8
FAILED_WINDOW_S = 60.0
# The front end hears of the tier's figures no more often: Prometheus asks every 15 s as a rule, and
# the step that sends takes longer. Many steps of decodes (5.7 ms), and far less than the 15 s.
METRICS_INTERVAL_S = 1.0
# How long requests were parked is kept for so many of them, where nobody asks. More than end within
# `METRICS_INTERVAL_S` (50 loads of 20 ms), and at 32 bytes each 32 KiB.
PARKED_TIMES = 1024
# So many names of adapters are remembered exactly, 330 bytes each (21 MiB), and what their files
# were when they were loaded, a few hundred bytes each: a trainer loads one every few seconds, so
# many in days. Any number more is remembered in so many bytes, of which some are then taken for
# others: 2 % once they are a million, one every five seconds for two months. More than a server
# has adapters, and less than a thousandth of a tier of 64 GiB.
EXACT_ADAPTERS = 65_536
FORGOTTEN_NAMES_BYTES = 1 << 20
# Of those that the tier is not used for, so many are named in an answer, which has 64 KiB.
TOLD_ADAPTERS = 20
# Of what an error says, so much is told in an answer and in a label of /metrics. More than
# a sentence of this package has, and far less than an answer has room for, 64 KiB.
TOLD_CHARACTERS = 500
# What a worker may take to answer. Opening touches and registers memory, closing gives it back,
# both at some GiB a second (scripts/bench touch: 1.4 to 8.2); anything else waits behind a step at
# most, for which vLLM has 300 s, or what VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS says.
OPEN_TIMEOUT_S = 1800.0
RPC_TIMEOUT_S = 300.0
# What an engine core's own thread takes to send that it is dead, before its process ends. More than
# many turns of Python, which come every 5 ms, and less than anybody notices beside the 30 s or more
# (`GRACE_S`) after which the process ends.
SENDING_S = 2.0
# A command is withdrawn if no step has ended by then, which is a step that hangs. More than the
# longest launch that was seen, 11 s (transfer/tuning.py, `LAUNCH_PASSES_S`), and less than the 300
# s for which vLLM waits for a step, too long for a user who types a command.
CONTROL_TAKE_S = 30.0
# Until then it is also withdrawn if who asked has gone, which is looked for so often, and once more
# when the engine takes it up.
CONTROL_LOOK_S = 0.5
# One that is under way may wait for copies, which have a deadline of 60 s without progress.
CONTROL_APPLY_S = 75.0
