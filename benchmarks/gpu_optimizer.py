"""A step of AdamW on a CUDA device beside PyTorch's fused one and the device's memory, rounds interleaved: fp32.

The parameters are those of GPT-2 small, 124 million. A step reads parameter, gradient and two moments
and writes all but the gradient, 28 bytes a parameter; "copy" moves as many bytes, half read and half
written. Before that, the device's bits are compared with the CPU's. Needs a device, `tessera` with its
plug-in of kernels, and PyTorch:

    python benchmarks/gpu_optimizer.py
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import tessera as ts
import torch

ROUNDS, STEPS, WARM_UP = 20, 20, 5
BYTES_PER_PARAMETER = 28
SETTINGS = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Tensors = dict[str, torch.Tensor]


def gpt2_small() -> dict[str, tuple[int, ...]]:
    width = 768
    shapes: dict[str, tuple[int, ...]] = {"wte": (50257, width), "wpe": (1024, width)}
    for layer in range(12):
        for norm in ("ln_1", "ln_2"):
            shapes[f"h.{layer}.{norm}.weight"] = shapes[f"h.{layer}.{norm}.bias"] = (width,)
        for name, rows, columns in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes[f"h.{layer}.{name}.weight"] = (rows, columns)
            shapes[f"h.{layer}.{name}.bias"] = (columns,)
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (width,)
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int, scale: float) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}


def on_device(tensors: Tensors) -> Tensors:
    return {name: tensor.cuda() for name, tensor in tensors.items()}


def check_bits() -> None:
    """Odd sizes, some not aligned to what a thread loads at once."""
    shapes = {f"p{size}": (size,) for size in (1, 3, 257, 8192, 8193, 100_003)}
    params, grads = random_tensors(shapes, 1, 0.02), random_tensors(shapes, 2, 1e-3)
    device_params, device_grads = on_device(params), on_device(grads)
    for tensors in (params, grads, device_params, device_grads):
        tensors["from the second element on"] = tensors["p100003"].clone()[1:]
    cpu = ts.AdamW(params, grads, **SETTINGS)
    cuda = ts.AdamW(device_params, device_grads, **SETTINGS)
    cuda.set_stream(torch.cuda.current_stream())
    for step in range(5):
        norms = cpu.clip_grad_norm(0.5 / (step + 1)), cuda.clip_grad_norm(0.5 / (step + 1))
        assert math.isclose(*norms, rel_tol=1e-12), norms
        cpu.step()
        cuda.step()
    torch.cuda.synchronize()
    for name, tensor in params.items():
        assert torch.equal(tensor, device_params[name].cpu()), name
    print(f"bits: the device's are the CPU's after 5 steps over {sum(t.numel() for t in params.values()):,} parameters")


def milliseconds(act: Callable[[], object]) -> float:
    """Of one call, on the current stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(STEPS):
        act()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / STEPS


def nominal_bandwidth() -> float | None:
    """Bytes a second, by the device's clock and bus; None if PyTorch does not say."""
    properties = torch.cuda.get_device_properties(0)
    clock, bus = getattr(properties, "memory_clock_rate", None), getattr(properties, "memory_bus_width", None)
    return 2 * clock * 1e3 * bus / 8 if clock and bus else None


def main() -> None:
    torch.cuda.set_device(0)
    print(f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}, PyTorch {torch.__version__}")
    check_bits()
    shapes = gpt2_small()
    count = sum(math.prod(shape) for shape in shapes.values())
    params, grads = random_tensors(shapes, 3, 0.02), random_tensors(shapes, 4, 1e-3)

    ours_params, ours_grads = on_device(params), on_device(grads)
    ours = ts.AdamW(ours_params, ours_grads, **SETTINGS)
    ours.set_stream(torch.cuda.current_stream())
    theirs_params = {name: torch.nn.Parameter(tensor) for name, tensor in on_device(params).items()}
    for name, param in theirs_params.items():
        param.grad = grads[name].cuda()
    theirs = torch.optim.AdamW(theirs_params.values(), fused=True, **SETTINGS)
    source = torch.empty(count * BYTES_PER_PARAMETER // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    acts = {"tessera": ours.step, "torch fused": theirs.step, "copy": lambda: target.copy_(source)}
    for act in acts.values():
        for _ in range(WARM_UP):
            act()
    apart = max((ours_params[name] - param.detach()).abs().max().item() for name, param in theirs_params.items())
    print(f"parameters differ from PyTorch's by at most {apart:.2e} after {WARM_UP} steps")
    times: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(ROUNDS):
        for name, act in acts.items():
            times[name].append(milliseconds(act))

    nominal = nominal_bandwidth()
    print(f"AdamW over {count:,} parameters in {len(shapes)} tensors; median of {ROUNDS} rounds of {STEPS} steps")
    for name, rounds in times.items():
        median = statistics.median(rounds)
        rate = count * BYTES_PER_PARAMETER / median / 1e6
        part = "" if nominal is None else f", {rate * 1e9 / nominal:.3f} of the memory's {nominal / 1e9:.0f} GB/s"
        print(f"  {name:12} {median:7.4f} ms (from {min(rounds):.4f} to {max(rounds):.4f}), {rate:6.0f} GB/s{part}")
    ratios = [t / o for t, o in zip(times["torch fused"], times["tessera"], strict=True)]
    print(f"  torch / tessera: {statistics.median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
