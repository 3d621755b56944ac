"""The learner's ranks as a refit sees them: what they send to engines, and the fingerprints that engines must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.refit.channel import Location
from slipstream.refit.fingerprint import Turn, weight_totals
from slipstream.workers.calls import Crew, Deadline, Worker

if TYPE_CHECKING:
    from slipstream.refit.snapshot import Snapshot
    from slipstream.refit.stream import EngineControl, Sent, StreamSettings

_GRACE_S = 30.0  # a sender has its own deadline, and names the engine that missed it: it is given the time to


class SendingRanks:
    """The ranks of one learner, rank 0 first. What each method does stands at `SendingRank`.

    A rank does what it is asked in the order in which it is asked, so what is only started is of the weights that the
    learner has then, whatever is asked of it next.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    @property
    def ranks(self) -> tuple[Worker, ...]:
        """The actors and where they run, rank 0 first."""
        return self._crew.workers

    def locations(self) -> list[Location]:
        """Where each rank computes."""
        return self._crew.ask("location", lambda rank: rank.location.remote())

    def weight_bytes(self) -> int:
        """Size of all models as they are sent to engines."""
        return self._on_all("weight_bytes", lambda rank: rank.weight_bytes.remote())

    def start_publish(self, directory: Path, version: int) -> Callable[[], Snapshot]:
        """Have the present weights written for the engines; what it returns waits for that."""
        wait = self._start(f"publish of policy version {version}", lambda rank: rank.publish.remote(directory, version))
        return lambda: wait()[0]

    def start_publish_draft(self, directory: Path, version: int) -> Callable[[], Snapshot]:
        """The same of the draft."""
        wait = self._start("publish_draft", lambda rank: rank.publish_draft.remote(directory, version))
        return lambda: wait()[0]

    def open_stream(self, settings: StreamSettings, engines: EngineControl) -> None:
        """Join a channel with the engines. See `answers` for errors: engines may be lost as well as ranks."""
        self._crew.ask(
            f"opening the {settings.channel.value} channel",
            lambda rank: rank.open_stream.remote(settings, engines),
            deadline=_sending(settings.timeout_s),
        )

    def stream(self, *, is_draft: bool, timeout_s: float) -> Sent:
        """Send the policy, or the draft, to the engines that joined. Errors as of `open_stream`."""
        what = f"sending the {'draft' if is_draft else 'policy'}"
        deadline = _sending(timeout_s)
        return self._crew.ask(what, lambda rank: rank.stream.remote(is_draft=is_draft), deadline=deadline)[0]

    def close_stream(self) -> None:
        """Leave the channel."""
        self._on_all("close_stream", lambda rank: rank.close_stream.remote())

    def start_fingerprints(self, dtypes: Mapping[str, str], turn: Turn) -> Callable[[], dict[str, int]]:
        """Have the fingerprints computed that an engine with these types must have of the tensors whose turn it is.

        Returns what waits for them.
        """
        wait = self._start("weight_fingerprints", lambda rank: rank.weight_fingerprints.remote(dtypes, turn))
        return lambda: weight_totals(wait())

    def start_draft_fingerprints(self, dtypes: Mapping[str, str], turn: Turn) -> Callable[[], dict[str, int]]:
        """The same of the draft; rank 0 alone answers, once all have gathered what is split over them."""
        wait = self._start("draft_fingerprints", lambda rank: rank.draft_fingerprints.remote(dtypes, turn))
        return lambda: weight_totals(wait())

    def _on_all(self, what: str, call: Callable[[Any], Any]) -> Any:
        return self._crew.ask(what, call)[0]

    def _start(self, what: str, call: Callable[[Any], Any]) -> Callable[[], list[Any]]:
        return self._crew.start(what, call)


def _sending(timeout_s: float) -> Deadline:
    return Deadline(timeout_s + _GRACE_S, f"refit.timeout_s + {_GRACE_S:g}")
