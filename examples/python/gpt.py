#!/usr/bin/env python3
"""A character GPT learns to write Python from the standard library's own sources, on any number of ranks.

    tessera run -n 2 python examples/python/gpt.py --steps 200
    tessera run -n 3 python examples/python/gpt.py --steps 400     goes on, with another share of it on each rank
    tessera run -n 4 python examples/python/gpt.py --parallel fsdp+tp --steps 600      or pp

Six layers, 10.8 million parameters. It wants PyTorch (pip install torch). A checkpoint is written in the background,
the curve of the losses into gpt-loss.svg, and at the end the model writes some lines itself. On two cores a step takes
some seconds: --layers, --width and --batch make it smaller.
"""

import argparse
import math
import sysconfig
import time
from pathlib import Path

import tessera.torch.checkpoint as dcp
import torch
import torch.distributed as dist
from gpt_parallel import Pipeline, Sharded
from tessera.torch.checkpoint.state_dict import get_state_dict, set_state_dict
from torch import nn
from torch.nn import functional as F

CHARACTERS = 128  # of ASCII


class Block(nn.Module):
    """Attention to what came before, then two linear layers, each beside what it was given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.of_head = width // heads
        self.norm_1 = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm_1(x)
        q, k, v = (  # [batch, heads, length, width of a head]; a rank may have some of the heads
            part(given).unflatten(-1, (-1, self.of_head)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Or a stage of it, which lacks some of the modules."""

    kinds = CHARACTERS

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleDict({str(i): Block(width, heads) for i in range(layers)})
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CHARACTERS, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.characters is not None:
            x = self.characters(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


class Text:
    """The sources of the standard library: most to learn from, every tenth file to be judged by."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        parts = [
            "".join(file.read_text("utf-8", "replace") for i, file in enumerate(files) if (i % 10 == 9) == judged)
            for judged in (False, True)
        ]
        self.training, self.held_out = (
            torch.tensor([code if code < CHARACTERS else ord("?") for code in map(ord, part)]) for part in parts
        )

    def batch(self, text: torch.Tensor, seed: int, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Passages, and each character's next one. The same for the same seed."""
        starts = torch.randint(len(text) - length - 1, (count,), generator=torch.Generator().manual_seed(seed))
        passages = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        return passages[:, :-1], passages[:, 1:]


def rate(step: int, options: argparse.Namespace) -> float:
    """Of learning: up over the first steps, then down along a cosine."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = min(1.0, (step - options.warmup) / max(1, options.decay - options.warmup))
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(options: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    text = Text()
    torch.manual_seed(7)  # the same values on every rank, of which each keeps its part
    model = GPT(options.layers, options.width, options.heads, options.context)
    count = sum(parameter.numel() for parameter in model.parameters())
    if options.parallel == "pp":
        network = Pipeline(model, options.batch)
    else:
        network = Sharded(model, 2 if options.parallel == "fsdp+tp" else 1, options.bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)

    progress = {"step": 0, "losses": []}
    if Path(options.checkpoint).exists():
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optim": of_optimizer, "progress": progress}
        dcp.load(state, checkpoint_id=options.checkpoint)  # of any number of ranks
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        progress = state["progress"]
    start, losses = progress["step"], progress["losses"]
    if rank == 0:
        where = f"resumed after step {start}" if start else "from the beginning"
        print(
            f"gpt: {count / 1e6:.1f} M parameters, {len(text.training) / 1e6:.1f} M characters, {world} ranks, {where}"
        )

    saving = None
    share = options.batch // network.shares
    began = time.monotonic()
    for step in range(start, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, options)
        given, wanted = text.batch(text.training, step, share * network.shares, options.context)
        own = slice(network.share * share, (network.share + 1) * share)
        losses.append(network.forward_backward(given[own], wanted[own]))
        network.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and ((step + 1) % 10 == 0 or step + 1 == options.steps):
            seconds = (time.monotonic() - began) / (step + 1 - start)
            print(f"step {step + 1}/{options.steps} loss {losses[-1]:.3f}, {seconds:.2f} s a step", flush=True)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            of_model, of_optimizer = get_state_dict(model, optimizer)
            progress = {"step": step + 1, "losses": losses}
            state = {"model": of_model, "optim": of_optimizer, "progress": progress}
            saving = dcp.async_save(state, checkpoint_id=options.checkpoint)  # trains on meanwhile
    if saving is not None:
        saving.result()

    with torch.no_grad():
        judged = network.judge(*text.batch(text.held_out, network.share, 8, options.context))
        if rank == 0:
            print(f"held-out loss {judged:.3f}, {math.exp(judged):.1f} characters to choose from")
            Path(options.plot).write_text(curve(losses), encoding="utf-8")
            print(f"the curve of the losses: {options.plot}")
        sample = written(network, "def ", options.sample, options.context)
    if rank == 0:
        print(f"--- it writes:\n{sample}")


def written(network: Sharded | Pipeline, begin: str, count: int, context: int) -> str:
    """What the model goes on with. All ranks compute the same: none can leave out a layer that others gather."""
    chance = torch.Generator().manual_seed(1)
    text = torch.tensor([[ord(character) for character in begin]])
    for _ in range(count):
        seen = text[:, -context:]
        filled = F.pad(seen, (0, context - seen.shape[1]))  # what comes later is not seen
        scores = network.scores(filled)[:, seen.shape[1] - 1].float() / 0.8
        text = torch.cat([text, torch.multinomial(F.softmax(scores, dim=-1), 1, generator=chance)], dim=1)
    return "".join(map(chr, text[0].tolist()))


def curve(losses: list[float]) -> str:
    """The losses over the steps as an SVG."""
    width, height, top = 640, 240, max(losses)
    points = " ".join(
        f"{40 + (width - 50) * i / max(1, len(losses) - 1):.1f},{10 + (height - 40) * (1 - loss / top):.1f}"
        for i, loss in enumerate(losses)
    )
    marks = "".join(
        f'<line x1="40" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        f'<text x="34" y="{y + 4:.1f}" text-anchor="end">{loss:.1f}</text>'
        for loss in (top * i / 4 for i in range(5))
        for y in [10 + (height - 40) * (1 - loss / top)]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11">'
        f'<rect width="100%" height="100%" fill="#fff"/>{marks}'
        f'<polyline points="{points}" fill="none" stroke="#2b6cb0" stroke-width="1.5"/>'
        f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle">loss over {len(losses)} steps</text></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="of the whole training, those before a resume included")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--checkpoint", default="gpt-checkpoint", help="directory; resumed from if it is there")
    parser.add_argument("--plot", default="gpt-loss.svg")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=128, help="characters that it sees")
    parser.add_argument("--batch", type=int, default=12, help="passages a step, of all ranks together")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--decay", type=int, default=1000, help="the step at which the rate is down")
    parser.add_argument("--bf16", action="store_true", help="whole parameters, and what is computed, in bfloat16")
    parser.add_argument(
        "--parallel",
        default="fsdp",
        choices=["fsdp", "fsdp+tp", "pp"],
        help="pairs of ranks share a model by width (tp); each rank has some of the layers (pp)",
    )
    parser.add_argument("--sample", type=int, default=300, help="characters that it writes at the end")
    options = parser.parse_args()
    if options.heads < 1 or options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    torch.set_num_threads(1)
    dist.init_process_group("tessera")
    ranks = dist.get_world_size()
    if options.batch < ranks:
        parser.error(f"--batch {options.batch} is less than a passage for each of {ranks} ranks")
    if options.parallel == "fsdp+tp" and (ranks % 2 or options.heads % 2 or options.context % 2):
        parser.error(
            f"--parallel fsdp+tp needs even numbers of ranks, heads and characters, not {ranks}, {options.heads} "
            f"and {options.context}"
        )
    if options.parallel == "pp" and (options.bf16 or not ranks <= min(options.layers, 8)):
        parser.error(f"--parallel pp needs a layer for each of {ranks} ranks, at most 8 of them, and has no --bf16")
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
