"""`kvoffload bench`: this machine without the tier, with it, and with vLLM's own connectors.

A server of the user's own model and arguments for each mode, one after the other, and the same
small load for all. Standard library only; vLLM runs in the servers and is never imported here.
"""
