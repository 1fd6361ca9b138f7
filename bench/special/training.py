"""Whole iterations of PyTorch programs, with AdamW of PyTorch (``fused=True``) and of `nn.torch`.

Both train one model in one process, some iterations in turn, each with states of its own:
multilayer perceptrons of L square layers (LxD, batch 64), ResNet-50 (8 images of 64 x 64) and GPT-2
small (64 tokens). The optimizer's step is timed, and the iteration around it, which feels what
threads do after a step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

from ..errors import BenchError
from ..point import company
from ..report.result import Progress, SpecialResult, tracked
from ..workers.worker_protocol import before_step

# Optimizers, the loss of the next batch, and what comes before and is not timed, if anything.
Program = tuple[Any, ...]
OURS, THEIRS = "nn.torch", "torch"
PARTS = "step", "iteration"
SCENARIOS = "loop", "pause20", "busy"
# What ours may take in terms of PyTorch's.
LIMITS = {"step": 1.05, "iteration": 1.03}
_TURN, _MOST, _ROUNDS = 0.1, 20, 8  # seconds, iterations; the first two rounds are not counted


def run(result: SpecialResult, threads: int, progress: Progress) -> None:
    """Measure all models in all scenarios.

    Raises:
        BenchError: there is no PyTorch.
    """
    torch = torch_for(result.name, threads)
    todo = [(model, scenario) for model in MODELS for scenario in SCENARIOS]
    ours, theirs = import_module("fusestep.nn.torch").AdamW, partial(torch.optim.AdamW, fused=True)
    for model, scenario in tracked(todo, progress):
        torch.manual_seed(0)
        parameters, loss = MODELS[model](torch)
        optimizers = {OURS: ours, THEIRS: theirs}
        programs = {name: ([make(parameters, lr=1e-5)], loss) for name, make in optimizers.items()}
        keep(result, f"{model} {scenario}", measured(programs, scenario, threads), LIMITS)


def keep(
    result: SpecialResult,
    label: str,
    samples: dict[tuple[str, str], list[float]],
    limits: dict[str, float],
) -> None:
    """Add the samples of ours and of theirs, which come first and second.

    ``limits`` has by part what ours may take in terms of theirs.
    """
    ours, theirs = dict.fromkeys(name for name, _ in samples)
    for part, limit in limits.items():
        labels = {name: f"{label} {name}: {part}" for name in (ours, theirs)}
        result.add({labels[name]: samples[name, part] for name in labels})
        result.limits[labels[ours]] = limit * result.times[labels[theirs]].median


def torch_for(name: str, threads: int) -> Any:
    """PyTorch on so many threads, for the case of this name.

    Raises:
        BenchError: it is not installed.
    """
    try:
        torch: Any = import_module("torch")
    except ImportError:
        raise BenchError(f"{name}: needs PyTorch here") from None
    torch.set_num_threads(threads)
    return torch


def measured(
    programs: dict[str, Program], scenario: str, threads: int
) -> dict[tuple[str, str], list[float]]:
    """Seconds of each program and part, in a scenario."""
    before = before_step(scenario, threads)

    def iterate(program: Program) -> dict[str, float]:
        optimizers, loss, *loads = program
        for load in (*loads, before):
            load()
        start, processor = time.perf_counter(), time.process_time()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss().backward()
        middle = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        end, spent = time.perf_counter(), time.process_time() - processor
        return {"step": end - middle, "iteration": end - start, "processor": spent}

    with company(scenario):
        return in_turns(programs, iterate)


def in_turns(
    programs: dict[str, Any], iterate: Callable[[Any], dict[str, float]]
) -> dict[tuple[str, str], list[float]]:
    """Seconds of each program, or optimizer, and part, some iterations of each in turn.

    ``iterate(program)`` gives the seconds of each part, of the whole "iteration" among them.
    """
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    iterations = 2
    for turn in range(_ROUNDS):
        for name, program in programs.items():
            for index in range(iterations):
                parts = iterate(program)
                if turn > 1 and index > 0:  # the first follows the other program's step
                    for part, seconds in parts.items():
                        samples[name, part].append(seconds)
        iterations = min(_MOST, 2 + int(_TURN / parts["iteration"]))
    return samples


# -- models: parameters and the loss of a batch ---------------------------------------------------

Model = tuple[list[Any], Callable[[], Any]]


def _perceptron(torch: Any, layers: int, width: int) -> Model:
    nn = torch.nn
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*parts)
    inputs, targets = torch.randn(64, width), torch.randn(64, width)
    return list(model.parameters()), lambda: nn.functional.mse_loss(model(inputs), targets)


def _resnet50(torch: Any) -> Model:
    """He et al. (2016)."""
    nn = torch.nn

    def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> Iterator[Any]:
        yield nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
        yield nn.BatchNorm2d(outputs)

    class Bottleneck(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, inputs: int, width: int, stride: int) -> None:
            super().__init__()
            first, last = convolution(inputs, width, 1), convolution(width, 4 * width, 1)
            middle = convolution(width, width, 3, stride)
            self.residual = nn.Sequential(*first, nn.ReLU(), *middle, nn.ReLU(), *last)
            keeps = inputs == 4 * width
            projection = () if keeps else convolution(inputs, 4 * width, 1, stride)
            self.shortcut = nn.Sequential(*projection)

        def forward(self, x: Any) -> Any:
            return torch.relu(self.residual(x) + self.shortcut(x))

    blocks, channels = [], 64
    for count, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(count):
            stride = 2 if block == 0 and width > 64 else 1
            blocks.append(Bottleneck(channels, width, stride))
            channels = 4 * width
    begin = (*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    model = nn.Sequential(*begin, *blocks, *end)
    images, classes = torch.randn(8, 3, 64, 64), torch.randint(0, 1000, (8,))
    return list(model.parameters()), lambda: nn.functional.cross_entropy(model(images), classes)


def _gpt2(torch: Any) -> Model:
    """Radford et al. (2019), without dropout."""
    nn, width, length, tokens = torch.nn, 768, 64, 50257
    layer = nn.TransformerEncoderLayer(
        width, 12, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, 12, nn.LayerNorm(width), enable_nested_tensor=False)
    words, places = nn.Embedding(tokens, width), nn.Embedding(1024, width)
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    text, index = torch.randint(0, tokens, (1, length + 1)), torch.arange(length)

    def loss() -> Any:
        states = encoder(words(text[:, :-1]) + places(index), mask, is_causal=True)
        return nn.functional.cross_entropy((states @ words.weight.T)[0], text[0, 1:])

    return [p for module in (words, places, encoder) for p in module.parameters()], loss


MODELS: dict[str, Callable[[Any], Model]] = {
    **{
        f"{layers}x{width}": partial(_perceptron, layers=layers, width=width)
        for layers, width in ((4, 256), (3, 512), (3, 1024), (3, 2048))
    },
    "resnet50": _resnet50,
    "gpt2": _gpt2,
}
