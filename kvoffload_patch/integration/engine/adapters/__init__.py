"""What is read and changed of vLLM's objects, by release; not what the tier holds or decides."""
