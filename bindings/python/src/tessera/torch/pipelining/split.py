"""The two parts of a backward: first the gradients of the inputs, for which the stage before waits, then those of the
weights.

PyTorch's `stage_backward_input` finds where the paths to the weights leave the paths to the inputs, and keeps the
gradients that pass there. The weights' part continues from there, so nothing is computed twice. Where that would miss
a gradient, or count one twice, there is nothing to continue from, and the weights' part is the entire backward again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input

__all__ = ["finish_weights", "grads_of_inputs"]

Rest = list[tuple[Any, Sequence[Any], list[torch.Tensor]]]  # a node, the gradients that arrived there, weights beyond


def grads_of_inputs(
    roots: Sequence[Any], grads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], weights: Iterable[Any]
) -> tuple[Sequence[torch.Tensor | None], Rest | None]:
    """The gradients of the inputs, and what `finish_weights` needs; None if it must be the entire backward."""
    edges = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
    found, groups = stage_backward_input(edges, list(grads), list(inputs), iter(weights))
    own = {id(one): one for one in inputs}
    for one in inputs:
        one.grad = None
    rest: Rest = []
    for group in groups:
        nodes, arrived = group["intermediates"], group.get("grads")
        if len(nodes) > 1 or not arrived or arrived[0] is None:
            return found, None
        rest.append((nodes[0], arrived[0], [node.variable for node in group["params"]]))
    reached = {id(weight) for _, _, some in rest for weight in some}
    if any(id(leaf) not in reached and id(leaf) not in own for leaf in _leaves(edges)):
        return found, None
    return found, rest


def _leaves(edges: Sequence[GradientEdge]) -> list[torch.Tensor]:
    """The tensors that a backward accumulates into."""
    seen, found = set(), []
    waiting = [edge.node for edge in edges]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def finish_weights(rest: Rest) -> None:
    """Accumulate into the weights."""
    for node, arrived, weights in rest:
        given = [(GradientEdge(node, i), grad) for i, grad in enumerate(arrived) if grad is not None]
        if given:
            torch.autograd.backward([edge for edge, _ in given], [grad for _, grad in given], inputs=weights)
