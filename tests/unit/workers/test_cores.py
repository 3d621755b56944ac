"""Workers that compute at the same time divide their host's cores."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.workers import cores
from slipstream.workers.calls import Deadline, Proxy, Worker
from slipstream.workers.cores import set_threads, shared_cores


class Party(Proxy):
    """Workers that answer at once; `told` has the limits of each."""

    def __init__(self, *node_ids: str) -> None:
        self.told: list[list[Any]] = [[] for _ in node_ids]
        actors = [SimpleNamespace(limit_threads=SimpleNamespace(remote=told.append)) for told in self.told]
        places = enumerate(zip(actors, node_ids, strict=True))
        workers = [Worker(actor, f"worker {i}", node_id=node_id) for i, (actor, node_id) in places]
        super().__init__(workers, Deadline(1.0, "fixed"))
        self._crew.gather = lambda *_, **__: []


@pytest.mark.parametrize(("num_cores", "num_threads"), [(2, 1), (4, 2), (5, 2), (1, 1)])
def test_workers_of_this_host_get_equal_shares_in_the_block_and_others_keep_their_threads(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_threads: int
) -> None:
    monkeypatch.setattr(cores, "num_cores", lambda: num_cores)
    engines, learner = Party("here", "elsewhere"), Party("here")
    with shared_cores("here", engines, learner):
        assert (engines.told, learner.told) == ([[num_threads], [None]], [[num_threads]])
    assert (engines.told, learner.told) == ([[num_threads, None], [None, None]], [[num_threads, None]])


def test_after_an_error_no_limit_is_left_for_a_worker_that_replaces_another_and_none_is_called() -> None:
    engines, learner = Party("here"), Party("here")
    with pytest.raises(RuntimeError, match="lost"), shared_cores("here", engines, learner):
        assert engines._limit is not None
        raise RuntimeError("lost")
    assert engines._limit is learner._limit is None
    assert len(engines.told[0]) == len(learner.told[0]) == 1


def test_a_number_of_threads_is_that_of_torch_and_of_its_openmp() -> None:
    before = torch.get_num_threads()
    try:
        for count in (2, 1):
            set_threads(count)
            assert torch.get_num_threads() == count
            assert {runtime.omp_get_max_threads() for runtime in cores._runtimes()} == {count}
    finally:
        set_threads(before)
