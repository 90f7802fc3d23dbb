"""Turns a checkpoint of any layout into a directory that `transformers` loads with `trust_remote_code=True`.

Reads the fp32 master weights one tensor at a time, without a distributed job; the memory needed is a few tensors until the check, which
loads the model. The directory appears only when `tools/export_check.py` has found it equal to the training model: complete or absent.

Example:
    python tools/convert_to_hf.py runs/demo/train/checkpoints/step_00001000 --output exported/demo --dtype bf16
"""

import argparse
import hashlib
import importlib.util
import json
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import GRTConfig
from pretrain.checkpoint_reader import CheckpointError, CheckpointReader
from tokenizer.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from tools.export_check import ExportError, check_export
from tools.safetensors_stream import TensorPlan, write_shards

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CODE = Path(__file__).parent / "hf"
CODE_FILES = ("configuration_grt.py", "modeling_grt.py")
TOKENS = "embedding.tokens.weight"
GATE_BIAS = "core.gate.w2.bias"


def convert(checkpoint: Path, output: Path, dtype: torch.dtype, tokenizer_directory: Path) -> None:
    """Writes and checks `output`; on any failure it does not exist afterwards.

    Raises:
        ExportError: `output` is in the way, the tokenizer does not belong to the checkpoint, or the result is not the training model.
        CheckpointError, TokenizerError: an input cannot be used.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ExportError(f"{output} exists already: choose another --output, or remove it.")
    if importlib.util.find_spec("transformers") is None:
        raise ExportError("transformers is missing, which the export is checked with: pip install -e '.[hf]'")
    reader = CheckpointReader(checkpoint)
    print(f"Verifying the hashes of {checkpoint}")
    reader.verify()
    settings = reader.manifest["config"]["model"]
    unknown = settings.keys() - {field.name for field in fields(GRTConfig)}
    if unknown:
        raise ExportError(f"{checkpoint} sets model.{', model.'.join(sorted(unknown))}, unknown here: export it by the code that wrote it.")
    config = GRTConfig(**settings)
    tokenizer = load_tokenizer(tokenizer_directory)
    if tokenizer.fingerprint != reader.manifest["identity"]["tokenizer"]:
        raise ExportError(f"{checkpoint} was not trained with the tokenizer in {tokenizer_directory}: give the right one by --tokenizer.")

    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_model(partial, reader, config, dtype, tokenizer)
        write_tokenizer(partial, tokenizer, config)
        (partial / "README.md").write_text(model_card(reader.manifest, config, dtype))
        write_hashes(partial)
        check_export(partial, config, tokenizer, lambda name: reader.read(name).to(export_dtype(name, dtype)))
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_model(directory: Path, reader: CheckpointReader, config: GRTConfig, dtype: torch.dtype, tokenizer: Tokenizer) -> None:
    """Weights, `config.json`, `generation_config.json` and the model's code."""
    sources = {export_name(name): name for name in reader.names()}
    plan = []
    for name, source in sources.items():
        shape = reader.manifest["parameters"][source]["shape"]
        if source == TOKENS:
            shape = [config.vocab_size, *shape[1:]]
        plan.append(TensorPlan(name, tuple(shape), export_dtype(source, dtype)))

    def read(name: str) -> Tensor:
        return export_tensor(sources[name], reader.read(sources[name]), config).to(export_dtype(sources[name], dtype))

    print(f"Writing {sum(tensor.bytes for tensor in plan) / 1e6:,.1f} MB of weights")
    write_shards(directory, plan, read)
    _write_json(directory / "config.json", export_config(config, dtype, tokenizer.eos_id, tokenizer.pad_id))
    # Without `eos_token_id` here, generation would not stop at the end of a document.
    _write_json(directory / "generation_config.json", {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id})
    for file_name in CODE_FILES:
        shutil.copyfile(CODE / file_name, directory / file_name)


def export_name(name: str) -> str:
    """The exported model's name of a parameter of the training model. The tied head has none of its own."""
    renamed = {TOKENS: "embed_tokens.weight", "embedding.positions.weight": "embed_positions.weight"}
    return "model." + renamed.get(name, name)


def export_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The gate's bias stays in fp32: it is near 4, where bf16 has steps of 0.03. The exported code keeps it so when it loads."""
    return torch.float32 if name == GATE_BIAS else dtype


def export_tensor(name: str, tensor: Tensor, config: GRTConfig) -> Tensor:
    """The exported value of a parameter: without vocabulary padding, and with the gate's initial bias added to the trained offset."""
    if name == TOKENS:
        return tensor[: config.vocab_size]
    return tensor + config.gate_bias if name == GATE_BIAS else tensor


def export_config(config: GRTConfig, dtype: torch.dtype, eos_id: int, pad_id: int) -> dict[str, Any]:
    """The contents of `config.json`."""
    return {
        "model_type": "grt",
        "architectures": ["GRTForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_grt.GRTConfig",
            "AutoModel": "modeling_grt.GRTModel",
            "AutoModelForCausalLM": "modeling_grt.GRTForCausalLM",
        },
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "num_hidden_layers": config.executed_blocks,
        "prelude_blocks": config.prelude_blocks,
        "core_blocks": config.core_blocks,
        "coda_blocks": config.coda_blocks,
        "max_depth": config.max_depth,
        "max_position_embeddings": config.max_positions,
        "position": config.position,
        "rope_theta": config.rope_theta,
        "norm": config.norm,
        "norm_eps": config.norm_eps,
        "mlp": config.mlp,
        "gate_temperature": config.gate_temperature,
        "gate_input_norm": config.gate_input_norm,
        "initializer_range": config.init_std,
        "tie_word_embeddings": True,
        "bos_token_id": None,  # training never saw one; evaluation harnesses then begin with EOS, as documents do
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
    }


def write_tokenizer(directory: Path, tokenizer: Tokenizer, config: GRTConfig) -> None:
    """The same tokenizer in the format of the tokenizers library, which needs neither SentencePiece nor our code."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import TokenizersBackend

    # Without split_special_tokens, text that spells a special piece would become that piece.
    settings: dict[str, Any] = {"split_special_tokens": True, "model_max_length": config.max_positions, "padding_side": "left"}
    source = tokenizer.files[0].parent
    if (source / "tokenizer.model").exists():
        exported = TokenizersBackend.from_pretrained(source, **settings)
    else:
        backend = Backend(models.BPE.from_file(str(source / "encoder.json"), str(source / "vocab.bpe")))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        exported = TokenizersBackend(tokenizer_object=backend, **settings)
    exported.eos_token = exported.convert_ids_to_tokens(tokenizer.eos_id)
    exported.pad_token = exported.convert_ids_to_tokens(tokenizer.pad_id)
    exported.save_pretrained(directory)

    path = directory / "tokenizer_config.json"
    # The class name that every version of transformers knows.
    _write_json(path, json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"})


def model_card(manifest: dict[str, Any], config: GRTConfig, dtype: torch.dtype) -> str:
    """README.md: what the model is, its true counts, how to run it, how it was trained."""
    embedding = config.vocab_size * config.hidden_size + (config.max_positions * config.hidden_size if config.position == "learned" else 0)
    blocks = f"{config.prelude_blocks} prelude, {config.core_blocks} core and {config.coda_blocks} coda blocks"
    if config.core_blocks:
        layout = f"{config.prelude_blocks}+{config.core_blocks}x{config.max_depth}+{config.coda_blocks}"
        kind = (
            f"A Gated Recurrent Transformer (GRT) of layout {layout}: {blocks}. The core's weights are shared by up to\n"
            f"{config.max_depth} recurrences, and a gate decides at each how much of the state to keep."
        )
        depth = (
            f"\nThe number of recurrences is free at inference: `model.generate(**inputs, num_steps=4)`, `model(**inputs, num_steps=4)`.\n"
            f"The default is {config.max_depth}, the most seen in training; 0 skips the core. How much a recurrence gains differs between\n"
            f"models: measure the loss by depth.\n"
        )
    else:
        kind, depth = f"A dense transformer of {config.stored_blocks} blocks.", ""
    fingerprints = {name: manifest["identity"][name] for name in ("dataset", "tokenizer")}
    training = {"progress": manifest["progress"], "sha256": fingerprints, "config": manifest["config"]}
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {"GRT" if config.core_blocks else "Transformer"}, {config.parameter_count / 1e6:,.1f} M parameters

{kind}

| | |
|---|---|
| parameters stored (head tied to the embedding) | {config.parameter_count:,} |
| of these, embeddings | {embedding:,} |
| blocks stored / executed | {config.stored_blocks} / {config.executed_blocks} |
| width, heads, key-value heads | {config.hidden_size}, {config.num_heads}, {config.kv_heads} |
| longest sequence | {config.max_positions} |
| vocabulary | {config.vocab_size:,} |
| weights | {str(dtype).removeprefix("torch.")} |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))
```
{depth}
Documents end with the end-of-text token, and there is no token for their beginning: to start from nothing, give the end-of-text token.

## Training

```json
{json.dumps(training, indent=2)}
```
"""


def write_hashes(directory: Path) -> None:
    """SHA256SUMS of every file, in the format of `sha256sum --check`."""
    lines = []
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (directory / "SHA256SUMS").write_text("".join(lines))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="checkpoint directory: RUN_DIR/checkpoints/step_N")
    parser.add_argument("--output", type=Path, required=True, help="directory to make; must not exist, or be empty")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the written weights (default: %(default)s)")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer directory (default: RUN_DIR/tokenizer)")
    arguments = parser.parse_args()
    checkpoint = arguments.checkpoint.resolve()
    try:
        convert(checkpoint, arguments.output, DTYPES[arguments.dtype], arguments.tokenizer or checkpoint.parents[1] / "tokenizer")
    except (ExportError, CheckpointError, TokenizerError, OSError) as error:
        print(f"cannot make {arguments.output}: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
