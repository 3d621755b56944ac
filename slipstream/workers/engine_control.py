"""Steering all engines at once from another process, with a deadline and the name of whoever misses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from slipstream.refit.config import Channel, ChannelBrokeError, RefitError

_AFTER_FAILURE_S = 10.0  # for the others to end as well, or to die


def node_address() -> str:
    """This process's host, as other hosts of the Ray cluster reach it."""
    return ray.util.get_node_ip_address()


class RayEngineControl:
    """Engines that run as Ray actors: see `slipstream.refit.channel.sender.EngineControl`.

    Made by the driver, used in the learner's rank 0, which it travels to.
    """

    def __init__(self, actors: Sequence[Any], *, channel: Channel, num_workers_each: int, timeout_s: float) -> None:
        self._actors = list(actors)
        self._channel = channel
        self._num_workers_each = num_workers_each
        self._timeout_s = timeout_s
        self._is_draft = False

    @property
    def num_workers(self) -> int:
        """See `EngineControl.num_workers`."""
        return len(self._actors) * self._num_workers_each

    def aim(self, *, is_draft: bool) -> None:
        """See `EngineControl.aim`."""
        self._is_draft = is_draft

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `EngineControl.init_weight_transfer_engine`: each engine's workers come after those of the one before."""

        def join(index: int, actor: Any) -> Any:
            settings = settings_of(init_info, index=index, num_workers_each=self._num_workers_each)
            return actor.join_channel.remote(self._channel, settings)

        self._on_all(f"join the {self._channel.value} channel", join)

    def start_weight_update(self) -> None:
        """See `EngineControl.start_weight_update`."""
        self._on_all("start a weight update", lambda _, actor: actor.start_update.remote(is_draft=self._is_draft))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """See `EngineControl.update_weights`."""
        shared = ray.put(update_info)
        self._on_all("receive weights", lambda _, actor: actor.update.remote(self._channel, shared))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See `EngineControl.finish_weight_update`; versions are adopted later."""
        del weight_version
        self._on_all("finish a weight update", lambda _, actor: actor.finish_update.remote())

    def _on_all(self, action: str, call: Callable[[int, Any], Any]) -> None:
        calls = [call(index, actor) for index, actor in enumerate(self._actors)]
        names = [f"engine {index}" for index in range(len(calls))]
        answers_of(calls, names=names, action=action, timeout_s=self._timeout_s)


def settings_of(init_info: Mapping[str, Any], *, index: int, num_workers_each: int) -> dict[str, Any]:
    """What engine number `index` is told: vLLM's senders know one engine, whose workers have the first ranks."""
    settings = dict(init_info)
    if "rank_offset" in settings:
        settings["rank_offset"] += index * num_workers_each
    return settings


def answers_of(calls: Sequence[Any], *, names: Sequence[str], action: str, timeout_s: float) -> list[Any]:
    """The results of calls that wait for one another, so that one failure leaves the others waiting or failing too.

    Raises:
        RefitError: not all of them have one. See `blamed`.
    """
    deadline = time.monotonic() + timeout_s
    named = dict(zip(calls, names, strict=True))
    pending, failed = list(calls), {}
    while pending:
        ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for each in ready:
            try:
                ray.get(each)
            except RayActorError as error:
                raise RefitError(f"{named[each]} died and could not {action}: {_last_line(error)}") from error
            except RayTaskError as error:
                failed[named[each]] = error
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
    error = blamed(failed, [named[each] for each in pending], action=action, timeout_s=timeout_s)
    if error is not None:
        raise error
    return ray.get(list(calls))


def blamed(
    failed: Mapping[str, Exception], silent: Sequence[str], *, action: str, timeout_s: float
) -> RefitError | None:
    """The error that names whoever is to blame; None if nobody is.

    One that failed by itself comes first, then those that are silent, and last one that says that somebody else broke
    the channel. An error that names an engine already stays as it is.
    """
    own = {name: error for name, error in failed.items() if not isinstance(error, ChannelBrokeError)}
    if not own and silent:
        return RefitError(f"{', '.join(silent)} did not {action} within {timeout_s:g} s")
    for name, error in (own or failed).items():
        if name in own and isinstance(error, RefitError):
            return error
        return RefitError(f"{name} could not {action}: {_last_line(error)}")
    return None


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]
