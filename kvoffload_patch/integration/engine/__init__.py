"""What runs in the engine core: beside vLLM's scheduler, block pool and executor."""
