"""HF -> ours -> HF: the same tensors bit for bit, from any mesh, and the scripts that do it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.models.hf import FAMILIES, tiny_hf_model
from tests.parity.harness import Mesh, make_config
from tests.world import run_ranks
from torchtitan_lite import device as devices
from torchtitan_lite.build import build_model
from torchtitan_lite.checkpoint.state import model_state
from torchtitan_lite.checkpoint.weights import find_weights, load_weights, write_hugging_face
from torchtitan_lite.config import ConfigError, resolve
from torchtitan_lite.convert import key_table, to_hugging_face, to_step_folder
from torchtitan_lite.mesh import Degrees, build_mesh

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "assets" / "tokenizer"
MESHES = [Mesh(), Mesh(dp_shard=2, tp=2), Mesh(pp=2, tp=2), Mesh(pp=2, dp_shard=2)]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def save(family: str, folder: Path, **changes: Any) -> Path:
    """A tiny random model of the family in files of a few kilobytes, as transformers writes it."""
    tiny_hf_model(family, **changes).save_pretrained(folder, max_shard_size="40KB")
    return folder


def assert_same_tensors(ours: Path, theirs: Path) -> None:
    written, expected = tensors_of(ours), tensors_of(theirs)
    assert written.keys() == expected.keys()
    assert [name for name in expected if not written[name].equal(expected[name])] == []


def there_and_back(source: Path, target: Path, mesh: Mesh, change: str | None = None) -> None:
    """Into `mesh` and out again; on the way add 1 to an element of the parameter `change`."""
    weights = find_weights(source, key="--test")
    config = make_config(mesh, target.parent, {"training.seq_len": 16})
    resolve(config, mesh.world)
    parallel_mesh = build_mesh(Degrees.of(config), "cpu", torch.distributed.get_rank())
    model = build_model(config, weights.model, parallel_mesh, devices.local_device(0), fresh=False)
    load_weights(weights, model.stored)
    model.after_update()
    for name, parameter in model.stored.items():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if name == change and local.numel():
            local.data.flatten()[0] += 1
    state = model_state(model.stored)
    write_hugging_face(target, state, weights.model, hf_assets_path=source, dtype="float32")


# With a pipeline the families that differ most on disk: plain, transposed and fused, biases and
# tied, one tensor an expert. The others are slow proofs.
ON_A_PIPELINE = ("llama", "gpt2", "starcoder2", "deepseek_v3")


def there_and_back_cases() -> list[Any]:
    slow = pytest.mark.slow
    return [
        pytest.param(
            family,
            mesh,
            id=f"{family}-{mesh}",
            marks=slow if mesh.pp > 1 and family not in ON_A_PIPELINE else (),
        )
        for family in FAMILIES
        for mesh in MESHES
        if not (family == "mamba" and mesh.tp > 1)  # a state-space layer is not cut
    ]


@pytest.mark.parametrize(("family", "mesh"), there_and_back_cases())
def test_the_same_tensors_come_back_from_every_mesh(
    family: str, mesh: Mesh, tmp_path: Path
) -> None:
    source = save(family, tmp_path / "theirs")
    run_ranks(there_and_back, mesh.world, source, tmp_path / "ours", mesh)
    assert_same_tensors(tmp_path / "ours", source)


@pytest.mark.parametrize(
    ("family", "parameter", "tensor"),
    [
        ("qwen3", "layers.1.self_attn.k_norm.weight", "model.layers.1.self_attn.k_norm.weight"),
        ("gpt2", "layers.0.self_attn.v_proj.weight", "transformer.h.0.attn.c_attn.weight"),
        ("starcoder2", "layers.1.mlp.down_proj.bias", "model.layers.1.mlp.c_proj.bias"),
        (
            "mixtral",
            "layers.1.mlp.experts.up_proj",
            "model.layers.1.block_sparse_moe.experts.0.w3.weight",
        ),
        (
            "deepseek_v3",
            "layers.1.mlp.gate.e_score_correction_bias",
            "model.layers.1.mlp.gate.e_score_correction_bias",
        ),
    ],
)
def test_a_changed_parameter_changes_its_tensor_and_no_other(
    family: str, parameter: str, tensor: str, tmp_path: Path
) -> None:
    source = save(family, tmp_path / "theirs")
    run_ranks(there_and_back, 1, source, tmp_path / "ours", Mesh(), parameter)
    written, expected = tensors_of(tmp_path / "ours"), tensors_of(source)
    assert [name for name in expected if not written[name].equal(expected[name])] == [tensor]
    assert (written[tensor] != expected[tensor]).sum() == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_is_exported(family: str, tmp_path: Path) -> None:
    """From a step folder, with the run's tokenizer: nothing missing, nothing over, same logits."""
    import transformers

    theirs = tiny_hf_model(family, vocab_size=2100)
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").unlink()  # else it is copied
    for path in TOKENIZER.iterdir():
        shutil.copy(path, tmp_path / "theirs")
    run_ranks(_convert_both_ways, 1, tmp_path)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(loaded) is type(theirs)
    expected = theirs.state_dict()
    assert all(tensor.equal(expected[name]) for name, tensor in loaded.state_dict().items())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    ids = tokenizer("It was the best of times", return_tensors="pt").input_ids
    with torch.no_grad():
        # Not bitwise: where the loaded tensors lie in memory, another kernel may take them.
        torch.testing.assert_close(loaded.eval()(ids).logits, theirs(ids).logits, rtol=0, atol=1e-6)
    assert tokenizer.eos_token == "<|end_of_text|>"
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id


def _convert_both_ways(folder: Path) -> None:
    to_step_folder(find_weights(folder / "theirs", key="--hf_path"), folder)
    weights = find_weights(folder, key="--checkpoint")
    assert weights.folder == folder / "step-0" and weights.hf_assets_path == folder / "theirs"
    to_hugging_face(
        weights, folder / "ours", dtype="float32", hf_assets_path=weights.hf_assets_path
    )


def test_bf16_files_make_a_bf16_step_and_come_back_as_they_were(tmp_path: Path) -> None:
    tiny_hf_model("qwen2").bfloat16().save_pretrained(tmp_path / "theirs")
    run_ranks(_to_bf16_and_back, 2, tmp_path)
    assert_same_tensors(tmp_path / "ours", tmp_path / "theirs")
    import transformers

    assert transformers.AutoConfig.from_pretrained(tmp_path / "ours").dtype == torch.bfloat16


def _to_bf16_and_back(folder: Path) -> None:
    to_step_folder(find_weights(folder / "theirs", key="--hf_path"), folder)
    weights = find_weights(folder, key="--checkpoint")
    to_hugging_face(weights, folder / "ours", dtype="bfloat16", hf_assets_path=folder / "theirs")


def test_the_table_of_names_tells_fused_and_transposed_blocks(tmp_path: Path) -> None:
    weights = find_weights(save("gpt2", tmp_path / "theirs"), key="--hf_path")
    table = {name: place for name, _, place in key_table(weights.model)}
    hidden = weights.model.hidden_size
    assert table["layers.0.self_attn.k_proj.weight"] == (
        f"transformer.h.0.attn.c_attn.weight[0:{hidden}, {hidden}:{2 * hidden}].T"
    )


def run_script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_scripts_convert_there_and_back_and_print_the_names(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "theirs")
    done = run_script("convert_from_hf.py", "--hf_path", source, "--output", tmp_path / "steps")
    assert done.returncode == 0, done.stderr
    step = tmp_path / "steps" / "step-0"
    done = run_script("convert_to_hf.py", "--checkpoint", step, "--output", tmp_path / "ours")
    assert done.returncode == 0, done.stderr
    assert_same_tensors(tmp_path / "ours", source)
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    }
    done = run_script("convert_to_hf.py", "--print_keys", "--hf_path", source)
    assert "layers.0.mlp.up_proj.weight" in done.stdout, done.stderr
    assert "model.layers.0.mlp.up_proj.weight" in done.stdout
    done = run_script("convert_to_hf.py", "--checkpoint", step, "--output", tmp_path / "ours")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--output" in done.stderr and "it is there already" in done.stderr


def damage_index(folder: Path) -> str:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / sorted(set(index["weight_map"].values()))[0]
    path.unlink()
    return path.name


def truncate(folder: Path) -> str:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-7])
    return path.name


def lose_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json"


def add_tensor(folder: Path) -> str:
    path = sorted(folder.glob("*.safetensors"))[0]
    save_file({**load_file(path), "surplus.weight": torch.ones(2)}, path)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["surplus.weight"] = path.name
    index.write_text(json.dumps(content))
    return "surplus.weight"


def widen(folder: Path) -> str:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "intermediate_size": 8}))
    return "mlp.up_proj.weight"


@pytest.mark.parametrize("damage", [damage_index, truncate, lose_config, add_tensor, widen])
def test_a_damaged_folder_is_named_and_nothing_is_written(damage: Any, tmp_path: Path) -> None:
    source = save("llama", tmp_path / "theirs")
    named = damage(source)
    message = run_ranks(_refused, 1, source, tmp_path / "steps")[0]
    assert named in message and "\n" not in message
    assert not list((tmp_path / "steps").glob("*"))


def _refused(source: Path, target: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        to_step_folder(find_weights(source, key="--hf_path"), target)
    return str(caught.value)


def test_a_tokenizer_of_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "theirs")
    shutil.copy(TOKENIZER / "tokenizer.json", source)
    with pytest.raises(ConfigError, match=r"knows 2048 ids and the model's vocabulary has \d+"):
        from torchtitan_lite.checkpoint.weights import export_files

        export_files(find_weights(source, key="--test").model, source, dtype="float32")
