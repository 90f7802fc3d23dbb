"""Small models for the tests of the export: a checkpoint without a training run, a tokenizer, an exported model in memory."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from model.config import GRTConfig
from pretrain.checkpoint_reader import FORMAT, MANIFEST, file_sha256, sign_manifest
from tokenizer.corpus import local_file
from tokenizer.decoding import ReadOptions
from tokenizer.tokenizer import load_tokenizer
from tokenizer.train import train_tokenizer
from tools.convert_to_hf import export_config, export_name, export_tensor
from tools.hf.configuration_grt import GRTConfig as ExportedConfig
from tools.hf.modeling_grt import GRTForCausalLM

SPLIT_BY_COLUMNS = ("attention.out.weight", "mlp.down.weight")
SPLIT_BY_ROWS = (
    "embedding.tokens.weight",
    "attention.q.weight",
    "attention.k.weight",
    "attention.v.weight",
    "mlp.up.weight",
    "mlp.gate.weight",
)


def small_config(**changes: Any) -> GRTConfig:
    sizes = {
        "vocab_size": 300,
        "hidden_size": 32,
        "num_heads": 4,
        "max_positions": 48,
        "prelude_blocks": 1,
        "core_blocks": 2,
        "coda_blocks": 2,
        "max_depth": 3,
    }
    return GRTConfig(**(sizes | changes))


def exported_model(config: GRTConfig, parameters: dict[str, Tensor], dtype: torch.dtype, attention: str = "sdpa") -> GRTForCausalLM:
    """The exported code with the training model's weights, without files."""
    settings = export_config(config, torch.float32, eos_id=1, pad_id=2)
    model = GRTForCausalLM._from_config(ExportedConfig(**settings), attn_implementation=attention).to(dtype)
    weights = {export_name(name): export_tensor(name, value, config) for name, value in parameters.items()}
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    return model.eval()


def train_small_tokenizer(directory: Path, vocab_size: int) -> Path:
    """A SentencePiece tokenizer trained on a module of the standard library."""
    directory.mkdir()
    (directory / "tokenizer.model").write_bytes(train_tokenizer([local_file(argparse.__file__)], vocab_size, ReadOptions()))
    return directory


def write_checkpoint(directory: Path, config: GRTConfig, parameters: dict[str, Tensor], tokenizer: Path, tensor_parallel: int = 2) -> Path:
    """`parameters` as a checkpoint of a run with `tensor_parallel` ranks, in the real format."""
    directory.mkdir(parents=True)
    described, stored = {}, {}
    for name, value in parameters.items():
        dim = 0 if name.endswith(SPLIT_BY_ROWS) else 1 if name.endswith(SPLIT_BY_COLUMNS) else None
        described[name] = {"shape": list(value.shape), "tensor_parallel_dim": dim}
        shards = [value] if dim is None else value.chunk(tensor_parallel, dim)
        flat = torch.stack([shard.float().flatten() for shard in shards])
        stored[f"master/{name}"] = flat[0] if dim is None else flat
    dcp.save(stored, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    manifest = {
        "format": FORMAT,
        "step": 7,
        "optimizer_step": 7,
        "progress": {"step": 7},
        "config": {"model": asdict(config)},
        "identity": {"dataset": "0" * 64, "tokenizer": load_tokenizer(tokenizer).fingerprint},
        "tensor_parallel": tensor_parallel,
        "parameters": described,
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in directory.iterdir()},
    }
    (directory / MANIFEST).write_text(json.dumps(sign_manifest(manifest)))
    return directory
