"""Model folders in every form that weights are published in, made of one random model."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def per_expert(model, folder: Path) -> Path:
    """As transformers saves it: a tensor for each expert where the family has it so."""
    model.save_pretrained(folder)
    return folder


def rewritten(source: Path, folder: Path, change) -> Path:
    """A copy of a folder whose tensors, in one file, went through a function from dict to dict."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = change({name: t for file in sorted(source.glob("*.safetensors")) for name, t in load_file(file).items()})
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def fused(model, source: Path, folder: Path) -> Path:
    """Stacked experts, as the model holds them in memory."""
    return rewritten(source, folder, lambda tensors: dict(model.state_dict()))


def sharded(source: Path, folder: Path, files: int = 3) -> Path:
    """The tensors spread over several files, experts of one layer too, with an index."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = load_file(source / "model.safetensors")
    placed = {}
    for number in range(files):
        part = {name: tensors[name] for name in sorted(tensors)[number::files]}
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def change_config(folder: Path, **fields) -> None:
    """Set fields of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def to_fp8(weight, block):
    """An FP8 weight with the scales of its blocks, and the bf16 weight that it means."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // block), -(-columns // block))
    quantised, meant = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scale[i, j] = weight[place].float().abs().max() / 448
            quantised[place] = (weight[place].float() / scale[i, j]).to(torch.float8_e4m3fn)
            meant[place] = quantised[place].float() * scale[i, j]
    return quantised, scale, meant.bfloat16()


def fp8(source: Path, folder: Path, block: int, suffix: str = "weight_scale_inv") -> tuple[Path, Path]:
    """All matrices of layers in FP8 with block scales, and the bf16 model that they mean, in a folder beside it."""
    meant = {}

    def change(tensors):
        result = {}
        for name, tensor in tensors.items():
            if name.endswith("proj.weight"):
                result[name], scale, meant[name] = to_fp8(tensor, block)
                result[f"{name.removesuffix('weight')}{suffix}"] = scale
            else:
                result[name] = meant[name] = tensor.bfloat16()
        return result

    rewritten(source, folder, change)
    change_config(folder, dtype="bfloat16", quantization_config={"quant_method": "fp8", "weight_block_size": [block, block]})
    plain = rewritten(source, folder.with_name(folder.name + "-plain"), lambda tensors: dict(meant))
    change_config(plain, dtype="bfloat16")
    return folder, plain


def mxfp4(source: Path, folder: Path) -> tuple[Path, Path]:
    """gpt-oss with random mxfp4 experts, and the bf16 model that they mean, in a folder beside it."""
    meant = {}

    def change(tensors):
        result = {}
        random = torch.Generator().manual_seed(0)
        for name, tensor in tensors.items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                experts, inputs, rows = tensor.shape
                nibbles = torch.randint(0, 16, (experts, rows, inputs), generator=random, dtype=torch.uint8)
                scales = torch.randint(118, 124, (experts, rows, inputs // 32), generator=random, dtype=torch.uint8)
                packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
                result[f"{name}_blocks"] = packed.view(experts, rows, inputs // 32, 16)
                result[f"{name}_scales"] = scales
                wide = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
                meant[name] = (E2M1[nibbles.int()] * wide).transpose(1, 2).bfloat16().contiguous()
            else:
                result[name] = meant[name] = tensor.bfloat16()
        return result

    rewritten(source, folder, change)
    change_config(folder, dtype="bfloat16", quantization_config={"quant_method": "mxfp4"})
    plain = rewritten(source, folder.with_name(folder.name + "-plain"), lambda tensors: dict(meant))
    change_config(plain, dtype="bfloat16")
    return folder, plain


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by name."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
