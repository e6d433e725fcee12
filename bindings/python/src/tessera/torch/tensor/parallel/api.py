"""`parallelize_module`: PyTorch's, after checks that need no change to undo."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel import parallelize_module as _parallelize

from ....errors import InvalidArgument
from .agreement import agree
from .checks import Shared, check, describe_modules, shared_parameters
from .names import remember
from .plan import Resolved, describe, resolve

__all__ = ["parallelize_module"]


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
    strict: bool = True,
) -> nn.Module:
    """Apply a plan of parallel styles to a module, in place. Collective over the ranks of the mesh.

    Everything is checked on all ranks before a module is changed, so after an error the model is unchanged. The ranks
    compare a hash of the plan and of the parameters that it covers, which is one all-gather of 32 bytes.

    Parameters
    ----------
    module : Module
        The model, or a part of it. The names of its parameters do not change; the parameters that the plan covers
        become DTensors.
    device_mesh : DeviceMesh, optional
        The tensor-parallel ranks, a mesh of one dimension: ``mesh["tp"]``. By default the mesh of the ``with`` block.
    parallelize_plan : ParallelStyle or dict of str to ParallelStyle, optional
        The style of `module`, or styles by names of modules below it. A part of a name may be a pattern:
        ``"layers.*.attn.wq"``. The name ``""`` is `module`. Without a plan there is a warning, and nothing changes.
    src_data_rank : int or None
        The rank of the mesh whose parameter values all ranks get. None: each rank keeps its part of its own values, so
        the ranks must have the same; nothing is sent.
    strict : bool
        If False, names that match no module, and shared parameters that styles would separate, only cause a warning, as
        in PyTorch's function (for shared parameters it has none).

    Returns
    -------
    The module.

    Raises
    ------
    InvalidArgument
        Names match no module; the message lists all of them with the closest existing names. Or the mesh has several
        dimensions, two styles shard one parameter, or modules share a parameter that their styles shard differently.
    Unsupported
        A style needs an `nn.Linear` or `nn.Embedding`, and the module is another.
    InvalidState
        Parameters are managed by FSDP, or were sharded before.
    Mismatch
        On every rank: the plans or modules of the ranks differ. The message names ranks and the first difference.
    TypeError
        The plan is neither a style nor a dict of styles.
    """
    mesh = _mesh(device_mesh)
    plan, resolved, shared, problem = parallelize_plan, Resolved(), list[Shared](), None
    try:
        if plan is not None:
            resolved = resolve(module, plan)
            shared = shared_parameters(module, resolved.places)
            if strict:
                _refuse(resolved, shared)
            check(module, resolved.places, mesh)
    except Exception as error:  # after the other ranks know of it
        problem = error
    lines = [*describe(plan), f"src_data_rank is {src_data_rank}, strict is {strict}"]
    agree(mesh, "parallelize_module", [*lines, *describe_modules(resolved.places), f"{problem or 'no error'}"])
    if problem is not None:
        raise problem
    if plan is None:
        warnings.warn("parallelize_module got no parallelize_plan, so it changes nothing", stacklevel=2)
        return module
    _warn(resolved, shared)
    result: Any = module
    for place in resolved.places:
        remember(place.module, place.name)
        done = _parallelize(place.module, mesh, place.style, src_data_rank=src_data_rank)
        result = done if place.module is module and isinstance(plan, ParallelStyle) else result
    for one in shared:
        if not one.share_again() and one.fits:
            warnings.warn(f"the modules of {one} shared this parameter, but now have their own", stacklevel=2)
    return result


def _mesh(given: DeviceMesh | None) -> DeviceMesh:
    mesh = _mesh_resources.get_current_mesh() if given is None else given
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"device_mesh is a {type(mesh).__name__}; it must be a DeviceMesh")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        if names:
            name = "tp" if "tp" in names else names[-1]
            advice = f"pass the dimension of the tensor-parallel ranks: mesh[{name!r}]"
        else:
            advice = "name the dimensions by init_device_mesh(..., mesh_dim_names=('dp', 'tp')), and pass mesh['tp']"
        raise InvalidArgument(f"device_mesh has {mesh.ndim} dimensions{f' {names}' if names else ''}; {advice}")
    return mesh


def _refuse(resolved: Resolved, shared: list[Shared]) -> None:
    if resolved.unmatched:
        raise InvalidArgument(
            f"parallelize_plan names modules that do not exist: {', '.join(resolved.unmatched)}. "
            "strict=False skips them"
        )
    for one in shared:
        if not one.fits:
            raise InvalidArgument(
                f"{one} are one shared parameter, but their styles would make them different ones. Use styles that "
                "shard it the same way, such as RowwiseParallel of an Embedding with ColwiseParallel of a Linear; "
                "strict=False separates them"
            )


def _warn(resolved: Resolved, shared: list[Shared]) -> None:
    if resolved.unmatched:
        warnings.warn(
            f"parallelize_plan names modules that do not exist: {', '.join(resolved.unmatched)}", stacklevel=3
        )
    if resolved.skipped:
        warnings.warn(f"parallelize_plan leaves modules out: {', '.join(resolved.skipped)}", stacklevel=3)
    for one in shared:
        if not one.fits:
            warnings.warn(f"{one} were one shared parameter, and will be different ones", stacklevel=3)
