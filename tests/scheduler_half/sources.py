"""vLLM's scheduler out of a release's sources, without that release installed.

The modules around `vllm.v1.core` are the release's own. Everything else of vLLM (models,
platforms, compiled extensions, connectors) is a stand-in whose every name exists and does
nothing, because no release's dependencies but one can be in an environment.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What the scheduler's side is made of. A name stands for what lies in it, too.
_REAL = (
    "vllm.envs",
    "vllm.model_executor.layers.mamba.checkpoint",
    "vllm.pooling_params",
    "vllm.sampling_params",
    "vllm.distributed.aux_output_connector.connector",
    "vllm.distributed.kv_events",
    "vllm.utils",
    "vllm.v1.core",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.metrics.stats",
    "vllm.v1.outputs",
    "vllm.v1.request",
    "vllm.v1.serial_utils",
    "vllm.v1.spec_decode.metrics",
    "vllm.v1.structured_output.request",
    "vllm.v1.utils",
)
_REAL_ALONE = ("vllm.v1.engine",)  # the package's own file only


class _StandInType(type):
    """Classes that have every attribute, and may be subscripted."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(f"{cls.__name__}.{name}")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # What is put on a class or function as a decorator leaves it as it is.
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return super().__call__(*args, **kwargs)


class StandIn(metaclass=_StandInType):
    """Takes any arguments, has any attribute, does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else None


def stand_in(name: str) -> Any:
    """A class of this name."""
    return _StandInType(name, (StandIn,), {})


class _StandInModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if _is_real(f"{self.__name__}.{name}"):  # as in `from vllm import envs`
            return importlib.import_module(f"{self.__name__}.{name}")
        made = stand_in(name)
        setattr(self, name, made)
        return made


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(_GIVEN.get(module.__name__, {}))


def _logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    for level in ("debug", "info", "warning", "error"):
        setattr(logger, f"{level}_once", lambda *args, **kwargs: None)
    return logger


# Names outside of what is real that must do something.
_GIVEN: dict[str, dict[str, Any]] = {
    "vllm.logger": {"init_logger": _logger},
    "vllm.multimodal.utils": {"strip_covered_mm_data": lambda features, *_, **__: features},
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds every module of vLLM, the release's own or a stand-in."""

    def __init__(self, sources: Path) -> None:
        self._root = sources

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        if _is_real(name):
            return importlib.machinery.PathFinder.find_spec(name, path)
        folder = self._root.joinpath(*name.split("."))
        spec = importlib.machinery.ModuleSpec(name, _Loader(), is_package=folder.is_dir())
        if folder.is_dir():
            spec.submodule_search_locations = [str(folder)]
        return spec


def _is_real(name: str) -> bool:
    return name in _REAL_ALONE or any(f"{name}.".startswith(f"{real}.") for real in _REAL)


def use(sources: Path) -> None:
    """From now on in this process, vLLM is that of ``sources``, the folder that has ``vllm/``."""
    if any(name.partition(".")[0] == "vllm" for name in sys.modules):
        raise RuntimeError("expected no vLLM in this process, found one imported; use a new one.")
    sys.meta_path.insert(0, _Finder(sources))
