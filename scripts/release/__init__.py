"""Files kept of vLLM releases."""
