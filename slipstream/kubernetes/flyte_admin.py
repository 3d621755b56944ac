"""Client of flyteadmin's HTTP API: states of executions, nodes and attempts; launches and ends executions.

Source: the gateway's routes and JSON of flyteidl's service/admin.proto, Flyte 1.16; the shapes of answers are those of
a Flyte 1.16.8 (tests/data/flyte). Launching and terminating were never tried on a server.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from slipstream.config import ConfigError
from slipstream.kubernetes.profile import ClusterProfile

TOKEN_VARIABLE = "FLYTE_TOKEN"
"""Environment variable with a bearer token, for a Flyte that asks for one."""

ENDED = ("SUCCEEDED", "FAILED", "ABORTED", "TIMED_OUT")
_EXECUTION = "FLYTE_INTERNAL_EXECUTION_"
_LIMIT = 100


class FlyteError(RuntimeError):
    """Flyteadmin did not answer, or refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Phase of an execution, a node or an attempt, as Flyte names it, with its error."""

    name: str
    phase: str
    message: str = ""
    deck: str = ""  # address of a node's deck
    continues: str = ""  # execution whose outputs a recovered one has taken over

    @property
    def has_ended(self) -> bool:
        """True if Flyte does no more for it."""
        return self.phase in ENDED


@dataclass(frozen=True, kw_only=True)
class FlyteAdmin:
    """Flyteadmin's HTTP port, for one project and domain."""

    endpoint: str
    project: str
    domain: str
    token: str = ""
    timeout_s: float = 10.0

    def execution(self, name: str) -> State | None:
        """Return the state of an execution; None if Flyte knows none of this name."""
        answer = self._ask("GET", self._path("executions", name), absent_is_none=True)
        return None if answer is None else _state(answer, name)

    def going_on(self) -> list[State]:
        """Return the newest executions that have not ended.

        Source: the filters of flyteadmin, pkg/manager/impl/util/filters.go; the column `phase` holds the phase's name.
        """
        order = {"limit": _LIMIT, "sort_by.key": "created_at", "sort_by.direction": "DESCENDING"}
        query = urlencode({**order, "filters": f"value_not_in(phase,{';'.join(ENDED)})"})
        listed = self._ask("GET", f"{self._path('executions')}?{query}").get("executions") or []
        found = [_state(each, each["id"]["name"]) for each in listed]
        return [each for each in found if not each.has_ended]

    def nodes(self, execution: str, *, parent: str = "") -> list[State]:
        """Return the nodes of an execution, or those of its nested workflow `parent`."""
        query = {"limit": _LIMIT, **({"unique_parent_id": parent} if parent else {})}
        path = f"{self._path('node_executions', execution)}?{urlencode(query)}"
        return [_state(each, each["id"]["nodeId"]) for each in self._ask("GET", path).get("nodeExecutions") or []]

    def attempts(self, execution: str, node: str) -> list[State]:
        """Return the attempts of a node's task."""
        path = f"{self._path('task_executions', execution, node)}?limit={_LIMIT}"
        found = self._ask("GET", path).get("taskExecutions") or []
        return [_state(each, str(each["id"].get("retryAttempt", 0))) for each in found]

    def outputs(self, execution: str) -> list[str]:
        """Return the names of an execution's outputs."""
        answer = self._ask("GET", self._path("data/executions", execution))
        return sorted((answer.get("fullOutputs") or {}).get("literals") or {})

    def launch(self, plan: str, version: str, inputs: Mapping[str, Any]) -> str:
        """Start a launch plan of a version with inputs as Flyte's literals; return the execution's name."""
        identifier = {"resourceType": "LAUNCH_PLAN", "project": self.project, "domain": self.domain}
        spec = {"launchPlan": {**identifier, "name": plan, "version": version}, "metadata": {"mode": "MANUAL"}}
        body = {"project": self.project, "domain": self.domain, "spec": spec, "inputs": {"literals": dict(inputs)}}
        return self._ask("POST", "executions", body)["id"]["name"]

    def terminate(self, execution: str, cause: str) -> None:
        """End an execution."""
        self._ask("DELETE", self._path("executions", execution), {"cause": cause})

    def _path(self, kind: str, *names: str) -> str:
        return "/".join([kind, *map(quote, (self.project, self.domain, *names))])

    def _ask(self, method: str, path: str, body: Any = None, *, absent_is_none: bool = False) -> Any:
        request = urllib.request.Request(f"{self.endpoint.rstrip('/')}/api/v1/{path}", method=method)
        request.add_header("Content-Type", "application/json")
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(request, data, timeout=self.timeout_s) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            if error.code == 404 and absent_is_none:
                return None
            fix = f"; set {TOKEN_VARIABLE}" if error.code in (401, 403) else ""
            text = error.read().decode(errors="replace")[:500]
            raise FlyteError(f"flyteadmin at {self.endpoint}: {error.code} {text}{fix}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:  # the last where a port speaks gRPC
            raise FlyteError(f"flyteadmin at {self.endpoint} did not answer {method} {path}: {error!r}") from error


def admin_of(
    profile: ClusterProfile, *, project: str = "", domain: str = "", environment: Mapping[str, str] = os.environ
) -> FlyteAdmin:
    """Make the client of a profile's Flyte; project and domain are by default those of this pod."""
    endpoint = profile.flyte.endpoint
    if endpoint is None:
        fix = "as in http://flyte-http.flyte.svc.cluster.local:8088"
        raise ConfigError(f"flyte.endpoint must be set in the profile {profile.name}, got None; {fix}")
    return FlyteAdmin(
        endpoint=endpoint,
        project=project or environment.get(f"{_EXECUTION}PROJECT", "slipstream"),
        domain=domain or environment.get(f"{_EXECUTION}DOMAIN", "development"),
        token=environment.get(TOKEN_VARIABLE, ""),
    )


def optional_number(value: int) -> dict[str, Any]:
    """Make a literal of an integer for an input that may be left out, which has a union type."""
    number = {"scalar": {"primitive": {"integer": str(value)}}}
    return {"scalar": {"union": {"value": number, "type": {"simple": "INTEGER", "structure": {"tag": "int"}}}}}


def texts(*values: str) -> dict[str, Any]:
    """Make a literal of a list of strings."""
    return {"collection": {"literals": [{"scalar": {"primitive": {"stringValue": value}}} for value in values]}}


def _state(answer: Mapping[str, Any], name: str) -> State:
    closure = answer["closure"]
    metadata = (answer.get("spec") or {}).get("metadata") or {}
    error = closure.get("error") or {}
    aborted = closure.get("abortMetadata") or {}
    return State(
        name=name,
        phase=closure["phase"],
        message=error.get("message") or aborted.get("cause") or "",
        deck=closure.get("deckUri") or "",
        continues=(metadata.get("referenceExecution") or {}).get("name") or "",
    )
