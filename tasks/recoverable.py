"""Retries of a task: Flyte retries only after a `FlyteRecoverableException`."""

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
    """Configure logging, and re-raise transient errors of a task as `FlyteRecoverableException`.

    The decorator stands below `@task`. Interrupts pass unchanged: they leave no error document, so Flyte treats the pod
    as lost and starts another attempt.
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
