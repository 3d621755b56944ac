"""Client of the Kubernetes API, whose refusals and time-outs are rows of a table."""

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
    """A row of the preflight's table: the subject, its state, the need and the fix."""

    what: str
    found: str
    needed: str
    state: State
    fix: str = ""

    @classmethod
    def of(cls, what: str, *, found: str, needed: str, fix: str) -> Finding:
        """Make a finding whose state is missing if there is a fix, else fine."""
        return cls(what=what, found=found, needed=needed, state=State.MISSING if fix else State.FINE, fix=fix)


class Refusal(Exception):  # noqa: N818  # it is no error of this process
    """Reason for a missing answer; `status` is the HTTP status, 0 if the server did not answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason

    @property
    def is_absent(self) -> bool:
        """True if the server says that the object does not exist."""
        return self.status == 404

    def finding(self, what: str, *, needed: str, right: str, absent: str) -> Finding:
        """Make the row of a check that got no answer.

        Args:
            right: right that the caller needs, as in `list nodes`.
            absent: fix for an object that does not exist.
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
    """An API server, and the time limit of a call."""

    client: k8s.ApiClient
    timeout_s: float

    @property
    def core(self) -> k8s.CoreV1Api:
        """Calls of the core API."""
        return k8s.CoreV1Api(self.client)

    def ask(self, call: Callable[..., Any], *arguments: object, **options: object) -> Any:
        """Return the answer of `call` within the time limit, or raise a `Refusal`.

        The result is `Any`, because the client types every field as optional, also fields that the API always sets.
        """
        try:
            return call(*arguments, _request_timeout=self.timeout_s, **options)
        except k8s.ApiException as error:
            raise Refusal(error.status or 0, _reason(error)) from error
        except urllib3.exceptions.HTTPError as error:
            is_refused = isinstance(error, urllib3.exceptions.NewConnectionError)  # a subclass of urllib3's time-out
            if isinstance(error, urllib3.exceptions.TimeoutError) and not is_refused:
                raise Refusal(0, f"no answer within {self.timeout_s:g} s") from error
            raise Refusal(0, f"no connection: {error}") from error


def connect(*, context: str | None, timeout_s: float) -> Api:
    """Connect to the cluster of the kubeconfig's `context`, or to the cluster of this pod."""
    configuration = k8s.Configuration()
    try:
        try:
            # The client itself reads the variable only once, at import.
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
    """Make the API of a configuration without retries, which would triple the wait for a silent server."""
    configuration.retries = False
    return Api(client=k8s.ApiClient(configuration), timeout_s=timeout_s)


def delete_pod(api: Api, namespace: str, execution: str, node: str) -> bool:
    """Delete the pods of an execution's node, which Flyte labels with both names; return False if none was deleted."""
    selector = f"execution-id={execution},node-id={node}"
    try:
        found = api.ask(api.core.list_namespaced_pod, namespace, label_selector=selector).items
    except Refusal:
        return False
    running = [pod.metadata.name for pod in found if pod.status.phase == "Running"]
    return any([delete(api, namespace, pod) for pod in running])


def delete(api: Api, namespace: str, pod: str) -> bool:
    """Delete a pod at once; return False if the server refuses."""
    try:
        api.ask(api.core.delete_namespaced_pod, pod, namespace, grace_period_seconds=0)
    except Refusal as refusal:
        return refusal.is_absent
    return True


def _reason(error: k8s.ApiException) -> str:
    """Format status and message of the server; the message names the user and the verb."""
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason or "no reason given"
    return f"{error.status}: {message}"
