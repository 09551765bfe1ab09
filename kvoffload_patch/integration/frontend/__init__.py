"""What runs in the front end: in the processes of vLLM's API servers."""
