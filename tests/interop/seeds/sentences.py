"""The data set and the model of `train.py` and `eval.py`, which the document leaves out."""

import zlib
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

WORDS = 64


class SentenceDataset(Dataset):
    """Lines of a label, 0 or 1, and a sentence; a sentence counts as the words it has, in so many classes."""

    def __init__(self, path):
        self.lines = Path(path).read_text(encoding="utf-8").splitlines()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        label, *words = self.lines[index].split()
        counts = torch.zeros(WORDS)
        for word in words:
            counts[zlib.crc32(word.encode()) % WORDS] += 1
        return counts, torch.tensor(float(label))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WORDS, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, words):
        return torch.sigmoid(self.layers(words)).squeeze(-1)
