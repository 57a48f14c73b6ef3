"""What one pass of an example shows of a network: shapes, calls and FLOPs."""

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.growth import first_tensor, output_form

TOPOLOGIES = {4: "cnn", 3: "transformer"}  # by the number of dimensions of the output
Run = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class ModuleUse:
    """What one forward pass of an example showed of a module."""

    name: str
    calls: int
    shape: tuple[int, ...] | None  # of the first tensor in its output
    channels_last: bool
    output: tuple[str, int | str] | None  # form of its output, and the place of the tensor in it
    keywords: tuple[str, ...]  # names of its keyword arguments
    start: int  # FLOPs of the whole batch before it ran
    end: int  # and after it

    @property
    def topology(self) -> str | None:
        """The kind of seeds that fit its output; None if none do."""
        return None if self.shape is None else TOPOLOGIES.get(len(self.shape))


@dataclass(frozen=True)
class Trace:
    """What one forward and backward pass of an example showed of a network."""

    uses: dict[str, ModuleUse]  # by the name of the module, in the order in which they finished
    batch: int  # samples of the example
    positions: int  # pixels or tokens of a sample
    options: int | None  # last dimension of the output, such as classes or tokens; None if there is no such output
    forward: float  # FLOPs of one sample
    backward: float


def trace_network(model: nn.Module, example: Any, run: Run | None = None) -> Trace:
    """Run a network on an example in evaluation mode, forward and backward; nothing of it changes."""
    counter = FlopCounterMode(display=False)
    calls: dict[str, int] = {}
    uses: dict[str, ModuleUse] = {}
    starts: dict[str, list[tuple[int, tuple[str, ...]]]] = {}

    def before(name: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, keywords: Mapping[str, Any]) -> None:
            starts.setdefault(name, []).append((counter.get_total_flops(), tuple(keywords)))

        return record

    def after(name: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            features, (start, keywords) = first_tensor(output), starts[name].pop()
            calls[name] = calls.get(name, 0) + 1
            uses.pop(name, None)
            uses[name] = ModuleUse(
                name,
                calls[name],
                None if features is None else tuple(features.shape),
                features is not None and features.ndim == 4 and _is_channels_last(features),
                output_form(output),
                keywords,
                start,
                counter.get_total_flops(),
            )

        return record

    modules = {name: module for name, module in model.named_modules() if name}
    handles = [module.register_forward_pre_hook(before(name), with_kwargs=True) for name, module in modules.items()]
    handles += [module.register_forward_hook(after(name)) for name, module in modules.items()]
    training = {name: module.training for name, module in model.named_modules()}
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    example = move_to(example, device)
    positions, batch = input_size(example)
    try:
        model.eval()
        with (
            _without_compilation(),
            sdpa_kernel(SDPBackend.MATH),  # torch does not count the FLOPs of its fused attention for CPUs
            torch.random.fork_rng(),
            torch.inference_mode(False),
            torch.enable_grad(),
            counter,
        ):
            output = (run or call_model)(model, example)
            forward = counter.get_total_flops()
            backward = _backward_flops(output, weights, counter)
    finally:
        for handle in handles:
            handle.remove()
        for name, module in model.named_modules():
            module.training = training[name]
    return Trace(uses, batch, positions, output_options(output), forward / batch, (backward or 2 * forward) / batch)


def call_model(model: nn.Module, example: Any) -> Any:
    """Call a network with a batch; of a tuple, as many entries as its forward method requires."""
    if isinstance(example, Mapping):
        return model(**example)
    if isinstance(example, tuple | list):
        return model(*example[: required_inputs(model)])
    return model(example)


def required_inputs(model: nn.Module) -> int:
    """Number of inputs that the forward method requires, at least 1."""
    parameters = inspect.signature(model.forward).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return max(1, sum(each.kind in plain and each.default is inspect.Parameter.empty for each in parameters))


def input_size(example: Any) -> tuple[int, int]:
    """Pixels or tokens of a sample, and the number of samples, from the first tensor of a batch."""
    first = _first_input(example)
    if first is None or first.ndim == 0:
        raise ValueError(f"example={type(example).__name__}: must be a batch whose first tensor is the input.")
    spatial = first.shape[2:] if first.ndim == 4 else first.shape[1:2]
    return max(1, math.prod(spatial)), first.shape[0]


def _first_input(example: Any) -> Tensor | None:
    """The first tensor of a batch, which may be nested."""
    first = first_tensor(example)
    if first is not None:
        return first
    parts = example.values() if isinstance(example, Mapping) else example if isinstance(example, tuple | list) else ()
    return next((found for part in parts if (found := _first_input(part)) is not None), None)


def move_to(example: Any, device: torch.device) -> Any:
    """A batch on another device."""
    if isinstance(example, Tensor):
        return example.to(device)
    if isinstance(example, Mapping):
        return {key: move_to(value, device) for key, value in example.items()}
    if isinstance(example, tuple | list):
        return [move_to(value, device) for value in example]
    return example


def output_options(output: Any) -> int | None:
    """Size of the last dimension of the first tensor [batch, ..., options] in an output."""
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    first = first_tensor(output)
    return None if first is None or first.ndim < 2 or first.shape[-1] < 2 else first.shape[-1]


@contextmanager
def _without_compilation() -> Iterator[None]:
    """Context in which compiled modules run as they are written, so that the hooks of their parts run."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `torch.compile")  # the counter of FLOPs has global hooks
        yield


def _is_channels_last(features: Tensor) -> bool:
    return features.is_contiguous(memory_format=torch.channels_last) and not features.is_contiguous()


def _backward_flops(output: Any, weights: Sequence[nn.Parameter], counter: FlopCounterMode) -> int:
    """FLOPs of the gradients of the weights; 0 if they cannot be computed."""
    scalar, before = _sum_of_floats(output), counter.get_total_flops()
    if scalar is None or not weights:
        return 0
    try:
        torch.autograd.grad(scalar, weights, allow_unused=True)
    except RuntimeError:  # some networks cannot be differentiated in evaluation mode
        return 0
    return counter.get_total_flops() - before


def _sum_of_floats(output: Any) -> Tensor | None:
    """The sum of the first floating-point tensor that needs a gradient."""
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else [output]
    for part in parts:
        if isinstance(part, Tensor) and part.is_floating_point() and part.requires_grad:
            return part.float().sum()
    return None
