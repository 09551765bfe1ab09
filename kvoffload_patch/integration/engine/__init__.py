"""What runs in the engine core: beside vLLM's scheduler, block pool and executor.

At the top lies the life of a tier: what attaches it, its events in a step, what detaches it. Each
room holds one idea, which its first line says. `tests/test_layers.py` holds who imports whom: the
top imports every room, and no room more of the top than the numbers of `tuning`. `adapters` and
`ranks` import no other room, `blocks` imports both, `reports` imports `adapters`, and `requests`
imports all four. One file of `requests` lies lower, right above `adapters`: `lookup`, whose result
tells `blocks` and `reports` what a request hits.
"""
