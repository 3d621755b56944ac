"""What runs in a rollout engine's process: the engine, which takes the driver's paths and shares its host's cores."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from slipstream.engine.config import EngineConfig
from slipstream.engine.vllm_engine import VllmEngine, without_gpu
from slipstream.refit.config import EngineState
from slipstream.workers.cores import CoreShare, CoreSlot
from slipstream.workers.engine_control import node_address
from slipstream.workers.file_server import here
from slipstream.workers.reservation import require_gpu


class EngineProcess(VllmEngine):
    """A rollout engine in an actor, on whichever host: it takes the driver's paths."""

    def __init__(
        self,
        policy: Path,
        *,
        config: EngineConfig,
        speculative_config: dict[str, Any] | None,
        executor: str | None = None,
        is_in_flight: bool = False,
        can_rest: bool = False,
        origin: str = "",
        logical_gpus: bool = False,
    ) -> None:
        """See `VllmEngine`.

        Args:
            origin: node whose files the paths name.
            logical_gpus: GPUs that Ray gave this process are only counted: it may compute on the CPU.
        Raises:
            PlacementError: it would, and Ray's GPUs are meant to be some.
        """
        if not logical_gpus:
            require_gpu("engine", problem=without_gpu)
        draft = draft_directory(speculative_config)
        if speculative_config is not None and draft is not None:
            speculative_config = {**speculative_config, "model": str(here(draft, origin))}
        _name_interface()
        super().__init__(
            here(policy, origin),
            config=config,
            speculative_config=speculative_config,
            executor=executor,
            is_in_flight=is_in_flight,
            can_rest=can_rest,
        )
        self._origin = origin
        self._dtype = config.dtype
        self._most_threads = config.num_threads
        self._share: CoreShare | None = None

    def share_cores(self, slot: CoreSlot | None) -> None:
        """Leave some of the host's cores to a learner that works at the same time; None: no longer.

        The ranks of a tensor-parallel engine, which have processes of their own, keep their threads.
        """
        if self._share is not None:
            self._share.leave()
        if slot is None:
            self._share = None
            self.around_work(nullcontext, None)
        else:
            from slipstream.learner.numerics import engine_keeps_bits

            self._share = CoreShare(slot, most=self._most_threads, changes=engine_keeps_bits(self._dtype))
            self.around_work(self._share.at_work, self._share.fit)

    def refit(
        self, policy: Path, *, policy_version: int, draft: Path | None = None, draft_version: int = 0
    ) -> EngineState:
        """See `VllmEngine.refit`."""
        if draft is not None:
            draft = here(draft, self._origin)
        policy = here(policy, self._origin)
        with nullcontext() if self._share is None else self._share.at_work():
            return super().refit(policy, policy_version=policy_version, draft=draft, draft_version=draft_version)


def _name_interface() -> None:
    """Tell gloo, which vLLM uses too, of this host's interface: it would ask for the host's name, which may have none.

    The ranks of a tensor-parallel engine inherit it.
    """
    address = node_address()
    if address != "127.0.0.1":
        from slipstream.learner.rendezvous import interface_of

        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address))


def draft_directory(speculative_config: dict[str, Any] | None) -> Path | None:
    """Of the draft's own weights; None without a draft, and where it has none."""
    if speculative_config is None or "model" not in speculative_config:
        return None
    return Path(speculative_config["model"])
