"""The table of cases: everything that `fusestep bench` measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import family, work
from .work import Work


@dataclass(frozen=True)
class PeerForms:
    """What a peer runs against a case.

    Args:
        peer: its name.
        forms: what it runs; where there are several, the fastest counts.
        target: how many times faster than that we should be; None where nothing was promised.
        warm_up: steps before the first that is measured.
    """

    peer: str
    forms: tuple[str, ...]
    target: float | None = None
    warm_up: int = 3


def _torch(*forms: str, target: float | None = None) -> PeerForms:
    return PeerForms("torch", forms, target)


def _mindspore(*forms: str, target: float) -> PeerForms:
    # Long, because it searches for the best number of threads in its first steps.
    return PeerForms("mindspore", forms, target, warm_up=25)


@dataclass(frozen=True)
class StepCase:
    """A step that is timed against a bound and peers.

    Args:
        name: as on the command line.
        summary: what it does, one line.
        setup: allocates everything.
        of_bound: the share of the bound's speed that our step should reach.
        peers: whom it is compared with.
        rounds: of the interleaved measurement.
        lead_in, steps: of each sample; see `worker_protocol.sample`.
    """

    name: str
    summary: str
    setup: Callable[[], Work]
    of_bound: float | None = None
    peers: tuple[PeerForms, ...] = ()
    rounds: int = 31
    lead_in: int = 1
    steps: int = 1


@dataclass(frozen=True)
class SpecialCase:
    """A case with a method of its own, which its module describes."""

    name: str
    summary: str


def _dense(
    name: str, summary: str, of_bound: float | None, *peers: PeerForms, rounds: int = 21
) -> StepCase:
    """A dense step of an optimizer other than Adam."""
    return StepCase(
        f"dense-{name}",
        f"{summary}, one float32 tensor of 2^24 elements",
        family.setup(name),
        of_bound,
        peers,
        rounds,
    )


STEPS = (
    StepCase(
        "dense-adam",
        "Adam, one float32 tensor of 2^24 elements; 28 B an element",
        work.dense_adam,
        of_bound=0.95,
        peers=(
            _torch("Adam(fused=True)", target=1.15),
            _mindspore("nn.Adam", "ops.Adam", target=2.3),
        ),
    ),
    StepCase(
        "dense-amsgrad",
        "AMSGrad, one float32 tensor of 2^24 elements; 36 B an element",
        work.dense_amsgrad,
        of_bound=0.95,
        peers=(
            _torch("Adam(amsgrad, fused=True)"),
            _mindspore("nn.Adam(use_amsgrad=True)", "ops.ApplyAdamWithAmsgradV2", target=5.0),
        ),
        rounds=21,
    ),
    StepCase(
        "many-small",
        "Adam, 200 parameters of 16 to 4096 elements, new gradients each step, Python included",
        work.many_small,
        peers=(_torch("Adam(fused=True)", target=10.0), _torch("Adam(foreach=True)")),
        rounds=51,
        steps=5,
    ),
    StepCase(
        "rows-fused",
        "FusedSparseAdam, 500,000 x 64, 65,536 Zipf indices; bound: the 24 B sweep alone",
        work.rows_fused,
        of_bound=0.80,
        peers=(_mindspore("ops.FusedSparseAdam", target=15.0),),
        rounds=21,
    ),
    StepCase(
        "rows-lazy",
        "FusedSparseLazyAdam, 500,000 x 64, 65,536 Zipf indices",
        work.rows_lazy,
        peers=(
            _torch("SparseAdam", target=18.0),
            _mindspore("ops.FusedSparseLazyAdam", target=25.0),
        ),
        rounds=31,
        steps=3,
    ),
    _dense("sgd", "SGD; 12 B an element", 0.92, _torch("SGD(fused=True)", target=1.0)),
    _dense(
        "momentum",
        "Momentum; 20 B an element",
        0.92,
        _torch("SGD(momentum, fused=True)", target=1.0),
    ),
    _dense(
        "rmsprop", "RMSProp; 20 B an element", 0.92, _torch("RMSprop(foreach=True)", target=1.0)
    ),
    _dense(
        "rmsprop-momentum",
        "RMSProp with momentum; 28 B an element",
        0.92,
        _torch("RMSprop(momentum, foreach=True)", target=1.0),
    ),
    _dense(
        "rmsprop-centered",
        "centered RMSProp; 28 B an element",
        0.92,
        _torch("RMSprop(centered, foreach=True)", target=1.0),
    ),
    _dense("adagrad", "Adagrad; 20 B an element", 0.92, _torch("Adagrad(fused=True)", target=1.0)),
    _dense("proximal-adagrad", "proximal Adagrad; 20 B an element", 0.92),
    _dense("ftrl", "FTRL, lr_power -0.5; 28 B an element", 0.92),
    _dense("ftrl-power", "FTRL, lr_power -0.4; 28 B an element", None, rounds=5),
    _dense("adam-weight-decay", "AdamWeightDecay; 28 B an element", 0.92),
    _dense("lamb", "LAMB; 16 + 28 B an element", 0.85),
    _dense("lars", "LARS around Momentum; 8 + 20 B an element", 0.85),
    _dense(
        "adafactor",
        "Adafactor, 4096 x 4096; no first moment; bound: the update alone, 12 B an element",
        None,
        _torch("Adafactor(foreach=True)", target=1.0),
        rounds=11,
    ),
    StepCase(
        "rows-ftrl",
        "FusedSparseFtrl, 500,000 x 64, 65,536 Zipf indices",
        work.rows_ftrl,
        peers=(_mindspore("ops.FusedSparseFtrl", target=15.0),),
        rounds=31,
        steps=3,
    ),
    StepCase(
        "rows-proximal-adagrad",
        "FusedSparseProximalAdagrad, 500,000 x 64, 65,536 Zipf indices",
        work.rows_proximal_adagrad,
        peers=(_mindspore("ops.FusedSparseProximalAdagrad", target=15.0),),
        rounds=31,
        steps=3,
    ),
)
NO_CLIFF = SpecialCase(
    "no-cliff",
    "FusedSparseLazyAdam, uniform indices, D = 1 to 1024, B = 1 to 10^6, against the cache "
    "lines it touches",
)
FIRST_STEP = SpecialCase(
    "first-step", "import and first step in a fresh process, cold and with a filled cache"
)
CASES: tuple[StepCase | SpecialCase, ...] = (*STEPS, NO_CLIFF, FIRST_STEP)
