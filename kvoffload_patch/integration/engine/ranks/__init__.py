"""All ranks of an engine, by RPC, and their processes; not which requests or blocks there are."""
