"""What an optimizer keeps alive: parameters and states, and nothing of a step that is over."""

import copy
import gc
import mmap
import os
import pickle
import re
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest

torch = pytest.importorskip("torch")

from fusestep.nn import torch as fused

MEGABYTE = 2**20
N = 16 * MEGABYTE  # 64 MB: the system gets so much back at once


def used() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


@pytest.mark.parametrize("kind", ["dense", "strided", "rows"])
def test_gradients_and_copies_are_let_go(kind: str) -> None:
    """Also those of the step that bound the tensors."""
    for rows in (2, N // 256):  # a first step may compile, for which memory is taken too
        whole = torch.ones(rows, 512 if kind == "strided" else 256)
        parameter = torch.nn.Parameter(whole[:, ::2] if kind == "strided" else whole)
        optimizer = fused.SGD([parameter], lr=0.1)
        if rows == 2:
            parameter.grad = _gradient(kind, parameter)
            optimizer.step()
    before = used()
    for _ in range(2):
        parameter.grad = _gradient(kind, parameter)
        optimizer.step()
        assert used() - before > 48 * MEGABYTE  # the gradient is there
        parameter.grad = None
        assert used() - before < 40 * MEGABYTE


def _gradient(kind: str, parameter: Any) -> Any:
    if kind != "rows":
        return torch.ones(parameter.shape)
    indices = torch.arange(len(parameter), dtype=torch.int64)[None]
    values = torch.ones(parameter.shape)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


@pytest.mark.parametrize("alone", [False, True])
def test_parameters_that_leave_are_let_go(alone: bool) -> None:
    """With their states, by the next step, and without a collection of cycles."""
    kept, leaving = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = fused.Adam([{"params": [kept]}, {"params": [leaving]}])
    gc.disable()
    try:
        for parameter in (kept, leaving):
            parameter.grad = torch.ones(3)
        for _ in range(2):
            optimizer.step()
            if alone:
                optimizer.step(param=leaving)
        found = [weakref.ref(leaving), weakref.ref(optimizer.state[leaving]["exp_avg"])]
        optimizer.param_groups.pop()
        del optimizer.state[leaving], leaving, parameter
        optimizer.step()
        assert [ref() for ref in found] == [None, None]
    finally:
        gc.enable()


def test_what_is_kept_of_parameters_that_were_replaced() -> None:
    """As in Gaussian splatting, with a hook for each parameter."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = fused.SGD([parameter], lr=0.1, momentum=0.9)
    known = []
    for _ in range(40):
        new = torch.nn.Parameter(parameter.detach().clone())
        known.append(weakref.ref(new))
        optimizer.param_groups[0]["params"][0] = new
        optimizer.state.pop(parameter, None)
        new.grad = torch.ones(3)
        optimizer.step(param=new)
        optimizer.step()
        parameter = new
    del new
    assert [k for k, parameter in enumerate(known) if parameter() is not None] == [39]
    (binding,) = optimizer._steps.known
    assert len(binding.records) == 1


def test_what_is_known_of_single_parameters_goes_with_them() -> None:
    """Also while their program keeps them, so that none has the address of another."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(8)]
    optimizer = fused.SGD(parameters[:1], lr=0.1)
    for parameter in parameters:
        optimizer.param_groups[0]["params"][0] = parameter
        parameter.grad = torch.ones(3)
        optimizer.step(param=parameter)
    (binding,) = optimizer._steps.known
    assert [record.parameter for record in binding.records.values()] == parameters[-1:]


@pytest.mark.parametrize("how", ["clear", "load", "exchange"])
def test_states_are_let_go_by_the_next_step(how: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = fused.Adam([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    known = weakref.ref(optimizer.state[parameter]["exp_avg"])
    if how == "clear":
        optimizer.state.clear()
    elif how == "load":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        state = optimizer.state[parameter]
        state["exp_avg"] = state["exp_avg"].clone()
    optimizer.step()
    assert known() is None
    assert optimizer.state[parameter]["step"].item() == (1.0 if how == "clear" else 2.0)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux has large pages")
def test_large_states_ask_for_large_pages() -> None:
    table = torch.nn.Parameter(torch.zeros(1 << 19, 4))
    optimizer = fused.LazyAdam([table])
    one = torch.ones(1, 4)
    table.grad = torch.sparse_coo_tensor([[3]], one, table.shape, check_invariants=True)
    optimizer.step()
    addresses = [optimizer.state[table][name].data_ptr() for name in ("exp_avg", "exp_avg_sq")]
    middles = [address + table.nbytes // 2 for address in addresses]
    found = []
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(x, 16) for x in span.groups())
        if line.startswith("VmFlags:"):
            found += ["hg" in line.split() for middle in middles if begin <= middle < end]
    assert found == [True, True]


def test_storages_can_be_resized_after_a_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(8))
    table = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = fused.Adam([parameter, table], sparse="touched")
    for _ in range(2):
        parameter.grad = torch.ones(8)
        table.grad = torch.ones(4, 2).to_sparse(1)
        fused.clip_grad_norm_([parameter, table], 1.0, optimizer=optimizer)
        optimizer.step()
    rows = table.grad
    states = [x for own in optimizer.state.values() for x in own.values()]
    for tensor in (parameter, table, parameter.grad, rows._indices(), rows._values(), *states):
        assert tensor.untyped_storage().resizable()
        tensor.untyped_storage().resize_(0)
    empty = parameter.grad.resize_(0)
    torch.add(torch.ones(16), 1, out=empty)
    parameter.data.resize_(16)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_the_same_attributes(copied: Any) -> None:
    optimizer = fused.Adam([torch.nn.Parameter(torch.ones(3))])
    before = {name for name in vars(optimizer) if name[0] != "_"}
    after = {name for name in vars(copied(optimizer)) if name[0] != "_"}
    assert after == before
    assert {"skipped_steps", "skip_nonfinite"} <= after
