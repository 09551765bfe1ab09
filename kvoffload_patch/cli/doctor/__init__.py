"""`kvoffload doctor`: what a start rests on here, one file for each group of readings.

Each `check` reads and returns findings; none of them changes anything. What needs torch or vLLM
runs in a child process.
"""
