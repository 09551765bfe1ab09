"""Talking to a running engine: a Unix socket for each engine core, and one question a connection.

The engine's process and the command line share this package; it knows nothing of vLLM or of what
the commands do. A question is one line of JSON, and so is its answer; both are bounded, in bytes
and in time. Only processes of the engine's own user are answered.
"""
