"""Runs on many vLLM releases."""
