"""Docstrings of optimizer classes, completed with the options that many classes share.

A class describes its own options; the others are put in when it is made. ``docs/_site`` reads the
sources and calls `completed` for the pages of the site.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_BESIDE = "\n        "  # between the lines of an entry


def entries(text: str) -> dict[str, str]:
    """The entries of an ``Args`` section, by name; names before one colon share an entry."""
    blocks: list[str] = []
    for line in text.splitlines():
        if blocks and line[4:5] == " ":
            blocks[-1] += f"\n{line}"
        else:
            blocks.append(line)
    named = ((block.partition(":")[0].replace("\n", " "), block) for block in blocks)
    return {name.strip(): block for names, block in named for name in names.split(",")}


COMMON = entries("""\
    params: a list of `Parameter` or arrays, or of group dicts, whose keys `Optimizer` lists.
    learning_rate: float or int >= 0, a 0-d or 1-d array or an iterable of floats (step s uses
        element s), a `LearningRateSchedule`, a callable of the step 0, 1, 2, ..., or a float32
        or float64 array of one element on the CUDA device of the parameters, which every step
        reads and waits for.
    beta1, beta2: floats in (0, 1).
    eps: float > 0.
    weight_decay: float or int >= 0, or a callable of the step. Ungrouped parameters whose name
        contains "beta" or "gamma" do not decay; in groups the values of the groups count alone.
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
""")
"""The options of classes of `nn`, as their docstrings describe them."""


def completed(doc: str, names: Iterable[str], common: Mapping[str, str]) -> str:
    """``doc`` with entries for all ``names`` that it or ``common`` describes, in their order.

    An entry of its own that begins with ``...`` goes on where the common one ends. Without a
    section ``Args`` one is put before ``Raises``; a text that has neither, or has entries of
    another form, stays as it is.
    """
    head, found, rest = doc.partition("Args:\n")
    if not found:
        head, found, rest = doc.partition("Raises:\n")
    margin = head[len(head.rstrip(" ")) :]
    if not found or not head.endswith(f"\n{margin}"):
        return doc
    section, tail = "", f"\n\n{margin}{found}{rest}"
    if found == "Args:\n":
        section = rest.partition("\n\n")[0].rstrip()
        tail = rest[len(section) :]
    section = f"\n{section}".replace(f"\n{margin}", "\n")[1:]
    own = entries(section)
    is_ours = all(name.lstrip("*").isidentifier() for name in own)
    if not (is_ours and all(line.startswith("    ") for line in section.splitlines())):
        return doc
    blocks: dict[str, None] = {}  # each once, in order
    for name in [*names, *own]:
        block, shared = own.get(name, ""), common.get(name, "")
        more = block.removeprefix(f"    {name}: ... ")
        blocks[shared + _BESIDE + more if more != block else block or shared] = None
    added = "".join(f"\n{block}" for block in blocks if block).replace("\n", f"\n{margin}")
    return f"{head}Args:{added}{tail}" if added else doc


def complete(cls: type, common: Mapping[str, str]) -> None:
    """Complete the docstring of a class with the options of its constructor, if it has one."""
    if cls.__doc__ is not None:
        cls.__doc__ = completed(cls.__doc__, _parameters(cls), common)


def _parameters(cls: Any) -> Iterable[str]:
    constructor = cls.__init__
    if hasattr(constructor, "__signature__"):
        return [*constructor.__signature__.parameters]
    code = getattr(constructor, "__code__", None)  # faster than `inspect.signature`
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
