"""Who is named when one of several processes that wait for one another fails."""

from __future__ import annotations

from slipstream.refit.config import ChannelBrokeError, RefitError
from slipstream.workers.engine_control import blamed, settings_of

BROKE = ChannelBrokeError("the gloo channel broke, or stood still for 60 s")
NAMES_AN_ENGINE = RefitError("engine 1 died and could not receive weights")


def words(failed: dict[str, Exception], *silent: str) -> str | None:
    error = blamed(failed, silent, action="receive weights", timeout_s=60.0)
    return None if error is None else str(error)


def test_nobody_is_blamed_where_all_answered() -> None:
    assert words({}) is None


def test_silent_ones_are_all_named() -> None:
    assert words({}, "engine 0", "engine 2") == "engine 0, engine 2 did not receive weights within 60 s"


def test_one_that_stands_still_is_named_and_not_those_that_saw_the_channel_break() -> None:
    assert words({"engine 0": BROKE}, "engine 1") == "engine 1 did not receive weights within 60 s"


def test_one_that_failed_by_itself_is_named_before_all_others() -> None:
    own = ValueError("Traceback\n  File\nValueError: shapes differ")
    assert (
        words({"engine 0": BROKE, "engine 1": own}, "engine 2")
        == "engine 1 could not receive weights: ValueError: shapes differ"
    )


def test_an_error_that_names_an_engine_is_passed_on_as_it_is() -> None:
    assert words({"learner rank 0": NAMES_AN_ENGINE}, "learner rank 1") == str(NAMES_AN_ENGINE)


def test_a_broken_channel_alone_names_whom_it_broke_for() -> None:
    assert words({"engine 0": BROKE}) == f"engine 0 could not receive weights: {BROKE}"


def test_each_engines_workers_come_after_those_of_the_one_before() -> None:
    told = {"rank_offset": 1, "world_size": 7}
    assert [settings_of(told, index=i, num_workers_each=2)["rank_offset"] for i in range(3)] == [1, 3, 5]
    assert told["rank_offset"] == 1
