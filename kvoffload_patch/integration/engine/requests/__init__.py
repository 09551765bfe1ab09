"""Which waiting requests are looked up, loaded for, deferred; not how their blocks are stored."""
