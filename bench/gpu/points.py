"""What is measured on a CUDA device: the points of ``python -m fusestep.bench.gpu``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..cases import model_shapes, traffic
from ..report.result import OURS
from ..report.stats import ratio
from .point import ADAM, TORCH, Bench, Point
from .rows import all_rows, lazy_rows, sorts

LARGE = (1 << 26, 1 << 28)  # elements of dense steps
DISTRIBUTIONS = ("zipf1.05", "zipf1.2")
SORTED = (10**5, 10**6, 10**7)
SMALL = 200  # tensors
WIDTH = 4_096  # of a matrix
LEAST_ELEMENTS = 1 << 16


def _torch_adam(torch: Any, shapes: Sequence[Any], dtype: Any) -> Callable[[], object]:
    """A step of torch's fused Adam."""
    parameters = []
    for shape in shapes:
        parameter = torch.zeros(shape, dtype=dtype, device="cuda").requires_grad_()
        parameter.grad = torch.randn(shape, dtype=dtype, device="cuda")
        parameters.append(parameter)
    optimizer = torch.optim.Adam(parameters, lr=1e-3, eps=1e-8, fused=True)
    step: Callable[[], object] = optimizer.step
    return step


def dense_adam(bench: Bench, wanted: int, dtype: str) -> Point:
    """``nn.Adam`` on one large tensor; 16-bit parameters have float32 moments."""
    from ... import nn

    storage = np.dtype(np.float32) if dtype == "float32" else bench.clock.BFLOAT16
    n_bytes = 2 * storage.itemsize + 8
    # Torch keeps its moments in the type of the parameter, which is another task in 16 bit.
    torch = bench.torch if dtype == "float32" else None
    n = bench.fits(wanted, n_bytes * (2 if torch else 1), LEAST_ELEMENTS)
    parameter = nn.Parameter(bench.clock.new_array(n, dtype=storage), "w")
    optimizer = nn.Adam([parameter], 1e-3, state_dtype=np.float32)
    gradients = (bench.clock.normal_array(n, storage),)
    jobs: dict[str, Callable[[], object]] = {OURS: lambda: optimizer(gradients)}
    moved = {OURS: n * (2 * storage.itemsize + 16 + storage.itemsize)}
    if dtype == "float32":
        assert moved[OURS] == traffic.Traffic(updated=3).dense(n, 4)
    if torch:
        jobs[TORCH] = _torch_adam(torch, [n], torch.float32)
        moved[TORCH] = moved[OURS]
    point = bench.measure(f"dense/nn.Adam {dtype}", {"elements": n}, jobs, moved)
    if n < wanted:
        bench.note(point, f"{n} elements instead of {wanted}, for want of device memory")
    point.aim_at_copy(OURS, 0.93)
    point.aim_at_torch()
    return point


def dense_lamb(bench: Bench, wanted: int) -> Point:
    """``nn.Lamb``: one pass for the norms, one for the step."""
    from ... import nn

    n = bench.fits(wanted, 16, LEAST_ELEMENTS)
    parameter = nn.Parameter(bench.clock.normal_array(n), "w")
    optimizer = nn.Lamb([parameter], 1e-3)
    gradients = (bench.clock.normal_array(n),)
    moved = {OURS: traffic.Traffic(updated=3, passes=(4,)).dense(n, 4)}
    jobs = {OURS: lambda: optimizer(gradients)}
    return bench.measure("dense/nn.Lamb float32", {"elements": n}, jobs, moved)


def dense_adafactor(bench: Bench, wanted: int) -> Point:
    """``nn.AdaFactor`` on a matrix, without a first moment: three passes."""
    from ... import nn

    height = max(1, bench.fits(wanted, 8, LEAST_ELEMENTS) // WIDTH)
    n = height * WIDTH
    parameter = nn.Parameter(bench.clock.normal_array((height, WIDTH)), "w")
    optimizer = nn.AdaFactor([parameter])
    gradients = (bench.clock.normal_array((height, WIDTH)),)
    moved = {OURS: traffic.Traffic(updated=1, passes=(1, 2)).dense(n, 4)}
    jobs = {OURS: lambda: optimizer(gradients)}
    return bench.measure("dense/nn.AdaFactor float32", {"elements": n}, jobs, moved)


def small_adam(bench: Bench, count: int) -> Point:
    """``nn.Adam`` on small tensors; and the launch of its rule beside one that does nothing."""
    from ... import nn

    shapes = model_shapes.many_small(SMALL)[:count]
    parameters = [nn.Parameter(bench.clock.new_array(s), f"p{i}") for i, s in enumerate(shapes)]
    optimizer = nn.Adam(parameters, 1e-3)
    gradients = tuple(bench.clock.normal_array(shape) for shape in shapes)
    jobs: dict[str, Callable[[], object]] = {OURS: lambda: optimizer(gradients)}
    jobs |= _launches(bench, shapes)
    if bench.torch is not None:
        jobs[TORCH] = _torch_adam(bench.torch, shapes, bench.torch.float32)
    n = sum(shape[0] for shape in shapes)
    size = {"tensors": count, "elements": n}
    point = bench.measure(f"{count} small/nn.Adam float32", size, jobs, {}, with_copies=False)
    share = ratio(point.device["kernel alone"], point.device["empty kernel"])
    if count == SMALL:
        point.aim("kernel alone: time by that of an empty one", share.value, 2.0, at_most=True)
        point.aim_at_torch()
    return point


def _launches(bench: Bench, shapes: Sequence[tuple[int, ...]]) -> dict[str, Callable[[], object]]:
    """The launch of a dense step alone, its table being there already; and an empty kernel's."""
    from numba import cuda

    from ...kernels.cuda.dense.step import Chunks, chunk_of, dense_kernel
    from ...kernels.cuda.device.backend import address_of, copy_in
    from ...kernels.element import kernel
    from ...kernels.rules import adam
    from ...kernels.storage import F32

    @cuda.jit
    def empty(table, n_tensors, guard):  # type: ignore[no-untyped-def]
        pass

    compiled = kernel(adam.ADAM, (), F32, F32, (F32, F32))
    arrays = [[bench.clock.new_array(shape) for _ in range(4)] for shape in shapes]
    addresses = np.array([[int(address_of(a)) for a in tensor[:3]] for tensor in arrays])
    gradients = np.array([int(address_of(tensor[3])) for tensor in arrays])
    sizes = np.array([shape[0] for shape in shapes])
    hp = np.array([adam.adam_scalars(np.float32, *ADAM)], np.float32)
    on_device, stream = cuda.device_array(hp.nbytes, np.uint8), cuda.default_stream()
    hp_address = int(address_of(on_device))
    chunks = Chunks(chunk_of(compiled), np.column_stack([gradients, addresses]), sizes)
    words = chunks.words(np.full(len(shapes), hp_address))
    room = cuda.device_array(words.nbytes, np.uint8)
    place = int(address_of(room))
    copy_in(hp_address, hp, stream)
    copy_in(place, words, stream)
    keep = (arrays, on_device, room)
    loop = dense_kernel(compiled)

    def launch(function: Any, keep: Any = keep) -> None:
        del keep  # its memory is used as long as this can be called
        chunks.launch(function, stream, place, chunks.n_tensors, 0)

    return {"kernel alone": partial(launch, loop), "empty kernel": partial(launch, empty)}


def points() -> dict[str, Callable[[Bench], Point]]:
    """Every point by its name."""
    found: dict[str, Callable[[Bench], Point]] = {}
    for n in LARGE:
        for dtype in ("float32", "bfloat16"):
            found[f"dense/adam/{dtype}/{n}"] = partial(dense_adam, wanted=n, dtype=dtype)
    found[f"dense/lamb/{LARGE[0]}"] = partial(dense_lamb, wanted=LARGE[0])
    found[f"dense/adafactor/{LARGE[0]}"] = partial(dense_adafactor, wanted=LARGE[0])
    for count in (1, SMALL):
        found[f"small/adam/{count}"] = partial(small_adam, count=count)
    for name, run in (("all", all_rows), ("lazy", lazy_rows)):
        for distribution in DISTRIBUTIONS:
            found[f"rows/{name}/{distribution}"] = partial(run, distribution=distribution)
    for n in SORTED:
        found[f"sort/{n}"] = partial(sorts, n=n)
    return found
