"""An engine's checkpoints: DeepSpeed's calls over `tessera.torch.checkpoint`.

    DIRECTORY/latest         the tag of the last save, written once that is committed
    DIRECTORY/TAG/           a checkpoint of tessera.torch.checkpoint

A checkpoint has the names under which Tessera reads DeepSpeed's own files too, so that both load alike: ``model.NAME``,
``optim.state.NAME.KEY``, ``optim.param_groups.I.KEY``, ``engine.KEY``, ``lr_scheduler.KEY`` and ``client_state.KEY``.
Tensors are complete: a load cuts them as its ranks and its stage need. Ours has each value of the scheduler and the
client in a tuple, which keeps a nested value with its types in one piece.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ..._base import sync_directory
from ...errors import InvalidArgument, InvalidState, Mismatch, NotFound, TesseraIOError
from ...layout import Box
from ..checkpoint import FileSystemReader, load, save
from ..checkpoint.contents import Contents, Saved, Wanted
from ..checkpoint.record import core_name

__all__ = ["Saves", "full_state_dict"]

_LATEST = "latest"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
# The names that DeepSpeed's loss scalers have in its files.
_LOSS_SCALE = {"scale": "cur_scale", "iteration": "cur_iter", "last_overflow": "last_overflow_iter"}
_LOSS_SCALE |= {"hysteresis": "cur_hysteresis"}
_T = TypeVar("_T")


class Saves:
    """The part of an engine that saves and loads."""

    module: nn.Module
    optimizer: Any
    lr_scheduler: Any
    global_steps: int
    _settings: Any
    _ranks: Any
    _loss_scale: Any
    _passes: int
    _diverged: str | None
    _model: Any

    # ------------------------------------------------------------ saving

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        client_sd: Mapping[str, Any] | None = None,
    ) -> bool:
        """Save the module, the optimizer, the scheduler, the loss scale, counters and `client_state`. Collective: all
        ranks call it. It is atomic, and a save of the same tag replaces the previous one.

        Parameters
        ----------
        save_dir : path
            The directory of all checkpoints.
        tag : optional
            The checkpoint's name, by ``str``: by default ``global_stepN``. If ranks have different tags, rank 0's is
            used, with a warning; by ``checkpoint.tag_validation`` without one, or it is an error.
        client_state : mapping, optional
            More to save: rank 0's. Plain data and tensors; other objects are saved, but `load_checkpoint` refuses them.
        save_latest : bool
            Let a load without a tag find this one.
        exclude_frozen_parameters : bool
            Leave out parameters without a gradient.
        client_sd
            Another name of `client_state`.

        Returns
        -------
        True

        Raises
        ------
        Mismatch
            Tags differ, and ``checkpoint.tag_validation`` is "Fail".
        TesseraTimeout
            A rank did not call it in time; the message names it.
        """
        name = self._agreed_tag(f"global_step{self.global_steps}" if tag is None else str(tag))
        directory = Path(save_dir)
        if self._passes:
            warnings.warn(
                f"the gradients of {self._passes} backward passes wait for the optimizer's step; they are not saved",
                stacklevel=2,
            )

        def found() -> dict[str, Any]:
            client = _one_of("client_state", client_state, "client_sd", client_sd)
            if client is not None and not isinstance(client, Mapping):
                raise InvalidArgument(f"client_state is a {type(client).__name__}; it must be a dict")
            return self._whole_state(exclude_frozen_parameters, client if self._ranks.rank == 0 else None)

        save(self._ranks.together(found), checkpoint_id=directory / name)
        if save_latest:
            self._on_rank_0(lambda: _write_latest(directory, name))
        return True

    def _whole_state(self, exclude_frozen: bool, client: Mapping[str, Any] | None) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self._model_state(exclude_frozen), "engine": self._engine_state()}
        if self.optimizer is not None:
            state["optim"] = _optimizer_state(self.module, self.optimizer)
        if self.lr_scheduler is not None and hasattr(self.lr_scheduler, "state_dict"):
            state["lr_scheduler"] = {key: (value,) for key, value in self.lr_scheduler.state_dict().items()}
        if client:
            state["client_state"] = {str(key): (value,) for key, value in client.items()}
        return state

    def _engine_state(self) -> dict[str, Any]:
        state = {key: getattr(self, key) for key in _COUNTERS}
        return {**state, "loss_scale": dict(self._loss_scale.state()), "stage": self._settings.stage}

    def _model_state(self, exclude_frozen: bool = False) -> dict[str, Any]:
        state = self.module.state_dict()
        if not exclude_frozen:
            return state
        frozen = {name for name, param in self.module.named_parameters() if not param.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def _agreed_tag(self, tag: str) -> str:
        """Rank 0's tag. Collective."""
        tags = [content.decode(errors="replace") for content in self._ranks.gather(tag.encode(errors="replace"))]
        for one in tags:
            if one in ("", ".", "..", _LATEST) or "/" in one or "\0" in one:
                raise InvalidArgument(f"the tag is {one!r}; it must be the name of a directory other than {_LATEST!r}")
        other = next((rank for rank, one in enumerate(tags) if one != tags[0]), None)
        validation = self._settings.tag_validation
        if other is None or validation == "Ignore":
            return tags[0]
        told = f"rank 0 saves as {tags[0]!r}, rank {other} as {tags[other]!r}"
        if validation == "Fail":
            raise Mismatch(f"the tags differ: {told}; average what the tag is made of over the ranks, or pass a step")
        if self._ranks.rank == 0:
            warnings.warn(f"the tags differ: {told}; rank 0's is used", stacklevel=3)
        return tags[0]

    def _on_rank_0(self, act: Callable[[], None]) -> None:
        """Let rank 0 act, and return when it has. If it fails, all ranks raise."""

        def acted() -> None:
            if self._ranks.rank == 0:
                act()

        self._ranks.together(acted)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the complete module's state by ``torch.save``, in the dtype in which it computes, at every stage.
        Collective.

        Returns
        -------
        True
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.module, options=options)
        wanted = self._model_state(exclude_frozen_parameters).keys()
        dtype = self._settings.dtype

        def write() -> None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            cast = {
                name: value.to(dtype) if dtype is not None and value.is_floating_point() else value
                for name, value in state.items()
                if name in wanted
            }
            torch.save(cast, Path(save_dir) / save_filename)

        self._on_rank_0(write)
        return True

    save_fp16_model = save_16bit_model

    # ------------------------------------------------------------ loading

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` saved at any world size and stage, or what DeepSpeed itself saved. Collective.

        Parameters
        ----------
        load_dir, tag
            As for `save_checkpoint`; without a tag, the last save.
        load_module_strict : bool
            Parameters and buffers must be the same as those of the checkpoint. Otherwise the names of both are loaded.
        load_optimizer_states, load_lr_scheduler_states : bool
            Whether these are loaded; counters and the loss scale always are.
        load_module_only : bool
            Load parameters and buffers alone.
        custom_load_fn
            Not supported.

        Returns
        -------
        The checkpoint's path, and its client state; (None, None), with a warning, if there is no checkpoint and no tag
        is given.

        Raises
        ------
        NotFound
            There is none of this tag; the message lists those there are.
        Mismatch
            The checkpoint is of another model or optimizer; the message names every difference, and nothing is loaded.
        """
        if custom_load_fn is not None:
            raise InvalidArgument(
                "custom_load_fn is not supported; load the module's state and call load_module_state_dict"
            )
        if self._passes and self._diverged is None:
            raise InvalidState(
                f"load_checkpoint() while the gradients of {self._passes} backward passes wait for the optimizer's "
                "step; call it after a step at a boundary"
            )
        path = self._found(Path(load_dir), None if tag is None else str(tag))
        known = self._names_of_all(list(self.module.state_dict()))
        if path is None:
            return None, None
        contents = self._ranks.together(lambda: Contents(path))
        try:
            client = self._ranks.together(lambda: _unwrapped(contents, "client_state"))
            begun = self._ranks.together(
                lambda: self._begin_load(
                    contents,
                    known if load_module_strict else None,
                    load_optimizer_states and not load_module_only,
                    load_lr_scheduler_states and not load_module_only,
                )
            )
        finally:
            contents.close()
        self._read(path, begun)
        if not load_module_only:
            self._continue(begun)
        return str(path), client

    def _found(self, directory: Path, tag: str | None) -> Path | None:
        """The checkpoint's path, as rank 0 finds it. Collective."""

        def find() -> bytes:
            path = _checkpoint_in(directory, tag) if self._ranks.rank == 0 else None
            return b"" if path is None else os.fsencode(path)

        found = os.fsdecode(self._ranks.gather(self._ranks.together(find))[0])
        if found:
            return Path(found)
        warnings.warn(
            f"no checkpoint found in {directory}: it has no file {_LATEST!r}, so nothing is loaded, and "
            f"load_checkpoint() returns (None, None); pass the tag of one of {_tags_in(directory)}, or begin without a "
            "checkpoint",
            stacklevel=3,
        )
        return None

    def _names_of_all(self, names: list[str]) -> list[str]:
        """The names that the module has on all ranks. Collective."""
        return names

    def _begin_load(
        self, contents: Contents, known: list[str] | None, optimizer: bool, scheduler: bool
    ) -> dict[str, Any]:
        """What to read, of tensors that are there, and what has been read. Nothing of the engine changes. `known`: all
        names of the module; None: they may differ from those of the checkpoint."""
        model = {name: value for name, value in self.module.state_dict().items() if isinstance(value, torch.Tensor)}
        saved = {core_name(name): one for name, one in contents.tensors.items()}
        _check_model(contents, model, saved, known)
        begun: dict[str, Any] = {"model": model, "strict": known is not None, "engine": _nested(contents, "engine")}
        if optimizer and self.optimizer is not None:
            begun["optim"] = _OptimizerLoad(contents, self.module, self.optimizer)
        if scheduler and self.lr_scheduler is not None and hasattr(self.lr_scheduler, "load_state_dict"):
            begun["lr_scheduler"] = _unwrapped(contents, "lr_scheduler")
        return begun

    def _read(self, path: Path, begun: dict[str, Any]) -> None:
        tensors: dict[str, Any] = {"model": begun["model"]}
        if "optim" in begun:
            tensors["optim"] = {"state": begun["optim"].tensors}
        load(
            tensors,
            storage_reader=FileSystemReader(path),
            planner=DefaultLoadPlanner(allow_partial_load=not begun["strict"]),
        )

    def _continue(self, begun: dict[str, Any]) -> None:
        found = begun["engine"]
        for key in _COUNTERS:
            if key in found:
                setattr(self, key, int(found[key]))
        scale = found.get("loss_scale") or {
            ours: found["loss_scaler"][theirs]
            for ours, theirs in _LOSS_SCALE.items()
            if theirs in (found.get("loss_scaler") or {})
        }
        if scale.keys() == _LOSS_SCALE.keys() and self._settings.dtype is torch.float16:
            self._loss_scale.load_state(scale)
        if "optim" in begun:
            begun["optim"].finish()
        if begun.get("lr_scheduler"):
            self.lr_scheduler.load_state_dict(begun["lr_scheduler"])


# ------------------------------------------------------------ the optimizer


def _names(module: nn.Module, optimizer: Any) -> dict[torch.Tensor, str]:
    names: dict[torch.Tensor, str] = {param: name for name, param in module.named_parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in names:
                raise InvalidState(
                    f"the optimizer has a parameter of shape {tuple(param.shape)} that is not the module's; "
                    "checkpoints name parameters by the module"
                )
    return names


def _optimizer_state(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    names = _names(module, optimizer)
    groups = [{**group, "params": [names[param] for param in group["params"]]} for group in optimizer.param_groups]
    return {"state": {names[param]: dict(state) for param, state in optimizer.state.items()}, "param_groups": groups}


class _OptimizerLoad:
    """The optimizer's state of a checkpoint: new tensors to read into, and values."""

    def __init__(self, contents: Contents, module: nn.Module, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._names = names = _names(module, optimizer)
        self._values: dict[torch.Tensor, dict[str, Any]] = {}
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        missing = []
        groups = _nested(contents, "optim", "param_groups") or []
        listed = groups if isinstance(groups, list) else [groups[key] for key in sorted(groups, key=int)]
        stateless = {name for group in listed for name in group.get("params", ())}  # or not
        state = _under(contents, "optim", "state")
        by_name = _by_parameter(state, set(names.values()))
        for param in [param for group in optimizer.param_groups for param in group["params"]]:
            name = names[param]
            found = by_name.get(name, {})
            self._values[param] = {}
            for key, full in found.items():
                if full in contents.tensors:
                    saved = contents.tensors[full]
                    like = optimizer.state.get(param, {}).get(key)
                    self.tensors.setdefault(name, {})[key] = _room(saved, param, like)
                else:
                    self._values[param][key] = _object(contents, full)
            if not found and param.requires_grad and state and name not in stateless:
                missing.append(name)
        if missing or (listed and len(listed) != len(optimizer.param_groups)):
            told = [f"the state of {name!r} is missing in the checkpoint" for name in missing[:20]]
            if listed and len(listed) != len(optimizer.param_groups):
                told.append(
                    f"it has {len(listed)} groups of parameters, the optimizer has {len(optimizer.param_groups)}"
                )
            lines = "".join(f"\n  {line}" for line in told)
            raise Mismatch(
                f"{contents.path} does not fit the optimizer; pass load_optimizer_states=False to leave it out:{lines}"
            )
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in listed]

    def finish(self) -> None:
        """Give the optimizer what was read."""
        state = self._optimizer.state
        for param, values in self._values.items():
            loaded = {**self.tensors.get(self._names[param], {}), **values}
            if loaded:
                state[param] = loaded
            else:
                state.pop(param, None)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=False):
            group.update({key: _as(group[key], value) for key, value in saved.items() if key in group})


def _by_parameter(state: Mapping[str, str], names: set[str]) -> dict[str, dict[str, str]]:
    """The names of a saved state, by parameter and key; either may have dots."""
    found: dict[str, dict[str, str]] = {}
    for path, full in state.items():
        name = path.rpartition(".")[0]
        while name and name not in names:
            name = name.rpartition(".")[0]
        found.setdefault(name, {})[path[len(name) + 1 :]] = full
    return found


def _room(saved: Saved, param: torch.Tensor, like: Any) -> torch.Tensor:
    """A tensor for a saved one, cut over the ranks like the parameter if it has its shape."""
    for one in (like, param):
        if isinstance(one, torch.Tensor) and tuple(one.shape) == tuple(saved.shape):
            return torch.zeros_like(one, dtype=saved.dtype, requires_grad=False)
    return torch.zeros(saved.shape, dtype=saved.dtype)


def _as(now: Any, value: Any) -> Any:
    return tuple(value) if isinstance(now, tuple) and isinstance(value, list) else value


# ------------------------------------------------------------ a checkpoint's names


def _under(contents: Contents, *path: str) -> dict[str, str]:
    """The names below a path, by what follows it."""
    prefix = ".".join(path) + "."
    names = (*contents.tensors, *contents.values, *contents.pickles)
    return {name[len(prefix) :]: name for name in names if name.startswith(prefix)}


def _object(contents: Contents, name: str) -> Any:
    return torch.load(contents.object(name, weights_only=True), weights_only=False)


def _tensor(contents: Contents, name: str) -> torch.Tensor:
    saved = contents.tensors[name]
    into = torch.zeros(saved.shape, dtype=saved.dtype)
    contents.read([Wanted(saved, Box((0,) * len(saved.shape), saved.shape), into)])
    return into


def _nested(contents: Contents, *path: str) -> Any:
    """The values and tensors below a path, nested as they were saved."""
    root: dict[str, Any] = {}
    for name in _under(contents, *path).values():
        known = contents.paths.get(name, (name,))
        keys: Any = known
        if known[0] == name or "." in str(known[0]):  # of DeepSpeed, or of another language
            keys = (*str(known[0]).split("."), *known[1:])
        set_element(root, keys, _tensor(contents, name) if name in contents.tensors else _object(contents, name))
    for key in path:
        root = root.get(key, {})
    return root


def _unwrapped(contents: Contents, part: str) -> dict[str, Any]:
    """The scheduler's or the client's state."""
    found: dict[str, Any] = _nested(contents, part)
    ours = "engine.stage" in contents.values
    return {key: value[0] for key, value in found.items()} if ours else found


def _check_model(
    contents: Contents, model: Mapping[str, Any], saved: Mapping[str, Saved], known: list[str] | None
) -> None:
    wanted = {core_name(f"model.{name}"): value for name, value in model.items()}
    found = []
    if known is not None:
        found += [f"{name!r} is missing in the checkpoint" for name in wanted if name not in saved]
        everywhere = {core_name(f"model.{name}") for name in known}
        more = [name for name in saved if name.startswith("model.") and name not in everywhere]
        found += [f"{name!r} of the checkpoint is not in the model" for name in more]
    for name, value in wanted.items():
        if name in saved and tuple(saved[name].shape) != tuple(value.shape):
            found.append(f"{name!r}: saved with shape {tuple(saved[name].shape)}, the model has {tuple(value.shape)}")
    if found:
        shown = found[:50] + ([f"and {len(found) - 50} more"] if len(found) > 50 else [])
        lines = "".join(f"\n  {line}" for line in shown)
        raise Mismatch(f"{contents.path} is of another model; {len(found)} differences:{lines}")


def _checkpoint_in(directory: Path, tag: str | None) -> Path | None:
    """The checkpoint of a tag, or the last one; None if there is no last one."""
    said = f"{directory} has no checkpoint with the tag {tag!r}; it has"
    if tag is None:
        try:
            tag = (directory / _LATEST).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        if not tag:
            return None
        said = f"{directory / _LATEST} names {tag!r}; {directory} has"
    if not (directory / tag).is_dir():
        raise NotFound(f"{said} {_tags_in(directory)}")
    return directory / tag


def _tags_in(directory: Path) -> str:
    try:
        tags = sorted(one.name for one in directory.iterdir() if one.is_dir())
    except OSError as error:
        return f"nothing that can be read ({error.strerror})"
    shown = ", ".join(map(repr, tags[:20])) + (f" and {len(tags) - 20} more" if len(tags) > 20 else "")
    return shown or "no checkpoints"


def _write_latest(directory: Path, tag: str) -> None:
    """Replace the file atomically."""
    new = directory / f".{_LATEST}.new"
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(tag)
            file.flush()
            os.fsync(file.fileno())
        new.replace(directory / _LATEST)
        sync_directory(directory)
    except OSError as error:
        raise TesseraIOError(f"the checkpoint {tag!r} is saved, but {directory / _LATEST} is not: {error}") from error


def _one_of(name: str, one: Any, other_name: str, other: Any) -> Any:
    if one is not None and other is not None:
        raise InvalidArgument(f"{name} and {other_name} are both given; they are the same")
    return one if one is not None else other


def full_state_dict(checkpoint_dir: str | os.PathLike[str], tag: str | None = None) -> dict[str, torch.Tensor]:
    """The module's complete state of a checkpoint, in float32, in this process alone.

    Parameters
    ----------
    checkpoint_dir : path
        The directory of `save_checkpoint`, ours or DeepSpeed's.
    tag : str, optional
        The checkpoint; by default the last one.
    """
    directory = Path(checkpoint_dir)
    path = _checkpoint_in(directory, tag)
    if path is None:
        raise NotFound(f"{directory} has no file {_LATEST!r}; pass a tag: it has {_tags_in(directory)}")
    contents = Contents(path)
    try:
        names = [name for name in contents.tensors if name.startswith("model.")]
        found = {name.removeprefix("model."): _tensor(contents, name) for name in names}
    finally:
        contents.close()
    return {name: value.float() if value.is_floating_point() else value for name, value in found.items()}
