"""The Kubernetes API, asked so that a refusal or silence is an answer too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import urllib3.exceptions
from kubernetes import client as k8s
from kubernetes import config as kubeconfig

from slipstream.config import ConfigError


class State(StrEnum):
    """Outcome of a check."""

    FINE = "fine"
    MISSING = "MISSING"
    UNCHECKED = "not checked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One row: what was looked at, what was found, what is needed, and how to get there."""

    what: str
    found: str
    needed: str
    state: State
    fix: str = ""

    @classmethod
    def of(cls, what: str, *, found: str, needed: str, fix: str) -> Finding:
        """Fine without a fix, or missing with it."""
        return cls(what=what, found=found, needed=needed, state=State.MISSING if fix else State.FINE, fix=fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why there is no answer; `status` is HTTP's, 0 for a server that did not answer at all."""

    status: int
    reason: str

    @property
    def is_absent(self) -> bool:
        """The server knows that there is no such thing."""
        return self.status == 404

    def finding(self, what: str, *, needed: str, right: str, absent: str) -> Finding:
        """The row of a check that ended here.

        Args:
            right: what the caller must be allowed to do, as in `list nodes`.
            absent: the fix where the thing does not exist.
        """
        by_status = {
            401: "log in again: the API server does not accept these credentials",
            403: f"let this account {right}, or run the preflight as one that may",
            404: absent,
            0: "is the API server's address right, and does a firewall let this host through?",
        }
        fix = by_status.get(self.status) or "see the API server's log"
        return Finding.of(what, found="absent" if self.is_absent else self.reason, needed=needed, fix=fix)


@dataclass(frozen=True, kw_only=True)
class Api:
    """One API server and how long it is waited for."""

    client: k8s.ApiClient
    timeout_s: float

    def ask(self, call: Callable[..., Any], *arguments: object, **options: object) -> Any:
        """Return what `call` answers within the time limit, or a `Refusal`.

        The client types every field of an answer as optional, also those that the API always sets: hence `Any`.
        """
        try:
            return call(*arguments, _request_timeout=self.timeout_s, **options)
        except k8s.ApiException as error:
            return Refusal(status=error.status or 0, reason=_reason(error))
        except urllib3.exceptions.NewConnectionError as error:  # a kind of time-out to urllib3
            return Refusal(status=0, reason=f"no connection: {error}")
        except urllib3.exceptions.TimeoutError:
            return Refusal(status=0, reason=f"no answer within {self.timeout_s:g} s")
        except urllib3.exceptions.HTTPError as error:
            return Refusal(status=0, reason=f"no connection: {error}")


def connect(*, context: str | None, timeout_s: float) -> Api:
    """The cluster of the kubeconfig's `context`, or the one that this pod runs in.

    Raises:
        ConfigError: there is neither.
    """
    configuration = k8s.Configuration()
    try:
        try:
            # Named here, for the client reads the variable once, when it is imported.
            path = os.environ.get("KUBECONFIG") or None
            kubeconfig.load_kube_config(config_file=path, context=context, client_configuration=configuration)
        except kubeconfig.ConfigException:
            if context is not None:
                raise
            kubeconfig.load_incluster_config(client_configuration=configuration)
    except kubeconfig.ConfigException as error:
        fix = "set KUBECONFIG, or name a context of it with --context"
        raise ConfigError(f"--context must name a cluster to ask, got {context!r} ({error}); {fix}") from error
    return api_of(configuration, timeout_s=timeout_s)


def api_of(configuration: k8s.Configuration, *, timeout_s: float) -> Api:
    """The API server of a configuration. A call is made once: a silent server would be waited for thrice otherwise."""
    configuration.retries = False
    return Api(client=k8s.ApiClient(configuration), timeout_s=timeout_s)


def _reason(error: k8s.ApiException) -> str:
    """The server's own sentence, which names the user and the verb, after the status."""
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason or "no reason given"
    return f"{error.status}: {message}"
