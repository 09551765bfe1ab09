"""Moving bytes between KV tensors and CPU memory: torch, and only torch here.

It knows tensors, slots, streams and plans; it knows nothing of requests, of policies or of vLLM.
This package does not import the tier, and the tier does not import this package.
"""
