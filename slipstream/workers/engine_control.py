"""Steering all engines at once from another process, with a deadline and the name of whoever misses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from slipstream.refit.config import Channel
from slipstream.workers.calls import Deadline, Worker, answers

_CAUSE_S = 10.0  # for the cause of a broken channel to show, before whoever waits for this process loses patience


def node_address() -> str:
    """This process's host, as other hosts of the Ray cluster reach it."""
    return ray.util.get_node_ip_address()


class RayEngineControl:
    """Engines that run as Ray actors: see `slipstream.refit.stream.EngineControl`.

    Made by the driver, used in the learner's rank 0, which it travels to.
    """

    def __init__(self, engines: Sequence[Worker], *, channel: Channel, num_workers_each: int, timeout_s: float) -> None:
        self._engines = list(engines)
        self._channel = channel
        self._num_workers_each = num_workers_each
        self._deadline = Deadline(timeout_s, "refit.timeout_s")
        self._is_draft = False
        self._last_done = "nothing yet"

    @property
    def num_workers(self) -> int:
        """See `EngineControl.num_workers`."""
        return len(self._engines) * self._num_workers_each

    def aim(self, *, is_draft: bool) -> None:
        """See `EngineControl.aim`."""
        self._is_draft = is_draft

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `EngineControl.init_weight_transfer_engine`: each engine's workers come after those of the one before."""

        def join(index: int, actor: Any) -> Any:
            settings = settings_of(init_info, index=index, num_workers_each=self._num_workers_each)
            return actor.join_channel.remote(self._channel, settings)

        self._on_all(f"joining the {self._channel.value} channel", join)

    def start_weight_update(self) -> None:
        """See `EngineControl.start_weight_update`."""
        self._on_all("the start of an update", lambda _, actor: actor.start_update.remote(is_draft=self._is_draft))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """See `EngineControl.update_weights`."""
        shared = ray.put(update_info)
        self._on_all("a transfer of weights", lambda _, actor: actor.update.remote(self._channel, shared))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See `EngineControl.finish_weight_update`; versions are adopted later."""
        del weight_version
        self._on_all("the end of an update", lambda _, actor: actor.finish_update.remote())

    def _on_all(self, what: str, call: Callable[[int, Any], Any]) -> None:
        calls = [(engine, call(index, engine.actor)) for index, engine in enumerate(self._engines)]
        answers(calls, what=what, deadline=self._deadline, last_done=self._last_done, cause_s=_CAUSE_S)
        self._last_done = what


def settings_of(init_info: Mapping[str, Any], *, index: int, num_workers_each: int) -> dict[str, Any]:
    """What engine number `index` is told: vLLM's senders know one engine, whose workers have the first ranks."""
    settings = dict(init_info)
    if "rank_offset" in settings:
        settings["rank_offset"] += index * num_workers_each
    return settings
