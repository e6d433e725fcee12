"""The parameters of the transformer that is trained, or whose parameters are: 18.8 million in 8 layers, tied words."""

from __future__ import annotations

WIDTH, WORDS, LAYERS = 384, 12_000, 8


def shapes() -> dict[str, tuple[int, ...]]:
    of_layer = {
        "qkv": (3 * WIDTH, WIDTH), "qkv_bias": (3 * WIDTH,), "out": (WIDTH, WIDTH), "out_bias": (WIDTH,),
        "up": (4 * WIDTH, WIDTH), "up_bias": (4 * WIDTH,), "down": (WIDTH, 4 * WIDTH), "down_bias": (WIDTH,),
        "norm": (WIDTH,), "norm_bias": (WIDTH,),
    }  # fmt: skip
    layers = {f"{i}.{name}": shape for i in range(LAYERS) for name, shape in of_layer.items()}
    return {"words": (WORDS, WIDTH), **layers}
