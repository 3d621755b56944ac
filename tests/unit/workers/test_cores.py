"""Workers of one host fit their threads to who else is at work there."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from slipstream.workers.calls import Deadline, Proxy, Worker
from slipstream.workers.cores import CoreShare, CoreSlot, set_threads, shared_cores, write_shared


@pytest.fixture(autouse=True)
def same_threads_after():
    before = torch.get_num_threads()
    yield
    set_threads(before)


def shares(directory: Path, num_workers: int, *, most: int, cores: int) -> list[CoreShare]:
    write_shared(directory / "at_work", num_workers)
    return [CoreShare(CoreSlot(directory / "at_work", i), most=most, cores=cores) for i in range(num_workers)]


def test_two_at_work_halve_the_cores_and_have_them_back_when_the_other_rests(tmp_path: Path) -> None:
    engine, learner = shares(tmp_path, 2, most=4, cores=4)
    with learner.at_work():
        with engine.at_work():
            assert engine.num_threads == learner.num_threads == 2
            learner.fit()
            assert torch.get_num_threads() == 2
        assert learner.num_threads == 4
        learner.fit()
        assert torch.get_num_threads() == 4
    alone, _ = shares(tmp_path, 2, most=3, cores=4)
    with alone.at_work():
        assert alone.num_threads == torch.get_num_threads() == 3  # all that it may take


def test_everybody_keeps_a_thread_where_more_work_than_there_are_cores(tmp_path: Path) -> None:
    first, second, third = shares(tmp_path, 3, most=2, cores=2)
    with first.at_work(), second.at_work(), third.at_work():
        assert [each.num_threads for each in (first, second, third)] == [1, 1, 1]


def test_one_whose_results_depend_on_its_threads_never_changes_them(tmp_path: Path) -> None:
    engine, _ = shares(tmp_path, 2, most=4, cores=4)
    learner = CoreShare(CoreSlot(tmp_path / "at_work", 1), most=4, cores=4, changes=False)
    assert learner.num_threads == 2
    with engine.at_work():
        assert learner.num_threads == 2


def test_one_that_failed_no_longer_counts_and_one_that_leaves_has_its_own_number_of_threads(tmp_path: Path) -> None:
    engine, learner = shares(tmp_path, 2, most=2, cores=2)
    with pytest.raises(RuntimeError, match="lost"), engine.at_work():
        raise RuntimeError("lost")
    assert learner.num_threads == 2
    with learner.at_work(), engine.at_work():
        assert torch.get_num_threads() == 1
    engine.leave()
    assert torch.get_num_threads() == 2


class Party(Proxy):
    def __init__(self, *node_ids: str) -> None:
        workers = [Worker(None, f"worker {i}", node_id=node_id) for i, node_id in enumerate(node_ids)]
        super().__init__(workers, Deadline(1.0, "fixed"))
        self.handed: list[Sequence[CoreSlot | None]] = []
        self.could_join: list[bool] = []

    def share_cores(self, slots: Sequence[CoreSlot | None]) -> None:
        self.handed.append(slots)
        self.could_join += [slot.path.stat().st_size > slot.index for slot in slots if slot is not None]


def test_workers_of_this_host_get_slots_of_their_own_and_others_none() -> None:
    engines, learner = Party("here", "elsewhere"), Party("here")
    with shared_cores("here", engines, learner):
        ((first, other),), ((second,),) = engines.handed, learner.handed
        assert first is not None
        assert second is not None
        assert other is None
        assert (first.index, second.index) == (0, 1)
        assert first.path == second.path
    assert engines.handed[1:] == [[None, None]]
    assert learner.handed[1:] == [[None]]
    assert engines.could_join == learner.could_join == [True]
    assert not first.path.exists()


def test_after_an_error_no_slot_is_left_for_a_worker_that_replaces_another_and_none_is_called() -> None:
    engines, learner = Party("here"), Party("here")
    with pytest.raises(RuntimeError, match="lost"), shared_cores("here", engines, learner):
        for party in (engines, learner):
            party._slots = tuple(party.handed[0])
        raise RuntimeError("lost")
    assert engines._slots == learner._slots == ()
    assert len(engines.handed) == len(learner.handed) == 1
