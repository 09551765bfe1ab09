"""What a person sees on the command line: run a server with the CPU tier, check, or ask for status.

Owns options, texts and exit codes (0: fine, 2: refused). Never imports vLLM: it decides from the
installed files, then replaces itself with the command, whose own start-up does the patching.
"""
