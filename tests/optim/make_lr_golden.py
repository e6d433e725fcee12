"""Makes lr_golden.hpp: the learning rates of schedules, by the formulas as they were published.

    python tests/optim/make_lr_golden.py > tests/optim/lr_golden.hpp

The formulas of PyTorch are here too, so that nothing but Python is needed. tests/interop/test_torch_schedules.py
compares the library with PyTorch itself, and with DeepSpeed's formulas from here. These take DeepSpeed's iteration
number, i = -1 before the first step.
"""

import math
from collections.abc import Callable

BASE = 0.4
STEPS = 20  # 0 to 19, where the longest schedule ends at 14


# ---------------------------------------------------------------- DeepSpeed


def _warm(i: int, steps: int, kind: str) -> float:
    return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps


def warmup_lr(i, base, *, min_lr=0.0, max_lr=None, steps=1000, kind="log"):
    high, n = base if max_lr is None else max_lr, max(2, steps)
    if i < 0:
        return min_lr
    return min_lr + (high - min_lr) * (_warm(i, n, kind) if i < n else 1.0)


def warmup_decay_lr(i, base, *, total, min_lr=0.0, max_lr=None, steps=1000, kind="log"):
    high, n = base if max_lr is None else max_lr, max(2, steps)
    if i < n:
        return warmup_lr(i, base, min_lr=min_lr, max_lr=max_lr, steps=steps, kind=kind)
    return min_lr + (high - min_lr) * max(0.0, (total - i) / max(1.0, total - n))


def warmup_cosine_lr(i, base, *, total, min_ratio=0.0, steps=1000, cos_min_ratio=1e-4, kind="log"):
    n = max(2, steps)
    if i < 0:
        return 0.0
    if i < n:
        return base * (min_ratio + (1.0 - min_ratio) * _warm(i, n, kind))
    done = min(1.0, (i - n + 1) / max(1, total - n))
    return base * max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)


def range_test(i, _base, *, min_lr=1e-3, size=2000, rate=1.0, staircase=False):
    x = (i + 1) / size
    return min_lr * (1 + rate * (math.floor(x) if staircase else x))


def _one_cycle_scale(i: int, first: int, second: int, stairs: tuple[int, int]) -> float:
    total = float(first + second)
    x = 1.0 + (i + 1) / total - math.floor(1 + (i + 1) / total)
    ratio = first / total
    rising = x <= ratio
    scale = x / ratio if rising else (x - 1) / (ratio - 1)
    if count := stairs[0] if rising else stairs[1]:
        at = (i + 1) % (first + second)
        scale = math.floor((at / first if rising else (first + second - at) / second) * count) / count
    return scale


def one_cycle_lr(i, _base, *, low, high, first=2000, second=None, stairs=(0, 0), decay_step=0, decay_rate=0.0):
    second = first if second is None else second
    if i < first + second:
        return low + (high - low) * _one_cycle_scale(i, first, second, stairs)
    if decay_step == 0 or decay_rate == 0:
        return low
    return low / (1 + decay_rate * (i - (first + second) + 1) / decay_step)


def one_cycle_momentum(i, *, low=0.8, high=0.9, first=2000, second=None, stairs=(0, 0), decay_step=0, decay_rate=0.0):
    """What DeepSpeed's get_mom() returns. Its constructor sets `low` until the first step."""
    second = first if second is None else second
    if i < first + second:
        return high - (high - low) * _one_cycle_scale(i, first, second, stairs)
    if decay_step == 0 or decay_rate == 0:
        return high
    return high * (1 + decay_rate * (i - (first + second) + 1) / decay_step)


# ---------------------------------------------------------------- PyTorch and papers


def restarts(step: int, first: int, times: int) -> float:
    at, length = 0, first
    for _ in range(step):
        at += 1
        if at >= length:
            at, length = 0, length * times
    return (1 + math.cos(math.pi * at / length)) / 2


def inverse_sqrt(step: int, warmup: int) -> float:
    """Vaswani et al.: min(number^-0.5, number * warmup^-1.5), divided by its largest value."""
    number = step + 1
    return min(number**-0.5, number * warmup**-1.5) / warmup**-0.5


def wsd(step: int, warmup: int, stable: int, decay: int, shape: Callable[[float], float], least: float) -> float:
    if step < warmup:
        part = step / warmup
    elif step < warmup + stable:
        part = 1.0
    elif step < warmup + stable + decay:
        part = shape((step - warmup - stable) / decay)
    else:
        part = 0.0
    return least + (1 - least) * part


def half_cosine(u: float) -> float:
    return (1 + math.cos(math.pi * u)) / 2


def deepspeed(formula, **options):
    return lambda step: formula(step - 1, BASE, **options)


def scaled(factor: Callable[[int], float]) -> Callable[[int], float]:
    return lambda step: BASE * factor(step)


CASES: dict[str, Callable[[int], float]] = {
    "constant": scaled(lambda t: 0.25 if t < 5 else 1.0),
    "linear": scaled(lambda t: 0.1 + 0.8 * t / 8 if t < 8 else 0.9),
    "step_decay": scaled(lambda t: math.prod(0.5 for k in range(1, t + 1) if k % 4 == 0)),
    "multi_step_decay": scaled(lambda t: math.prod(0.5 for m in (3, 7, 7, 12) if m <= t)),
    "exponential": scaled(lambda t: math.prod([0.9] * t)),
    "polynomial": scaled(lambda t: (1 - t / 14) ** 1.5 if t < 14 else 0.0),
    "cosine": lambda t: 0.01 + (BASE - 0.01) * (1 + math.cos(math.pi * t / 6)) / 2,
    "cosine_restarts": lambda t: 0.01 + (BASE - 0.01) * restarts(t, 5, 1),
    "cosine_restarts_longer": lambda t: 0.01 + (BASE - 0.01) * restarts(t, 2, 3),
    "inverse_sqrt": scaled(lambda t: inverse_sqrt(t, 4)),
    "wsd_linear": scaled(lambda t: wsd(t, 3, 5, 6, lambda u: 1 - u, 0.1)),
    "wsd_cosine": scaled(lambda t: wsd(t, 3, 5, 6, half_cosine, 0.1)),
    "wsd_sqrt": scaled(lambda t: wsd(t, 0, 8, 6, lambda u: 1 - math.sqrt(u), 0.0)),
    "warmup_log": deepspeed(warmup_lr, min_lr=0.1, steps=12),
    "warmup_linear": deepspeed(warmup_lr, max_lr=0.3, steps=12, kind="linear"),
    "warmup_of_one": deepspeed(warmup_lr, steps=1),
    "warmup_decay": deepspeed(warmup_decay_lr, total=12, max_lr=0.3, min_lr=0.01, steps=4),
    "warmup_decay_at_the_end": deepspeed(warmup_decay_lr, total=6, steps=6, kind="linear"),
    "warmup_cosine": deepspeed(warmup_cosine_lr, total=12, min_ratio=0.1, steps=4),
    "warmup_cosine_linear": deepspeed(warmup_cosine_lr, total=12, steps=3, cos_min_ratio=0.2, kind="linear"),
    "range_test": deepspeed(range_test, min_lr=0.01, size=4, rate=2.0),
    "range_test_staircase": deepspeed(range_test, min_lr=0.01, size=4, rate=2.0, staircase=True),
    "one_cycle": deepspeed(one_cycle_lr, low=0.01, high=0.1, first=5),
    "one_cycle_momentum": lambda t: one_cycle_momentum(t - 1, first=5),
    "one_cycle_decay": deepspeed(one_cycle_lr, low=0.01, high=0.1, first=4, second=8, decay_step=2, decay_rate=0.5),
    "one_cycle_stairs": deepspeed(one_cycle_lr, low=0.01, high=0.1, first=8, second=6, stairs=(4, 3)),
    "one_cycle_decay_momentum": lambda t: one_cycle_momentum(
        t - 1, low=0.7, high=0.8, first=4, second=8, decay_step=2, decay_rate=0.01
    ),
    # Linear over 5 steps, then step decay, then the cosine, each from its own step 0.
    "sequential": scaled(
        lambda t: 0.5 + 0.1 * t if t < 5 else 0.5 ** ((t - 5) // 2) if t < 11 else half_cosine((t - 11) / 6)
    ),
    "chained": scaled(lambda t: (0.25 if t < 5 else 1.0) * 0.9**t),
}


def main() -> None:
    print("// Made by make_lr_golden.py; do not edit.")
    print("// clang-format off\n#pragma once\n\n#include <array>\n\nnamespace tsr::golden {\n")
    print(f"inline constexpr double base_lr = {BASE};\ninline constexpr int lr_steps = {STEPS};")
    print("using Rates = std::array<double, lr_steps>;\n")
    for name, rate in CASES.items():
        values = [repr(float(rate(step))) for step in range(STEPS)]
        rows = [", ".join(values[at : at + 5]) for at in range(0, STEPS, 5)]
        print(f"inline constexpr Rates {name}{{\n    " + ",\n    ".join(rows) + "};")
    print("\n}  // namespace tsr::golden")


if __name__ == "__main__":
    main()
