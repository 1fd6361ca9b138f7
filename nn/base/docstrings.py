"""Descriptions that docstrings of optimizers share: options and errors.

A class describes its own; the rest is put in when it is made. ``docs/_site`` reads the sources of
`nn.torch` and completes them likewise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...ops.docstrings import Shared, entries

OPTIMIZERS = Shared(
    arguments=entries("""\
    params: a list of `Parameter` or arrays, or of group dicts, whose keys `Optimizer` lists.
    learning_rate: float or int >= 0, a 0-d or 1-d array or an iterable of floats (step s uses
        element s), a `LearningRateSchedule`, a callable of the step 0, 1, 2, ..., or a float32
        or float64 array of one element on the CUDA device of the parameters, which every step
        reads and waits for.
    beta1, beta2: floats in (0, 1).
    eps: float > 0.
    weight_decay: float or int >= 0, or a callable of the step; coupled, ``g + weight_decay*w``,
        where the formula does not have it. Ungrouped parameters whose name contains "beta" or
        "gamma" do not decay; in groups the values of the groups count alone.
    loss_scale: float or int > 0, or an array of one element on the CUDA device of the
        parameters; gradients are multiplied by ``float32(1 / loss_scale)``.
    use_nesterov: Nesterov's step.
    eps_hat: whether ``eps`` is added to the root that is not corrected: True is MindSpore's
        form, False that of PyTorch and optax.
    rowwise_bias_correction: t is the number of updates of each row, in a state ``updates``, not
        that of the parameter: otherwise the moments of a row that begins late are taken for
        complete. A vector is one row. Not with ``sparse_update="catch_up"``.
    use_locking: concurrent calls leave parameters, states and counters as some serial order of
        the calls would.
    sparse_update: what a row-sparse gradient (a `RowTensor`) updates. ``"lazy"``: only the rows
        that occur. ``"dense_equivalent"``: all rows, those that do not occur with a gradient of
        0. ``"catch_up"``: the numbers of ``"dense_equivalent"`` at about the cost of
        ``"lazy"``: rows that do not occur sleep, and take the steps that they have missed when
        they occur again (`FusedOptimizer.prepare` brings them up to date before they are read);
        rules whose steps without a gradient cannot be summed raise. None: the default of the
        class, if it has one; else such a gradient raises.
    skip_nonfinite: a step with a NaN or an infinity in any gradient changes nothing and is
        counted in ``skipped_steps``.
    state_dtype: dtype of the states; None: that of each parameter, or float32 where
        ``rounding`` is ``"master"``. Arithmetic is float32 (float64 for float64 parameters),
        rounded once at the store.
    rounding: what becomes of a weight of 16 bits, whose updates are often smaller than half a
        unit of its last place. ``"nearest"``: it is rounded to the nearest, and such updates
        are lost. ``"master"``: a float32 state ``master`` is the weight, the parameter its
        rounded copy, written in the same pass. ``"kahan"``: a 16-bit state ``remainder`` has
        what rounding cuts off, and is added before the next update. ``"stochastic"``: it is
        rounded up or down at random, so that its mean is the weight before rounding; on the
        host only.
    clipvalue: number > 0: each element of a gradient is limited to ``[-clipvalue, clipvalue]``.
    clipnorm: number > 0: each gradient is multiplied by ``clipnorm / max(norm, clipnorm)``,
        with its own L2 norm; a norm that is not finite makes NaN. An extra pass reads the
        gradient. Not for parameters on a CUDA device, unless the arithmetic is on the host.
"""),
    errors={
        "": """\
    TypeError: a kind does not fit (an int where a float is published).
    ValueError: a value does not fit.""",
        "unknown": "    KeyError: an unknown keyword (also `TypeError`).",
    },
)
"""The optimizers of `nn`."""


class _OfTorch(Shared):
    """Descriptions of classes of `nn.torch`: also what ``torch.optim`` has, and an example."""

    def completed(
        self, doc: str, name: str, names: Iterable[str], of_call: Iterable[str] = ()
    ) -> str:
        if begins := re.search(r"^( *)Source: (``torch\.optim\.\w+``)?", doc, re.M):
            (margin, theirs), place = begins.groups(), begins.start()
            text = "``torch.optim`` has none."
            if theirs:
                text = f"Differs from {theirs}: it takes sparse gradients. States, and numbers"
                text += f" but for\n{margin}roundings, are the same."
            if not re.search(r"^ *(Differs from|``torch.optim`` has none)", doc, re.M):
                doc = f"{doc[:place]}{margin}{text}\n\n{doc[place:]}"
            if ">>> " not in doc:
                example = "".join(f"\n{margin}>>> {line.format(name)}" for line in _EXAMPLE)
                doc = f"{doc.rstrip()}\n{example}\n{margin}"
        return super().completed(doc, name, names, of_call)


_EXAMPLE = (
    "import torch",
    "layer = torch.nn.Linear(2, 1)",
    "optimizer = {}(layer.parameters(), lr=0.1)",
    "layer(torch.ones(1, 2)).sum().backward()",
    "optimizer.step()",
)


TORCH = _OfTorch(
    arguments={"rounding": OPTIMIZERS.arguments["rounding"]}
    | entries("""\
    params: tensors or groups, as in ``torch.optim``; float32, float64, float16 or bfloat16.
    lr: learning rate, at least 0; a number or a tensor of one element.
    betas: two numbers in [0, 1).
    eps: at least 0.
    weight_decay: at least 0; see the formula.
    amsgrad: see the formula.
    decoupled_weight_decay: see the formula.
    nesterov: see the formula; needs a momentum, and no dampening.
    dampening: see the formula; the first update has none.
    maximize: whether steps go up the gradient, not down: ``g`` is negated first.
    foreach: changes no number: every step is one call.
    fused: changes no number; True makes a ``GradScaler`` leave scaling and skipping to the
        step.
    capturable: must be False: the host reads learning rates and counts.
    differentiable: must be False: autograd does not see the step.
    eps_hat: ``eps`` stands beside the root that is not corrected, as in `SparseAdam`. An option
        of groups too: so one optimizer has the numbers of two.
    rowwise_bias_correction: t is the number of updates of each row, in a state ``updates``, not
        that of the parameter. A vector is one row. Not with ``sparse="catch_up"`` or
        ``amsgrad``. An option of groups too.
    sparse: what a sparse gradient updates (``torch.sparse_coo``, coalesced or not; rows of
        equal indices are summed first). ``"touched"``: the rows that occur. ``"all"``: every
        row, those that do not occur with a gradient of 0. ``"catch_up"``: the numbers of
        ``"all"``, but rows that do not occur sleep, and take the steps that they have missed
        before they are read (``watch``, ``prepare``) or written; rules whose steps without a
        gradient cannot be summed raise. None: the rows that occur, in classes that are made for
        sparse gradients (`SparseAdam`, `LazyAdam`, `FTRL`, `RowWiseAdagrad`, `RowWiseAdam`) and
        where all mean the same (`SGD` without momentum and decay, `Adagrad` without decay);
        else the step raises.
    skip_nonfinite: a step with a NaN or an infinity in any gradient changes nothing, and is
        counted in ``skipped_steps``. No option of groups.
    state_dtype: a dtype of PyTorch for the states; None: that of each parameter, or float32
        where ``rounding`` is ``"master"``.
"""),
    errors={
        "": "    ValueError: an argument is out of range.",
        "differentiable": "    RuntimeError: an argument must be False.",
    },
)
"""The optimizers of `nn.torch`."""
