"""A task's failures in Flyte's words: only `FlyteRecoverableException` makes Flyte use an attempt that is left."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from flytekit.exceptions.user import FlyteRecoverableException

from slipstream import logs
from slipstream.stages.failures import transient

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def recoverable(body: Callable[P, R]) -> Callable[P, R]:
    """Show our log, and raise what another attempt may outlive as `FlyteRecoverableException`; all else passes.

    Stands below `@task`. Interrupts pass: they leave no error document, so Flyte counts the pod as lost and starts
    another.
    """

    @functools.wraps(body)
    def attempt(*args: P.args, **kwargs: P.kwargs) -> R:
        logs.configure()
        try:
            return body(*args, **kwargs)
        except Exception as error:
            reason = transient(error)
            if reason is None:
                raise
            logger.error("%s: another attempt may succeed (%s)", body.__name__, reason)
            raise FlyteRecoverableException(f"{reason}: {type(error).__name__}: {error}") from error

    return attempt
