"""What runs in each worker: beside vLLM's model runner."""
