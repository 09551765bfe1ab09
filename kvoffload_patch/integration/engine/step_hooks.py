"""Hooks of a scheduler and its block pool, made when a tier is attached to them.

Each function makes one hook: ``wrapped`` is the object's own method, ``live`` is true as long as
the tier works, and what a call needs is bound once. A hook calls ``wrapped`` exactly once. It
names the parameters that it reads, which the table of patch points has compared, and passes on
whatever else there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvoffload_patch.integration.engine.breaker import Breaker

Method = Callable[..., Any]


def schedule(wrapped: Method, live: list[bool], breaker: Breaker) -> Method:
    """`Scheduler.schedule`: loads are decided before it, the plan rides on what it returns."""
    begin, raised, end = breaker.begin_schedule, breaker.schedule_raised, breaker.end_schedule

    def hook(*args: Any, **kwargs: Any) -> Any:
        if not begin():
            return wrapped(*args, **kwargs)
        try:
            output = wrapped(*args, **kwargs)
        except BaseException:
            raised()
            raise
        end(output)
        return output

    return hook


def update_from_output(wrapped: Method, live: list[bool], breaker: Breaker) -> Method:
    """`Scheduler.update_from_output`: the reporting rank's result comes back on its output."""
    begin, end = breaker.begin_update, breaker.end_update

    def hook(scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
        begin(scheduler_output, model_runner_output)
        try:
            outputs = wrapped(scheduler_output, model_runner_output, *args, **kwargs)
        finally:
            end()
        if breaker.asked:
            breaker.answer_if_idle()  # first: what it has the reporter send overtakes ``outputs``
        if breaker.reporter is not None:
            breaker.reporter.step_ended(outputs)
        return outputs

    return hook


def add_request(wrapped: Method, live: list[bool], breaker: Breaker) -> Method:
    """`Scheduler.add_request`: between two steps."""

    def hook(request: Any, *args: Any, **kwargs: Any) -> Any:
        if live and request.lora_request is not None:
            breaker.lora_named(request.lora_request)
        return wrapped(request, *args, **kwargs)

    return hook


def update_session(wrapped: Method, live: list[bool], breaker: Breaker) -> Method:
    """`Scheduler._update_request_as_session`: a session goes on with more input."""

    def hook(session: Any, *args: Any, **kwargs: Any) -> Any:
        breaker.on_session(session)
        result = wrapped(session, *args, **kwargs)
        breaker.session_went_on(session)
        return result

    return hook


def finish_requests(wrapped: Method, live: list[bool], breaker: Breaker) -> Method:
    """`Scheduler.finish_requests`: it removes a request from the queue its status names."""

    def hook(request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        elif request_ids is not None:
            request_ids = list(request_ids)  # it may be an iterator, and is read twice
        breaker.on_finish(request_ids)
        return wrapped(request_ids, *args, **kwargs)

    return hook


def reset_prefix_cache(wrapped: Method, live: list[bool], breaker: Breaker) -> Method:
    """`Scheduler.reset_prefix_cache`: references held by the tier would make it fail."""

    def hook(*args: Any, **kwargs: Any) -> Any:
        before, succeeded = breaker.reset(), False
        try:
            succeeded = wrapped(*args, **kwargs)
        finally:
            breaker.reset_over(succeeded, before)
        return succeeded

    return hook


def update_waiting(wrapped: Method, live: list[bool], breaker: Breaker) -> Method:
    """`Scheduler._update_waiting_for_remote_kv`: a connector has received blocks.

    Up to 0.17 vLLM asks for parked requests, too, of which no connector knows.
    """

    def hook(request: Any, *args: Any, **kwargs: Any) -> Any:
        if breaker.is_parked(request):
            return False
        return breaker.on_received(lambda: wrapped(request, *args, **kwargs))

    return hook


def invalid_blocks(wrapped: Method, live: list[bool], breaker: Breaker) -> Method:
    """`Scheduler._handle_invalid_blocks`: a connector failed to fill blocks, cached or not."""

    def hook(invalid_block_ids: Any, *args: Any, **kwargs: Any) -> Any:
        breaker.on_invalid(invalid_block_ids)
        return wrapped(invalid_block_ids, *args, **kwargs)

    return hook


# What blocks are cached and handed out is only noted; the tier looks at all of a step's at once.
# These are called for each request that fills a block: what vLLM passes as a rule has a call of its
# own, which costs half of one with arguments of any number.


def _note_more(breaker: Breaker) -> Callable[[Any, Any, int, int, int, int], None] | None:
    """Told of each call besides what is noted; None: nobody is."""
    events, choice = breaker.tier.events, breaker.tier.choice

    def more(request: Any, blocks: Any, begin: int, end: int, size: int, group: int) -> None:
        try:
            if events is not None:
                events.cached(request, blocks, begin, end, size, group)
            choice.note_answers(request, blocks, begin, end, size)
        except Exception as error:  # noqa: BLE001 - whatever it is, vLLM's own call goes on
            breaker.failed("cache_full_blocks", error)

    return None if events is None and choice.decode else more


def cache_full_blocks(wrapped: Method, live: list[bool], breaker: Breaker) -> Method:
    """`BlockPool.cache_full_blocks`: exactly the newly full blocks, for every KV cache group.

    From 0.22 on it has a mask, which is None but for sliding windows and states: left out, a
    release without it is called in the same way.
    """
    note, more = breaker.tier.cached.append, _note_more(breaker)

    def hook(
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        begin, end = num_cached_blocks, num_full_blocks
        if block_mask is None and not args:
            if kwargs:
                result = wrapped(
                    request, blocks, begin, end, block_size, kv_cache_group_id, **kwargs
                )
            else:
                result = wrapped(request, blocks, begin, end, block_size, kv_cache_group_id)
        else:
            rest = kv_cache_group_id, block_mask, *args
            result = wrapped(request, blocks, begin, end, block_size, *rest, **kwargs)
        if live:
            # Of what decodes it is one block: a tuple is made sooner than a list.
            note((request, (blocks[begin],) if end - begin == 1 else blocks[begin:end]))
            if more is not None:
                more(request, blocks, begin, end, block_size, kv_cache_group_id)
        return result

    return hook


def cache_full_blocks_with_hashes(wrapped: Method, live: list[bool], breaker: Breaker) -> Method:
    """`BlockPool.cache_full_blocks` up to 0.10.0, which is given the hashes as well."""
    note, more = breaker.tier.cached.append, _note_more(breaker)

    def hook(
        request: Any,
        blocks: Any,
        block_hashes: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        full = num_cached_blocks, num_full_blocks, block_size
        result = wrapped(request, blocks, block_hashes, *full, *args, **kwargs)
        if live:
            note((request, blocks[num_cached_blocks:num_full_blocks]))
            if more is not None:
                more(request, blocks, *full, 0)  # its events have no medium and no groups
        return result

    return hook


def get_new_blocks(wrapped: Method, live: list[bool], breaker: Breaker) -> Method:
    """`BlockPool.get_new_blocks`: the one place where a GPU block is handed out."""
    note = breaker.tier.handed_out.extend

    def hook(num_blocks: int) -> Any:
        blocks = wrapped(num_blocks)
        if live:
            note(blocks)
        return blocks

    return hook
