"""Which outputs of which stages a stage takes, and which of them skip stages.

Stages made by hand are a chain: each takes the outputs of the one before it. The graph of a traced `Pipe` may also
connect stages that are not neighbours, and is the same on every rank.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import Unsupported

__all__ = ["Routes", "routes_of"]


@dataclass
class Routes:
    """The connections of all stages."""

    edges: Sequence[tuple[int, int, int]] = ()
    """The skip connections of `tessera.Pipeline`."""
    taken: Sequence[Sequence[int]] | None = None
    """By stage, which of the tensors that it receives its module takes, in order. None: all."""

    def args_of(self, stage: int, received: tuple[Any, ...]) -> tuple[Any, ...]:
        """The module's positional arguments."""
        return received if self.taken is None else tuple(received[i] for i in self.taken[stage])

    def grads_at(self, stage: int, outputs: int) -> list[list[int]]:
        """For each of a stage's outputs, where its gradients are among those that a backward gets."""
        skipping = [output for source, output, _ in self.edges if source == stage]
        order = [output for output in range(outputs) if output not in skipping] + skipping
        return [[at for at, output in enumerate(order) if output == one] for one in range(outputs)]


def routes_of(stage: Any) -> Routes:
    """The connections of the pipeline to which a stage of PyTorch's belongs.

    Raises
    ------
    Unsupported
        A stage after the first takes an argument of the whole model.
    """
    info = getattr(stage, "pipe_info", None)
    if info is None:
        return Routes()
    nodes = [node for node in info.graph.nodes if node.op == "call_module"]
    number = {node: i for i, node in enumerate(nodes)}
    sources = [[_source(one, number, i) for one in node.args] for i, node in enumerate(nodes)]
    takers: dict[tuple[int, int], list[int]] = {(i, out): [] for i, node in enumerate(nodes) for out in _outputs(node)}
    for i, some in enumerate(sources[1:], 1):
        for source in some:
            assert source is not None
            if i not in takers[source]:
                takers[source].append(i)
    edges = [
        (source, output, taker)
        for (source, output), stages in takers.items()
        if stages and stages != [source + 1]
        for taker in stages
    ]
    skipping = {(source, output) for source, output, _ in edges}
    taken: list[list[int]] = [[]]
    for i, some in enumerate(sources[1:], 1):
        received = [source for source in takers if source[0] == i - 1 and source not in skipping]
        received += [(source, output) for source, output, taker in edges if taker == i]
        taken.append([received.index(source) for source in some if source is not None])
    return Routes(edges, taken)


def _outputs(node: Any) -> list[int]:
    """The outputs of a stage, in order."""
    several = [user.args[1] for user in node.users if user.target is operator.getitem]
    return sorted(several) or [0]


def _source(node: Any, number: dict[Any, int], taker: int) -> tuple[int, int] | None:
    """The stage and output that an argument is; None for an argument of the first stage."""
    if taker == 0:
        return None
    output = 0
    if node.op == "call_function" and node.target is operator.getitem:
        node, output = node.args
    if node not in number:
        raise Unsupported(
            f"stage {taker} takes {node.name!r}, an argument of the whole model; only stage 0 gets those: return it "
            "from the stages before"
        )
    return number[node], output
