"""Replay of an engine's routes: a mixture's learner sends each token to the experts that the engine's routers chose.

Engine and learner round differently, and where two experts are nearly equal a rounding chooses the other one: the
log-probability of the token then differs by far more than rounding. With the engine's routes the learner computes the
function that the engine sampled from. Weights of the chosen experts are still the learner's own, so routers get their
gradient through these.

Legend: `L` layers, `T` inputs, `B` rows, `K` experts a token.

Source: arXiv:2510.11370; the routers are Megatron-Core's (`RouterReplay`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from slipstream.learner import parallel


@contextmanager
def replayed(gpt: GPTModel, routes_LTBK: Tensor | None) -> Iterator[None]:
    """Send the tokens of a forward pass inside the block to these experts; None leaves the choice to the routers.

    Layers that are computed again for the gradient take the routes of their forward passes, in the same order.
    """
    routers = {} if routes_LTBK is None else dict(_routers(gpt))
    for layer, router in routers.items():
        assert routes_LTBK is not None
        router.set_target_indices(parallel.context_part(routes_LTBK[layer], 0).flatten(0, 1))
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    yield
    for router in routers.values():
        router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def forget_routes(gpt: GPTModel) -> None:
    """Leave the choice to the routers again, after the last backward pass."""
    for _, router in _routers(gpt):
        router.clear_indices()
        router.clear_router_replay_action()


def _routers(gpt: GPTModel) -> Iterator[tuple[int, RouterReplay]]:
    """List the layers with experts on this pipeline stage, by their number in the whole model, from 0."""
    decoder: Any = gpt.decoder  # declares its layers as modules of any class
    for layer in decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            router: Any = layer.mlp.router  # declared as an interface
            replay: RouterReplay | None = router.router_replay
            assert replay is not None, "`layers.build_model` asks for it"
            yield layer.layer_number - 1, replay
