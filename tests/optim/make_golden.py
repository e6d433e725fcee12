"""Makes golden.hpp: what torch.optim does with fixed parameters and gradients. Needs PyTorch.

    python tests/optim/make_golden.py > tests/optim/golden.hpp

Parameters and gradients are small dyadic numbers, exact in every type and made again by optim_test.cc.
"""

import sys

import torch

N, STEPS = 6, 5
CASES = {
    "sgd_plain": (torch.optim.SGD, {"lr": 0.1}),
    "sgd_decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.05}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd_damped": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.05}),
    "sgd_nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
    "adam_plain": (torch.optim.Adam, {"lr": 0.01}),
    "adam_decay": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    "adam_low_beta1": (torch.optim.Adam, {"lr": 0.01, "betas": (0.25, 0.9)}),
    "adamw_default": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw_decay": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    "adagrad_plain": (torch.optim.Adagrad, {"lr": 0.1}),
    "adagrad_decay": (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.1, "initial_accumulator_value": 0.25, "eps": 1e-6},
    ),
}


def start(dtype):
    return torch.tensor([(i - 2.5) / 4 for i in range(N)], dtype=dtype)


def grad(step, dtype):
    return torch.tensor([((i * 7 + step * 5) % 13 - 6) / 8 for i in range(N)], dtype=dtype)


def run(kind, options, dtype):
    param = torch.nn.Parameter(start(dtype))
    optimizer = kind([param], foreach=False, **options)
    for step in range(STEPS):
        param.grad = grad(step, dtype)
        optimizer.step()
    return [float(x) for x in param.detach()]


def main():
    print(f"// Made by make_golden.py with PyTorch {torch.__version__.split('+')[0]}; do not edit.")
    print("#pragma once\n\n#include <array>\n\nnamespace tsr::golden {\n")
    print(f"inline constexpr int n = {N};\ninline constexpr int steps = {STEPS};\n")
    print("struct Result {\n    std::array<double, n> f32;\n    std::array<double, n> f64;\n};\n")
    for name, (kind, options) in CASES.items():
        print(f"// {kind.__name__}({', '.join(f'{k}={v}' for k, v in options.items())})")
        rows = (", ".join(repr(x) for x in run(kind, options, t)) for t in (torch.float32, torch.float64))
        print(f"inline constexpr Result {name}{{\n    {{{next(rows)}}},\n    {{{next(rows)}}}}};\n")
    print("}  // namespace tsr::golden")


if __name__ == "__main__":
    sys.exit(main())
