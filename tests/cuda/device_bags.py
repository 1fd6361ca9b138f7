"""Pooled tables on device arrays, and steps on the gradients of their outputs."""

from __future__ import annotations

from simulator import run_check  # isort: split

from typing import Any

import numpy as np

import fusestep
from fusestep import nn, ops

from device_arrays import F32, on_device, on_host, positive

def simple() -> None:
    w = [positive((5, 4)), positive((3, 8))]
    theirs = on_device(w)
    ids = [np.array([4, 0, 4, 1]), np.array([2, 2], np.int32)]
    offsets = [np.array([0, 3, 3, 4]), np.array([0, 0, 1, 2])]
    host, device = nn.EmbeddingBags(w, nn.SGD(w, 0.5)), nn.EmbeddingBags(theirs, nn.SGD(theirs, 0.5))
    a, b = host(ids, offsets), device(on_device(ids), on_device(offsets))
    assert a.tobytes() == on_host(b).tobytes()
    g = positive(a.shape)
    host.backward(g)
    device.backward(on_device(g))
    fusestep.synchronize()
    for x, y in zip(w, theirs):
        assert x.tobytes() == on_host(y).tobytes()


if __name__ == "__main__":
    run_check(simple=(simple,))
