"""What is done, by link, as the tier's result takes it over."""

from __future__ import annotations

from kvoffload_patch.links import CPU, LATE, LOAD, STORE, Failure
from kvoffload_patch.tier.plan import TransferResult
from kvoffload_patch.transfer.plans import Progress


def test_progress_is_told_by_link() -> None:
    failed = [Failure(*one, LATE) for one in ((LOAD, 4), (STORE, 1), (LOAD, 5))]
    progress = Progress(((LOAD, 5), (STORE, 2)), tuple(failed))
    assert (progress.done_on(LOAD), progress.done_on(STORE)) == (5, 2)
    result = TransferResult(*progress)
    assert (result.failed_on(LOAD), result.failed_on(STORE)) == ((4, 5), (1,))
    assert (progress.done_on(("disk", CPU)), result.failed_on(("disk", CPU))) == (0, ())


def test_the_first_fields_of_a_result_are_those_of_progress() -> None:
    progress = Progress(((LOAD, 5),), (Failure(LOAD, 4, LATE),))
    result = TransferResult(*progress, num_slots=7)
    assert (result.done, result.failed, result.num_slots) == (progress.done, progress.failed, 7)
    assert (result.done_on(LOAD), result.failed_on(LOAD)) == (5, (4,))
