"""What each engine is told when it joins a channel."""

from __future__ import annotations

from slipstream.workers.engine_control import settings_of


def test_each_engines_workers_come_after_those_of_the_one_before() -> None:
    told = {"rank_offset": 1, "world_size": 7}
    assert [settings_of(told, index=i, num_workers_each=2)["rank_offset"] for i in range(3)] == [1, 3, 5]
    assert told["rank_offset"] == 1
