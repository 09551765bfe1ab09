"""The only code that knows vLLM: the table of patch points, thin hooks, and adapters.

Scheduler side: `engine_hooks` attaches a `SchedulerTier` to the scheduler, `scheduler_hooks`
tells it what happens there. Worker side: `worker_hooks` hands each step's plan to the `RankTier`
of the model runner. What differs between vLLM releases lies in `adapters` (scheduler side)
and `runner` (worker side) alone.
"""
