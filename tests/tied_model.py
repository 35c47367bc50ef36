"""A model with what matters to saving: an embedding, matrices, a norm and a tied head."""

import torch
from torch import nn


class Tied(nn.Module):
    """Embedding, matrix, norm and a tied head: what a language model's parameters look like, in small."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):  # [batch, seq] -> [batch, seq, 11]
        hidden = self.embed(ids)
        return self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))
