"""A small language model, and texts for it."""

import torch
from torch import nn

WORDS, FEATURES = 20, 6


class LanguageModel(nn.Module):
    """An LSTM with tied embeddings."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(WORDS, FEATURES)
            self.lstm = nn.LSTM(FEATURES, FEATURES)
            self.dropout = nn.Dropout(0.5)
            self.head: nn.Module = nn.Linear(FEATURES, WORDS)
        self.head.weight = self.embedding.weight

    def encode(self, tokens, state=None):
        y, state = self.lstm(self.embedding(tokens), state)
        return self.dropout(y), state


def text(count, seed=0, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    return (WORDS * torch.rand(count, generator=generator) ** 2).to(dtype)
