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


def to_fp8(weight, block, exponents=False):
    """An FP8 weight with the scales of its blocks, and the bf16 weight that it means. exponents: scales are powers of two."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // block), -(-columns // block))
    quantised, meant = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scale[i, j] = weight[place].float().abs().max() / 448
            if exponents:
                scale[i, j] = torch.exp2(torch.ceil(torch.log2(scale[i, j])))
            quantised[place] = (weight[place].float() / scale[i, j]).to(torch.float8_e4m3fn)
            meant[place] = quantised[place].float() * scale[i, j]
    return quantised, scale.to(torch.float8_e8m0fnu) if exponents else scale, meant.bfloat16()


def fp8(source: Path, folder: Path, block: int, suffix: str = "weight_scale_inv", exponents: bool = False) -> tuple[Path, Path]:
    """All matrices of layers in FP8 with block scales, and the bf16 model that they mean, in a folder beside it."""
    meant = {}

    def change(tensors):
        result = {}
        for name, tensor in tensors.items():
            if name.endswith("proj.weight"):
                result[name], scale, meant[name] = to_fp8(tensor, block, exponents)
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


def large(folder: Path, layers: int, stacked: bool, hidden: int = 1024, inner: int = 512, experts: int = 64) -> Path:
    """A bf16 Qwen3-MoE, 0.2 GB a layer with these sizes, a file a layer; both layouts hold the same numbers."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=512, hidden_size=hidden, moe_intermediate_size=inner, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4, head_dim=64, num_experts=experts,
        num_experts_per_tok=4, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    config.architectures, config.dtype = ["Qwen3MoeForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    random, placed = torch.Generator().manual_seed(0), {}

    def weight(*shape):
        return (torch.randn(*shape, generator=random) * shape[-1] ** -0.5).bfloat16()

    gate, up, down = weight(inner, hidden), weight(inner, hidden), weight(hidden, inner)
    first = {"model.embed_tokens.weight": weight(512, hidden), "model.norm.weight": torch.ones(hidden).bfloat16()}
    for layer in range(-1, layers):
        tensors = (
            first if layer < 0 else _large_layer(f"model.layers.{layer}.", layer, weight, (gate, up, down), experts, stacked)
        )
        file = f"model-{layer + 2:05}-of-{layers + 1:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


def _large_layer(prefix, layer, weight, base, experts, stacked):
    hidden = base[0].shape[1]
    shapes = {"q": (512, hidden), "k": (256, hidden), "v": (256, hidden), "o": (hidden, 512)}
    tensors = {f"self_attn.{name}_proj.weight": weight(*shape) for name, shape in shapes.items()}
    tensors |= {f"self_attn.{name}_norm.weight": torch.ones(64).bfloat16() for name in "qk"}
    tensors |= {f"{name}_layernorm.weight": torch.ones(hidden).bfloat16() for name in ("input", "post_attention")}
    tensors["mlp.gate.weight"] = weight(experts, hidden)
    parts = [[matrix.roll(expert + 7 * layer, 0) for matrix in base] for expert in range(experts)]
    if stacked:
        tensors["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(part[:2]) for part in parts])
        tensors["mlp.experts.down_proj"] = torch.stack([part[2] for part in parts])
    else:
        for expert, part in enumerate(parts):
            names = ("gate_proj", "up_proj", "down_proj")
            tensors |= {f"mlp.experts.{expert}.{name}.weight": own for name, own in zip(names, part, strict=True)}
    return {prefix + name: tensor for name, tensor in tensors.items()}
