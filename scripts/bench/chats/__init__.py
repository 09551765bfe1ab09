"""The benchmark of conversations with a server over HTTP."""
