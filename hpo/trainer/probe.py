"""Observe the training of an objective on one rank through torch's hooks.

The training is not changed, except that cuDNN computes reproducibly.
"""

from __future__ import annotations

import hashlib
import math
import resource
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hpo.process.trace import Trace
from hpo.trainer.accelerator import find_accelerator_in_use

_HASH_BYTES = 8
_MAX_SAMPLES = 200_000  # Hashes are kept for this many samples.
_MAX_VALUES_PER_SAMPLE = 1024  # Of larger samples, evenly spaced values are hashed.
# Prefixes of parameter names by DistributedDataParallel, torch.compile and Fabric.
_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_forward_module.")


class Probe:
    """Records the training of an objective on this rank in `trace`, inside ``with``.

    It keeps only weak references to networks and optimizers, so that they are freed after an
    evaluation. It draws no random numbers, and does not communicate.
    """

    def __init__(self) -> None:
        self.trace = Trace()
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._step_counts: list[int] = []  # The number of steps of each optimizer.
        self._networks: list[weakref.ref[nn.Module]] = []  # Outermost modules that were trained.
        # The step and mode of each fingerprint of a network, after the network's number.
        self._recorded_moments: set[tuple[int, int, bool]] = set()
        self._known_modules: set[int] = set()
        self._parameter_names: dict[int, str] = {}  # By the id of the parameter.
        # Names of parameters without a gradient so far, by id.
        self._without_gradient: dict[int, str] = {}
        self._with_gradient: set[int] = set()
        self._hash_count = 0
        # Whether a call of the network has begun without a hashed batch so far.
        self._awaits_samples = False
        # States before the first call of a network.
        self._initial_random_states: list[torch.Tensor] | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> Probe:
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward),
        ]
        # By default, cuDNN rounds to TF32, so that the losses of 1 and 2 ranks differ by more than
        # the tolerance of a check.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
        if find_accelerator_in_use() is not None:  # Before that, no statistics exist.
            for index in range(torch.accelerator.device_count()):
                torch.accelerator.reset_peak_memory_stats(index)
        # Without Linux or permission, the peak is that of the whole process.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._start_time = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        trace = self.trace
        trace.seconds = time.monotonic() - self._start_time
        trace.memory = _read_peak_memory()
        trace.without_gradient = list(self._without_gradient.values())
        for handle in self._handles:
            handle.remove()

    def record_loss(self) -> None:
        """Record the number of steps and the fingerprints of all parameters at a loss."""
        self.trace.steps_at_losses.append(self.trace.steps)
        parameters: list[torch.Tensor] = []
        for optimizer in (reference() for reference in self._optimizers):
            if optimizer is not None:
                parameters += _list_optimizer_parameters(optimizer)
        self.trace.at_loss.append(_compute_fingerprint(parameters))
        for reference in self._networks:
            if (network := reference()) is not None:
                self._record_network(network, trains=False)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        number = self._find_optimizer_number(optimizer)
        if number < len(self.trace.weights):
            return
        parameters = _list_optimizer_parameters(optimizer)
        gradients = [parameter.grad for parameter in parameters]
        self.trace.weights.append(_compute_fingerprint(parameters))
        self.trace.gradients.append(_compute_fingerprint(gradients))
        self._record_shapes(self.trace.shapes, parameters)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        number = self._find_optimizer_number(optimizer)
        self._step_counts[number] += 1
        # An optimizer may contain others, whose steps are not added.
        self.trace.steps = max(self._step_counts)
        for index, parameter in enumerate(_list_optimizer_parameters(optimizer)):
            key = id(parameter)
            if parameter.grad is not None:
                self._with_gradient.add(key)
                self._without_gradient.pop(key, None)
            elif parameter.requires_grad and key not in self._with_gradient:
                name = self._parameter_names.get(key, f"parameter {index} of the optimizer")
                self._without_gradient[key] = name

    def _find_optimizer_number(self, optimizer: Optimizer) -> int:
        for number, reference in enumerate(self._optimizers):
            if reference() is optimizer:
                return number
        self._optimizers.append(weakref.ref(optimizer))
        self._step_counts.append(0)
        return len(self._step_counts) - 1

    def _before_forward(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        trains = torch.is_grad_enabled()
        steps = self.trace.steps
        if trains and id(module) not in self._known_modules:
            self._register_network(module)
        if not trains or steps & (steps - 1) == 0:
            self._record_network(module, trains)
        is_first = bool(self._networks) and self._networks[0]() is module
        if trains and is_first and self._initial_random_states is None:
            self._initial_random_states = _get_random_states()
        if trains and self._hash_count < _MAX_SAMPLES:
            self._record_samples(given, is_first)

    def _record_samples(self, given: tuple[Any, ...], is_first: bool) -> None:
        """Record a hash of each sample in the input of the network.

        `is_first` is whether `given` is the input of the network itself, and not of a layer. If the
        network gets only keyword arguments, the input of its first layer is used.
        """
        self._awaits_samples |= is_first
        hashes = _hash_samples(given[0]) if self._awaits_samples and given else []
        # One-dimensional inputs of layers are positions of tokens.
        if hashes and (is_first or given[0].dim() > 1):
            self.trace.samples.append([self.trace.steps, hashes])
            self._hash_count += len(hashes)
            self._awaits_samples = False

    def _after_forward(self, module: nn.Module, *_: object) -> None:
        """Record whether a network draws random numbers in its first call."""
        if torch.compiler.is_compiling() or not self._networks or self._networks[0]() is not module:
            return
        self._awaits_samples = False
        if not self._initial_random_states:
            return
        states = zip(self._initial_random_states, _get_random_states(), strict=False)
        has_drawn = any(not before.equal(after) for before, after in states)
        self._initial_random_states = []
        is_known = self.trace.random_layers or any(
            _is_independent_of_ranks(layer) for layer in module.modules()
        )
        if has_drawn and not is_known:
            network = module
            while isinstance(inner := getattr(network, "module", None), nn.Module):
                network = inner
            _increment(self.trace.random_layers, type(network).__name__)

    def _record_network(self, module: nn.Module, trains: bool) -> None:
        """Record a fingerprint of a network, unless it has one of this step and value of `trains`.

        `trains` is False in validation and at a loss. This is not called in the hook after an
        optimizer step, since ranks may still exchange the new weights then.
        """
        numbers = [index for index, network in enumerate(self._networks) if network() is module]
        if not numbers:
            return
        moment = (numbers[0], self.trace.steps, trains)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if moment in self._recorded_moments or not parameters or any(map(is_lazy, parameters)):
            return
        if not any(number == moment[0] for number, _, _ in self._recorded_moments):
            self._record_shapes(self.trace.network_shapes, parameters)
        # Inside transformations of torch.func, tensors have no values.
        with suppress(RuntimeError):
            fingerprint = _compute_fingerprint(parameters)
            self.trace.networks.append([*moment, fingerprint])
            self._recorded_moments.add(moment)

    def _record_shapes(self, shapes: list[list[int]], parameters: Sequence[torch.Tensor]) -> None:
        shapes += [list(parameter.shape) for parameter in parameters]
        self.trace.sharded |= any(hasattr(parameter, "to_local") for parameter in parameters)

    def _register_network(self, module: nn.Module) -> None:
        """Record the parameter names and layers of a network when it is first trained."""
        self._known_modules.update(map(id, module.modules()))
        named = list(module.named_parameters())
        for name, parameter in named:
            for wrapper in _WRAPPER_PREFIXES:
                if name.startswith(wrapper):
                    name = name.replace(wrapper, "")
            self._parameter_names[id(parameter)] = name
        if named:
            self._networks.append(weakref.ref(module))
        for layer in module.modules():
            if layer.training:
                self._count_layer(layer)

    def _count_layer(self, layer: nn.Module) -> None:
        kind = type(layer).__name__
        if isinstance(layer, _BatchNorm):
            is_of_torch = type(layer).__module__.startswith("torch.nn.")
            if is_of_torch and not isinstance(layer, SyncBatchNorm):
                _increment(self.trace.normalization_layers, kind)
            else:
                _increment(self.trace.synchronized_layers, kind)
        if _draws_random_numbers(layer):
            _increment(self.trace.random_layers, kind)


def _increment(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _list_optimizer_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def _compute_fingerprint(tensors: Sequence[torch.Tensor | None]) -> list[list[float]]:
    fingerprint = []
    for tensor in tensors:
        if tensor is None:
            fingerprint.append([0.0, 0.0])
            continue
        values: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if values.is_sparse:
            values = values.coalesce().values()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        values = values.detach().flatten().double()
        fixed = torch.arange(len(values), dtype=values.dtype, device=values.device).cos_()
        fingerprint.append([values.norm().item(), values.dot(fixed).item()])
    return fingerprint


def _get_random_states() -> list[torch.Tensor]:
    module = find_accelerator_in_use()
    return [torch.get_rng_state(), *([module.get_rng_state()] if module is not None else [])]


def _is_independent_of_ranks(layer: nn.Module) -> bool:
    """Return whether the random numbers of a layer are the same on any number of ranks."""
    return type(layer).__module__.startswith("hpo.training.")


def _draws_random_numbers(layer: nn.Module) -> bool:
    if _is_independent_of_ranks(layer):
        return False
    if "drop" not in type(layer).__name__.lower() and type(layer).__name__ != "StochasticDepth":
        # Recurrent and attention layers have a probability of this name, other modules a layer.
        probability = getattr(layer, "dropout", 0.0)
        return isinstance(probability, float) and probability > 0
    probability = getattr(layer, "p", 1.0)
    return not isinstance(probability, float) or probability > 0


def _hash_samples(batch: object) -> list[str]:
    """Return a hash of each sample of a batch, a tensor of shape (N, ...)."""
    if not isinstance(batch, torch.Tensor) or batch.is_meta or hasattr(batch, "to_local"):
        return []
    if batch.dim() < 1 or not batch.numel():
        return []
    rows = batch.detach().reshape(len(batch), -1)
    stride = math.ceil(rows.shape[1] / _MAX_VALUES_PER_SAMPLE)
    chosen = rows[:, ::stride].contiguous().cpu().view(torch.uint8).numpy()
    return [hashlib.blake2b(row, digest_size=_HASH_BYTES).hexdigest() for row in chosen]


def _read_peak_memory() -> int:
    """Return the peak in bytes since the probe began: of a used device, or resident memory."""
    if find_accelerator_in_use() is not None:
        devices = range(torch.accelerator.device_count())
        return max(map(torch.accelerator.max_memory_reserved, devices))
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
