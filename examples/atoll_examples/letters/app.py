"""The next character of a program: adapters for a small transformer, whose own weights no site sends (LoRA)."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import atoll


class Letters(atoll.App):
    class Config(BaseModel):
        lr: float = 1e-2
        width: int = 64
        rank: int = 4  # of the adapters

    def model(self) -> nn.Module:  # a real one loads its base from a file: the same at every site, which Atoll checks
        sizes = {"vocab_size": 128, "n_positions": 64, "n_embd": self.config.width, "n_layer": 2, "n_head": 4}
        base = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False))
        adapted, whole = ["c_attn", "c_proj", "c_fc"], ["lm_head"]
        lora = LoraConfig(r=self.config.rank, fan_in_fan_out=True, target_modules=adapted, modules_to_save=whole)
        model: nn.Module = get_peft_model(base, lora)
        return model

    def data(self, split: str) -> TensorDataset:
        lines = torch.from_numpy(np.load(self.source["path"])[f"x_{split}"]).long()  # characters, 65 in a row
        return TensorDataset(lines[:, :-1], lines[:, 1:])

    def loss(self, output: Any, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(output.logits.transpose(1, 2), batch[1])

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in params if p.requires_grad), lr=self.config.lr)
