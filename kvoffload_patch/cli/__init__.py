"""What a person sees on the command line: run a server, check, ask, examine, patch files.

Owns options, texts and exit codes (0: fine, 2: refused; `patch --check` has 1: unknown files).
Never imports vLLM: it decides from the installed files, then replaces itself with the command,
whose own start-up does the patching.
"""
