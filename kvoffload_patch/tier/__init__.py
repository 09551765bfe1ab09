"""The CPU tier: which KV block lives in which CPU slot, what to move, what to evict.

Pure Python, standard library only. It knows keys (a block hash together with its KV cache
group, as opaque hashable values), GPU block ids and CPU slots; it knows nothing of requests,
of tensors, of streams or of vLLM.

The protocol, in the order in which a step uses it:

``lookup`` / ``hit_on_gpu``
    From which place can the block of this key be loaded? A request hits these GPU blocks: their
    keys become recent, and what the tier lacks of them is queued to be stored.
``queue_store`` / ``note_new_blocks``
    A GPU block has been given this key; it is stored with the step's plan unless the block is
    handed out again before the plan is made.
``begin_load``
    Pin the slots of these keys and plan their copy into these GPU blocks; returns a ticket.
    The slots are protected from eviction until the ticket is done.
``make_plan``
    Reserve slots for what the step computes and what was queued, evicting as needed, and freeze
    the step's `TransferPlan`. Nothing planned is readable before its ticket is done.
``apply``
    Take in a `TransferResult`: unpin what was loaded, make readable what was stored.
``request_ended``
    What it used and stored is a prefix, which leaves from its tail.

Tickets increase by one per link and are done in that order.
"""
