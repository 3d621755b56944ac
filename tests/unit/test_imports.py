"""Imports without garbage collections."""

import gc

import pytest

from slipstream.imports import uncollected


def test_collections_stop_and_go_on_again_after_an_error_too() -> None:
    frozen = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), uncollected():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_a_process_that_collects_nothing_stays_so() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
