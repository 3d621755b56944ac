"""The refit benchmark refuses what it cannot measure before it starts anything."""

from __future__ import annotations

import pytest

from benchmarks import refit_channels


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden-size", "100"], "error: --hidden-size must divide by 64, got 100\n"),
        (["--repeats", "0"], "error: --repeats must be >= 1, got 0\n"),
    ],
)
def test_bad_input_is_named_and_ends_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refit_channels.main(arguments) == 2
    assert capsys.readouterr().err == message
