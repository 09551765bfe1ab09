"""The only code that knows vLLM: the table of patch points, thin hooks, and adapters.

`engine/` runs in the engine core: its hooks attach a `SchedulerTier` to the scheduler and tell it
what happens there. `worker/` runs in each worker: its hooks hand each step's plan to the `RankTier`
of the model runner. Both share `protocol.py` and `slot_counts.py`. What differs between releases of
vLLM lies in `engine/adapters/`, `engine/eligibility.py`, `engine/eligible_states.py` and
`worker/vllm_runner.py` alone.
"""
