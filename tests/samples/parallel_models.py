"""Apps of small models that [parallel] is tried with: residual blocks, one like Llama, and nn.TransformerEncoder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.utils.data import TensorDataset

from atoll.cluster.app import App

WORDS, WIDTH, HEADS, LENGTH = 11, 24, 12, 5  # 12 heads: for 2, 3 and 4 ranks


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.fc2(torch.tanh(self.fc1(self.norm(x))))
        return found


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads = HEADS
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        size, length, _ = x.shape
        q, k, v = (w(x).view(size, length, self.n_heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.wo(mixed.transpose(1, 2).reshape(size, length, -1))
        return found


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x)
        found: Tensor = x + self.w2(F.silu(self.w1(h)) * self.w3(h))
        return found


class Llama(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(num_blocks))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.output(self.norm(x))
        return found


class Encoder(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, num_blocks, enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.output(self.encoder(self.embedding(tokens)))
        return found


class Spread(App):
    """Sequences of words, whose next word is learnt; or vectors, for residual blocks."""

    class Config(BaseModel):
        kind: str = "residual"
        blocks: int = 3
        dtype: str = "float64"
        optimizer: str = "sgd"
        examples: int = 12
        batch_norm: bool = False

    def model(self) -> nn.Module:
        match self.config.kind:
            case "llama":
                model: nn.Module = Llama(self.config.blocks)
            case "encoder":
                model = Encoder(self.config.blocks)
            case _:
                first: list[nn.Module] = [nn.Linear(6, WIDTH)]
                if self.config.batch_norm:
                    first.append(nn.BatchNorm1d(WIDTH))
                model = nn.Sequential(
                    *first, *(Residual(WIDTH) for _ in range(self.config.blocks)), nn.Linear(WIDTH, 3)
                )
        return model.to(getattr(torch, self.config.dtype))

    def data(self, split: str) -> TensorDataset:
        random = torch.Generator().manual_seed(len(split))
        if self.config.kind == "residual":
            x = torch.randn(self.config.examples, 6, generator=random, dtype=torch.float64)
            y = torch.randint(0, 3, (self.config.examples,), generator=random)
            return TensorDataset(x.to(getattr(torch, self.config.dtype)), y)
        words = torch.randint(0, WORDS, (self.config.examples, LENGTH + 1), generator=random)
        return TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.flatten(0, -2), batch[1].flatten())

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.config.optimizer == "adamw":
            return torch.optim.AdamW(params, lr=1e-2)
        return torch.optim.SGD(params, lr=0.1, momentum=0.5)

    def tensor_plan(self, model: nn.Module) -> dict[str, ParallelStyle]:
        pairs = (("fc1", ColwiseParallel), ("fc2", RowwiseParallel))
        return {f"{index + 1}.{name}": kind() for index in range(self.config.blocks) for name, kind in pairs}

    def metrics(self, output: Tensor, batch: Any) -> dict[str, tuple[Tensor, float]]:
        return {"accuracy": ((output.argmax(-1) == batch[1]).sum(), batch[1].numel())}
