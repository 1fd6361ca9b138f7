"""THOR: second-order optimization with Kronecker-factored curvature, under MindSpore's name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ...ops.runtime.errors import reject_unknown
from ..base.parameter import Parameter
from .arguments import BLOCK_SIZE, NAME
from .optimizer import Thor, every_parameter

__all__ = ["Thor", "thor"]


def thor(
    net: Any, learning_rate: Any, damping: Any, momentum: float, weight_decay: Any = 0.0,
    loss_scale: Any = 1.0, batch_size: int = 32, use_nesterov: bool = False,
    decay_filter: Callable[[Parameter], bool] = every_parameter, split_indices: Any = None,
    enable_clip_grad: bool = False, frequency: int = 100, *, compat: str | None = None,
    block_size: int | None = BLOCK_SIZE, bad_factor: str = "raise", **unknown: Any,
) -> Thor:  # fmt: skip
    """Second-order optimization: THOR, natural gradient descent with Kronecker factors.

    In the steps 0, ``frequency``, ``2*frequency``, ... each layer's factors are computed from the
    last batch and inverted; the steps between use the stale inverses. With the inputs ``X`` of a
    layer, the output gradients ``d`` of single samples and ``lambda`` the damping of that step::

        A = X'X / N        Ainv = (A + sqrt(lambda) I)^-1
        G = d'd / N        Ginv = (G + sqrt(lambda) I)^-1
        g <- Ginv g Ainv,  g as a matrix of out rows
        g <- g + weight_decay*w
        with enable_clip_grad: g <- g / max(|g|, 1), each tensor by itself
        a <- momentum*a + g
        w <- w - lr*a,   or with use_nesterov  w - lr*(g + momentum*a)

    ``A`` and ``G`` are cut into diagonal blocks. For a convolution with ``T`` positions,
    ``Ainv = (A + sqrt(lambda/T) I)^-1 / sqrt(T)``, ``Ginv`` likewise, so that their product is
    that of the sums over positions. An embedding's A is diagonal. The two parameters of a layer
    normalization have diagonal factors: ``g <- g / (F + lambda)``. Biases and all other
    parameters take the plain gradient.

    States and arithmetic are on the host. Parameters on a CUDA device come there for a step and
    go back; their gradients, and what their layers capture, are taken from the device too.

    The matrix products and inversions are NumPy's and SciPy's BLAS and LAPACK: their results may
    depend on its number of threads. Nothing else depends on a number of threads.

    Args:
        net: layers (`ThorDense`, `ThorConv2d`, `ThorEmbedding`, `ThorLayerNorm`) and further
            `Parameter` objects: one of them, a list or mapping of them, or an object whose
            attributes hold them, in that order. Call the ``capture`` of each layer in every step
            (it returns at once in the steps that do not need it). Parameters that do not require
            a gradient are left alone. Or a ``torch.nn.Module``: then hooks capture, and the
            result is a `fusestep.nn.thor.torch.TorchThor`, with ``step()`` and ``zero_grad()``.
        learning_rate: see `Optimizer`.
        damping: number > 0, one for each step, or a schedule as a learning rate may be.
        momentum: float >= 0.
        weight_decay: see `Optimizer`.
        loss_scale: see `Optimizer`. The output gradients that are captured hold it as the
            gradients do.
        batch_size: int >= 1: how many samples the loss averages over (1 where it is their sum).
        use_nesterov: Nesterov's step.
        decay_filter: called with each `Parameter`; True where weight decay acts. All, by default.
        split_indices: None; how reductions over processes are fused, and there is one process.
        enable_clip_grad: limit the norm of each gradient to 1, after weight decay.
        frequency: int >= 2.
        compat: None for the mathematics above; ``"mindspore"`` for what MindSpore 2.10 computes:
            A of a dense layer divided by its rows, not by N; a convolution's factors from means
            over the batch, with "same" padding; the frequencies of ids per ``batch_size``; an
            embedding's Ginv as ``L^-1 L^-1``; ``g / (g^2/batch_size + sqrt(lambda))`` for layer
            normalizations; of several captures the last one only.
        block_size: int >= 1, size of the diagonal blocks; None for whole factors.
        bad_factor: ``"raise"``: a factor that is not finite or not positive definite raises
            ``FactorError``, a ``numpy.linalg.LinAlgError``, and nothing changes; ``"skip"``: the
            layer keeps its last inverses, with a warning (the plain gradient if it has none).
        **unknown: raise.

    Raises:
        TypeError: a kind does not fit (an int where a float is published).
        ValueError: a value does not fit, or the net declares no layer.
        KeyError: an unknown keyword (also `TypeError`).
        RuntimeError: in a step: a layer whose factors are due has captured nothing.
        ImportError: in a step: scipy is not installed (``pip install "fusestep[thor]"``).

    Source: ``mindspore.nn.thor``; Chen et al. (2021), "THOR, Trace-based Hardware-driven
    Layer-Oriented Natural Gradient Descent Computation"; Martens and Grosse (2015),
    arXiv:1503.05671; Grosse and Martens (2016), arXiv:1602.01407.

    >>> import numpy as np
    >>> from fusestep.nn import ThorDense
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((64, 3)).astype(np.float32) * np.float32([1, 10, 100])
    >>> target = x @ np.float32([[1.0], [0.1], [0.01]])
    >>> layer = ThorDense(np.zeros((1, 3), np.float32))
    >>> opt = thor(layer, learning_rate=1.0, damping=1e-3, momentum=0.0, batch_size=64)
    >>> for _ in range(20):
    ...     d = (x @ layer.weight.data.T - target) / 64
    ...     layer.capture(x, d)
    ...     _ = opt((d.T @ x,))
    >>> print(layer.weight.data.round(2))
    [[1.   0.1  0.01]]
    """
    options = {name: value for name, value in locals().items() if name not in ("net", "unknown")}
    reject_unknown(NAME, unknown, thor)
    kind: type[Thor] = Thor
    torch = sys.modules.get("torch")  # whoever has a module has imported it
    if torch is not None and isinstance(net, torch.nn.Module):
        from .torch import TorchThor

        kind = TorchThor
    return kind(net, options)
