"""Private names of Numba, llvmlite and PyTorch: all that this package stands on, and nothing else.

What is documented is imported where it is used. What is not is looked up here: where a new version
has a name no more, something is slower or left out, and one warning says so. The page on new
versions says what each name is for.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

import llvmlite
import numba

TRIED = {
    "Python": ("3.11", "3.12", "3.13"),
    "NumPy": ("1.26", "2.0", "2.1", "2.2", "2.3", "2.4", "2.5"),
    "Numba": ("0.62", "0.63", "0.64", "0.65", "0.66", "0.67", "0.68"),
    "llvmlite": ("0.45", "0.46", "0.47", "0.48", "0.49", "0.50"),
    "PyTorch": ("2.6", "2.8", "2.11", "2.13", "2.14"),
}
"""Minor versions that were tried, as the page on new versions says, and how the list grows."""


class Name(NamedTuple):
    """A private name, and what follows where there is none."""

    place: str  # a module, or one and a path of attributes: "numba.core:errors"
    without: str


# Without these nothing can be compiled.
NEEDED = ("numba.np.arrayobj:populate_array",)
_FORK = "a child of a fork may wait for ever for another thread of its parent"
_ROWS = "PyTorch coalesces each sparse gradient first"
_BAGS = "EmbeddingBags step in no backward"
_TABLES = "EmbeddingBags look for their tables through Python, and are slower"
_UNSEEN = "hooks that EmbeddingBags do not call are not refused"
_HOOKS = "each step looks for hooks through Python, and is slower"
NAMES = {
    # What is around these locks in Python can be interrupted; a fork waits for those inside.
    "compiler lock": Name("numba.core.compiler_lock:global_compiler_lock._lock", _FORK),
    "layer lock": Name("numba.np.ufunc.parallel:_backend_init_thread_lock", _FORK),
    "llvm lock": Name("llvmlite.binding.ffi:lib._lock._lock", _FORK),
    # Addresses of Numba's own functions that compiled code may call, by name.
    "helpers": Name("numba.core.runtime._nrt_python:c_helpers", "a start takes longer"),
    "omp": Name(
        "numba.np.ufunc.omppool",
        "where Numba's loops run on OpenMP, it sets the number of threads of other libraries too",
    ),
    "tbb": Name("numba.np.ufunc.tbbpool", "a child of a fork runs steps on one thread"),
    "cubin": Name(
        "numba.cuda.codegen:CUDACodeLibrary.get_cubin",
        "a launch on a device takes the host longer, and each process compiles its kernels",
    ),
    "version": Name(
        "torch:Tensor._version",
        "what changes tensors between clip and step, or forward and backward, is not noticed",
    ),
    "zero tensor": Name("torch:Tensor._is_zerotensor", "tensors are asked for their memory"),
    "indices": Name("torch:Tensor._indices", _ROWS),
    "values": Name("torch:Tensor._values", _ROWS),
    "hooks before": Name("torch.optim.optimizer:_global_optimizer_pre_hooks", _HOOKS),
    "hooks after": Name("torch.optim.optimizer:_global_optimizer_post_hooks", _HOOKS),
    "hooks of one": Name("torch.optim.optimizer:Optimizer._optimizer_step_pre_hooks", _HOOKS),
    "profiler": Name("torch.autograd.profiler:_is_profiler_enabled", _HOOKS),
    "watched step": Name(
        "torch.optim.optimizer:Optimizer.profile_hook_step", "hooks on steps are not called"
    ),
    "graph task": Name("torch._C:_current_graph_task_id", _BAGS),
    "engine node": Name("torch._C:_will_engine_execute_node", _BAGS),
    "end of backward": Name("torch.autograd:Variable._execution_engine.queue_callback", _BAGS),
    "active wrapper": Name(
        "torch.nn.parallel:DistributedDataParallel._get_active_ddp_module", _BAGS
    ),
    "compiled backward": Name(
        "torch._dynamo.compiled_autograd:in_compiled_autograd_region",
        "EmbeddingBags that step in backward do not refuse one that is compiled",
    ),
    "modules": Name("torch.nn:Module._modules", _TABLES),
    "parameters of modules": Name("torch.nn:Module._parameters", _TABLES),
    "hooks of modules": Name("torch.nn:Module._forward_hooks", _UNSEEN),
    "hooks of tensors": Name("torch:Tensor._backward_hooks", _UNSEEN),
    "hooks of gradients": Name("torch:Tensor._post_accumulate_grad_hooks", _UNSEEN),
    "store": Name(
        "torch.distributed.distributed_c10d:_get_process_group_store",
        "errors of lost processes do not name these",
    ),
    "hide": Name(
        "torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
        "hide_from_ddp raises",
    ),
    "outside of a trace": Name(
        "torch.utils._python_dispatch:_disable_current_modes",
        "programs of torch.export copy all ids of a growing table in each call",
    ),
    "outside of graphs": Name("torch:_disable_dynamo", "the import takes seconds longer"),
}
_found: dict[str, Any] = {}


def look_up(place: str) -> Any:
    """The object at the place of a `Name`, or None."""
    module, _, path = place.partition(":")
    try:
        imported = import_module(module)
        return attrgetter(path)(imported) if path else imported
    except (ImportError, AttributeError):
        return None


def find(name: str) -> Any:
    """The object of one of `NAMES`; None, and one warning in a process, where it is missing."""
    if name not in _found:
        value = look_up(NAMES[name].place)
        if value is None:
            lose(name)
        _found[name] = value
    return _found[name]


def lose(name: str) -> None:
    """Warn that there is none of one of `NAMES`, once in a process."""
    if name in _found:
        return
    _found[name] = None
    place, without = NAMES[name]
    package = place.replace(":", ".").split(".")[0]
    version = getattr(sys.modules.get(package), "__version__", "")
    warnings.warn(
        f"fusestep: {package} {version} has no {place.replace(':', '.')}: {without}",
        RuntimeWarning,
        stacklevel=3,
    )


def _needed() -> list[Any]:
    objects = {place.replace(":", "."): look_up(place) for place in NEEDED}
    missing = ", ".join(name for name, value in objects.items() if value is None)
    if missing:
        tried = [f"{name} {TRIED[name][0]} to {TRIED[name][-1]}" for name in ("Numba", "llvmlite")]
        raise ImportError(
            f"fusestep: {missing} is missing: expected {' and '.join(tried)}, which were tried, "
            f"got {numba.__version__} and {llvmlite.__version__}"
        )
    return [*objects.values()]


(populate_array,) = _needed()


def compiler_locks() -> list[Any]:
    """Locks of Numba and llvmlite that a thread may hold while another one forks."""
    locks = map(find, ("compiler lock", "layer lock", "llvm lock"))
    return [lock for lock in locks if lock is not None]


def cubin_of(loop: Any) -> tuple[str, bytes] | None:
    """The name of the kernel of a compiled loop, and its code for the current device; or None."""
    try:
        (compiled,) = loop.overloads.values()
        library = compiled._codelibrary
        return library._entry_name, library.get_cubin().code
    except (AttributeError, ValueError):
        lose("cubin")
        return None


def part_readers() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Functions for the indices and the values of a sparse gradient, coalesced or not."""
    # The documented accessors refuse a gradient that is not.
    indices, values = find("indices"), find("values")
    if indices is None or values is None:
        return lambda x: x.coalesce().indices(), lambda x: x.coalesce().values()
    return indices, values


def parts_of(gradient: Any) -> tuple[Any, Any]:
    """Indices and values of a sparse gradient of PyTorch, whether it is coalesced or not."""
    try:
        # Of any class with these methods: what steps in NumPy needs no PyTorch.
        return gradient._indices(), gradient._values()
    except AttributeError:
        indices_of, values_of = part_readers()
        return indices_of(gradient), values_of(gradient)


def zero_tensors() -> Callable[[Any], bool]:
    """A function of a tensor of PyTorch: whether it is one of zeros without memory."""

    def has_only_a_size(tensor: Any) -> bool:
        return bool(tensor.data_ptr() == 0 and tensor.untyped_storage().nbytes() > 0)

    return find("zero tensor") or has_only_a_size


def version_of(tensor: Any) -> int:
    """How often PyTorch has counted a change of a tensor; 0 where it does not say."""
    return 0 if find("version") is None else int(tensor._version)


def counting_changes() -> Callable[[Sequence[Any]], None]:
    """A function that has autograd count a change of each of some tensors of PyTorch."""
    torch = import_module("torch")
    find("version")  # which tells of changes, as it is counted here
    count: Callable[[Any], None] = torch.autograd.graph.increment_version

    def count_each(tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            count(tensor)

    try:
        count([torch.zeros(())])
    except TypeError:  # older versions take one tensor
        return count_each
    return count


def is_bound(parameter: Any) -> bool:
    """Whether a graph of autograd keeps the shape of a parameter, whatever data it gets."""
    torch = import_module("torch")
    edge_of = torch.autograd.graph.get_gradient_edge
    with torch.inference_mode(mode=False):
        trial = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
        edge, trial.data = edge_of(trial), torch.zeros(2, dtype=torch.float64)
        if edge_of(trial) != edge or not parameter.requires_grad:
            return False
        # A node has these for as long as a graph has it.
        edge_of(parameter).node.metadata[__name__] = True
        return __name__ in edge_of(parameter).node.metadata


def backward_of_now() -> Callable[[], int]:
    """A function that gives the number of the backward that it is called in, or -1."""
    return find("graph task") or (lambda: -1)


def at_the_end_of_backward() -> Callable[[Callable[[], Any]], Any]:
    """A function that has the backward it is called in call another one at its end.

    Where PyTorch has none, that one is called at once.
    """
    return find("end of backward") or (lambda act: act())


def is_backward_compiled() -> bool:
    """Whether PyTorch compiles the backward of now."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    try:
        return compiled is not None and bool(
            compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region
        )
    except AttributeError:
        lose("compiled backward")
        return False


def modules_of(module: Any) -> Any:
    """The modules that one has as attributes."""
    try:
        return module._modules.values()
    except AttributeError:
        lose("modules")
        return [*module.children()]


def weights_of(modules: Any) -> list[Any]:
    """The weight of each of some modules."""
    try:
        # As attributes they are found in ten times the time.
        return [module._parameters["weight"] for module in modules]
    except KeyError:  # it is computed
        pass
    except AttributeError:
        lose("parameters of modules")
    return [module.weight for module in modules]


def hooks_of_modules() -> Callable[[Any], Iterable[Any]]:
    """A function of a module: all kinds of its hooks."""
    hooks = attrgetter(
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    )
    try:
        hooks(import_module("torch").nn.Module())
    except AttributeError:
        lose("hooks of modules")
        return lambda _: ()
    return hooks


def hooks_of_tensors() -> Callable[[Any], Iterable[Any]]:
    """A function of a tensor: all kinds of hooks on its gradient."""
    if None in [*map(find, ("hooks of tensors", "hooks of gradients"))]:
        return lambda _: ()
    return attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def hider() -> Callable[[Any, Sequence[str]], None] | None:
    """A function that hides parameters of a model, by name, from PyTorch's wrapper; or None."""
    hide = find("hide")

    def hide_too(model: Any, names: Sequence[str]) -> None:
        hide(model, [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *names])

    return hide and hide_too


def watching() -> Callable[[Any], bool]:
    """A function of an optimizer of PyTorch: whether its step has hooks or is measured."""
    before, after, is_profiled = map(find, ("hooks before", "hooks after", "profiler"))
    if before is None or after is None or is_profiled is None:
        return lambda _: True
    profiler = import_module("torch.autograd.profiler")

    def is_watched(optimizer: Any) -> bool:
        try:
            return bool(
                optimizer._optimizer_step_pre_hooks
                or optimizer._optimizer_step_post_hooks
                or before
                or after
                or profiler._is_profiler_enabled
            )
        except AttributeError:
            lose("hooks of one")
            return True

    return is_watched


def watched(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step of PyTorch's optimizers with its hooks and the mark of its profiler."""
    around = find("watched step")
    return step if around is None else around(step)


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that PyTorch's compiler does not trace."""
    # What is documented loads the compiler at once, not when the function is first called.
    disable = find("outside of graphs") or import_module("torch.compiler").disable
    return disable(function)  # type: ignore[no-any-return]
