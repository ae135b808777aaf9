"""transformers opens encoded folders once dpamoe is imported: the same model as `dpamoe.load`, everywhere it is used."""

import copy
import io
import json
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import dpamoe
from dpamoe import checkpoint, hf
from dpamoe.modules import encoded_experts

SLOW = ("qwen2_moe", "olmoe", "mixtral", "granitemoe", "deepseek_v2", "ernie4_5_moe")  # as far as loading goes, like others
CASES = ["qwen3_moe", "deepseek_v3", "gpt_oss", *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)]
IDS = torch.randint(3, 2048, (2, 40), generator=torch.Generator().manual_seed(0))


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids).logits


def opened(folder, **arguments):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": "auto", **arguments})


def config_of(folder, **changes):
    """The config of a folder with changes of its quantization_config."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    config.quantization_config |= changes
    return config


def assert_same_model(one, other, ids=IDS):
    """Logits, tensors, report, and what was spent on the way, bit by bit."""
    dpamoe.stats(one, reset=True), dpamoe.stats(other, reset=True)
    assert torch.equal(logits(one, ids), logits(other, ids))
    assert dpamoe.stats(one) == dpamoe.stats(other) and dpamoe.report(one) == dpamoe.report(other)
    state = other.state_dict()
    assert list(one.state_dict()) == list(state)
    for name, tensor in one.state_dict().items():
        assert tensor.dtype == state[name].dtype and torch.equal(tensor, state[name]), name
    assert [e.spend for e in encoded_experts(one).values()] == [e.spend for e in encoded_experts(other).values()]


@pytest.fixture(scope="module")
def loaded(tiny_saved):
    """The shipped model as `dpamoe.load` gives it; keep its budget."""
    return dpamoe.load(tiny_saved)


@pytest.fixture
def saved_copy(tiny_saved, tmp_path):
    """A copy of the encoded shipped model that may be damaged."""
    return shutil.copytree(tiny_saved, tmp_path / "encoded")


@pytest.fixture
def split_map(tiny_saved):
    """A device map that leaves two layers on disk."""
    count = config_of(tiny_saved).num_hidden_layers
    outer = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    return {**outer, **{f"model.layers.{layer}": "disk" if layer >= count - 2 else "cpu" for layer in range(count)}}


def test_the_same_model_as_load(tiny_saved, loaded):
    model = opened(tiny_saved)
    assert type(model) is type(loaded) and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.config, "transformers_weights") and model.config.quantization_config.get("k_max") == 8
    assert model.generation_config.eos_token_id == loaded.generation_config.eos_token_id
    assert_same_model(model, loaded)


@pytest.mark.parametrize("family", CASES)
def test_every_family(family, transformed, random_ids, tmp_path):
    _, model = transformed(family)
    dpamoe.set_spend(model, budget=3.5, scope="dispatch")
    out = dpamoe.save(model, tmp_path / "model")
    assert_same_model(opened(out), dpamoe.load(out), random_ids(2, 24))
    assert torch.equal(logits(opened(out), random_ids(2, 24)), logits(model, random_ids(2, 24)))


@pytest.mark.parametrize("spec", [{"scale_mode": "tied"}, {"k_min": 1, "k_max": 5}, {"group_size": -1}])
def test_every_way_to_encode(random_model, random_ids, tmp_path, spec):
    spec = dpamoe.EncodeSpec(**{"group_size": 32, "iterations": 1, **spec})
    out = dpamoe.save(
        dpamoe.transform(random_model("gpt_oss"), 3.5, calibration=random_ids(4, 50), spec=spec), tmp_path / "model"
    )
    assert_same_model(opened(out), dpamoe.load(out), random_ids(2, 24))


@pytest.mark.parametrize("as_object", [False, True])
def test_fewer_planes_by_the_config(saved_copy, tiny_saved, as_object):
    for plane in range(4, 8):
        (saved_copy / f"model-plane-{plane}-00001-of-00001.safetensors").unlink()
    config = config_of(saved_copy, k_max=4, default_budget=3.25)
    if as_object:
        config.quantization_config = hf.DpamoeConfig.from_dict(config.quantization_config)
    model = opened(saved_copy, config=config)
    assert_same_model(model, dpamoe.load(tiny_saved, 3.25, k_max=4))
    assert next(iter(encoded_experts(model).values())).held == 4


def test_a_budget_beyond_the_planes_is_clamped_with_a_warning(tiny_saved):
    with pytest.warns(UserWarning, match="budget 4 exceeds the 3 planes held: using 3"):
        model = opened(tiny_saved, config=config_of(tiny_saved, k_max=3))
    assert dpamoe.report(model).budget == 3


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("how", ["from_pretrained", "load"])
def test_save_pretrained_writes_the_same_bytes(tiny_saved, tmp_path, how):
    out = tiny_saved.parent.with_name(f"again-{how}") / tiny_saved.name  # same depth and name, so that relative paths are equal
    out.mkdir(parents=True)
    (opened if how == "from_pretrained" else dpamoe.load)(tiny_saved).save_pretrained(out)
    assert contents(out) == contents(tiny_saved)


def test_save_pretrained_of_a_transformed_model_and_once_more(transformed, random_ids, tmp_path):
    _, model = transformed("qwen3_moe")
    before = logits(model, random_ids(2, 24))
    model.save_pretrained(tmp_path / "one")
    again = opened(tmp_path / "one")
    assert torch.equal(logits(again, random_ids(2, 24)), before)
    again.save_pretrained(tmp_path / "two", max_shard_size="1MB")
    assert checkpoint.read_index(tmp_path / "two")[1] == checkpoint.read_index(tmp_path / "one")[1]


def test_copies_and_pickles_keep_the_format(tiny_saved, tmp_path):
    model, stream = dpamoe.load(tiny_saved), io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for number, twin in enumerate((copy.deepcopy(model), torch.load(stream, weights_only=False))):
        dpamoe.set_budget(twin, 3 + number)
        twin.save_pretrained(tmp_path / str(number))
        assert dpamoe.report(dpamoe.load(tmp_path / str(number))).budget == 3 + number


def test_what_save_pretrained_refuses(tiny_saved, loaded, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="full exists: choose another name"):
        loaded.save_pretrained(tmp_path / "full")
    with pytest.raises(ValueError, match="push_to_hub=…. is not for encoded models"):
        loaded.save_pretrained(tmp_path / "new", push_to_hub=True)
    with pytest.raises(ValueError, match="holds 4 of 8 planes"):
        opened(tiny_saved, config=config_of(tiny_saved, k_max=4)).save_pretrained(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_save_pretrained_of_a_reverted_model_is_transformers_own(random_model, random_ids, tmp_path):
    model = random_model("qwen3_moe")
    dpamoe.transform(model, calibration=random_ids(4, 50), spec=dpamoe.EncodeSpec(group_size=32), keep_original=True)
    dpamoe.revert(model).save_pretrained(tmp_path / "model")
    assert torch.equal(logits(opened(tmp_path / "model"), random_ids(2, 24)), logits(model, random_ids(2, 24)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, "bfloat16", None])
def test_dtype_does_not_touch_encoded_tensors(tiny_saved, loaded, dtype):
    model = opened(tiny_saved, dtype=dtype or "auto")
    assert model.dtype == {None: torch.bfloat16, "bfloat16": torch.bfloat16}.get(dtype, dtype)
    for path, experts in encoded_experts(model).items():
        for name, tensor in encoded_experts(loaded)[path].state_dict().items():
            own = experts.state_dict()[name]
            assert own.dtype == tensor.dtype and torch.equal(own, tensor)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_device_maps(tiny_saved, loaded, device_map):
    assert_same_model(opened(tiny_saved, device_map=device_map), loaded)


@pytest.mark.parametrize("k_max", [8, 4])
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_layers_on_disk(tiny_saved, split_map, tmp_path, offload_buffers, k_max):
    config, places = config_of(tiny_saved, k_max=k_max), {"offload_folder": tmp_path, "offload_buffers": offload_buffers}
    model, whole = opened(tiny_saved, config=config, device_map=split_map, **places), dpamoe.load(tiny_saved, k_max=k_max)
    last = list(encoded_experts(model).values())[-1]
    assert last.gate_up_proj.plane.as_list()[0].is_meta == offload_buffers
    for change in ({}, {"budget": 2.75}, {"allocation": "uniform"}, {"scope": "dispatch"}):
        if change:
            dpamoe.set_spend(model, **change), dpamoe.set_spend(whole, **change)
        for _ in range(2):  # brought in, sent away, brought in again
            assert torch.equal(logits(model), logits(whole))
    assert dpamoe.stats(model) == dpamoe.stats(whole)


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_offload_to_cpu_by_accelerate(tiny_saved, loaded, offload_buffers):
    from accelerate import cpu_offload

    model = cpu_offload(dpamoe.load(tiny_saved), execution_device="cpu", offload_buffers=offload_buffers)
    assert torch.equal(logits(model), logits(loaded))
    assert next(iter(encoded_experts(model).values())).down_proj.offset.is_meta == offload_buffers


def test_generate(tiny_saved, loaded):
    model, fixed = opened(tiny_saved), {"max_new_tokens": 12, "do_sample": False}
    expected = loaded.generate(IDS[:1, :8], **fixed)
    assert torch.equal(model.generate(IDS[:1, :8], **fixed), expected)
    assert torch.equal(model.generate(IDS[:1, :8], cache_implementation="static", **fixed), expected)


def test_pipeline(tiny_saved, loaded):
    from transformers import AutoTokenizer, pipeline

    wanted = {"max_new_tokens": 8, "do_sample": False}
    [given] = pipeline("text-generation", model=str(tiny_saved))("Once upon a time", **wanted)
    tokenizer = AutoTokenizer.from_pretrained(tiny_saved)
    ids = loaded.generate(**tokenizer("Once upon a time", return_tensors="pt"), **wanted)
    assert given["generated_text"] == tokenizer.decode(ids[0], skip_special_tokens=True)


def test_without_the_head(tiny_saved, loaded):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_saved, dtype="auto")
    with torch.no_grad():
        assert torch.equal(model(IDS).last_hidden_state, loaded.model(IDS).last_hidden_state)
    assert dpamoe.report(model).experts == dpamoe.report(loaded).experts
    assert list(dpamoe.stats(model)["sites"]) == [experts.site.path for experts in encoded_experts(model).values()]


def test_lm_eval_itself(tiny_saved, loaded):
    """HFLM passes an object where the config has a dictionary."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = HFLM(pretrained=str(tiny_saved), device="cpu", batch_size=2).model
    assert torch.equal(logits(model), logits(loaded))


def test_adapters_on_attention(tiny_saved, loaded, tmp_path):
    peft = pytest.importorskip("peft")
    base = opened(tiny_saved)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    assert torch.equal(logits(model), logits(loaded))  # a new adapter adds nothing
    assert {"lora_A", "lora_B"} == {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad}
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file() and not (tmp_path / checkpoint.INDEX).exists()


def truncated(folder):
    file = folder / "model-plane-3-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def rewritten(part, change):
    def damage(folder):
        [file] = folder.glob(f"model-{part}-*.safetensors") if part != "residuals" else [folder / checkpoint.RESIDUALS]
        save_file(change(load_file(file)), file, metadata={"format": "pt"})
        index = json.loads((folder / checkpoint.INDEX).read_text())
        index["files"][file.name] = file.stat().st_size
        (folder / checkpoint.INDEX).write_text(json.dumps(index))

    return damage


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def misspell(tensors):
    return {name.replace("layers.1.mlp.experts.down_proj.plane.2", "down.plane.2"): t for name, t in tensors.items()}


def next_version(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["version"] += 1
    (folder / "config.json").write_text(json.dumps(config))


def cut(tensors):
    name = "model.layers.1.mlp.experts.down_proj.plane.2"
    return {**tensors, name: tensors[name][:, :-1].contiguous()}


@pytest.mark.parametrize(
    "damage, words",
    [
        (truncated, "model-plane-3.* bytes, .* were written"),
        (next_version, "has format version 2, this dpamoe reads version 1: convert the model again"),
        (lambda folder: (folder / checkpoint.MARKER).touch(), "is being written, or was left unfinished"),
        (rewritten("plane-2", misspell), "model.layers.1.mlp.experts.down_proj.plane.2 is missing from the checkpoint"),
        (lambda folder: (folder / "model-plane-7-00001-of-00001.safetensors").unlink(), "plane-7-.* is missing"),
        (lambda folder: (folder / checkpoint.INDEX).unlink(), "the conversion is incomplete"),
        (rewritten("plane-2", cut), "down_proj.plane.2 is torch.uint8 .*, expected"),
        (
            rewritten("plane-2", without("model.layers.1.mlp.experts.down_proj.plane.2")),
            "plane.2 is missing from the checkpoint",
        ),
        (
            rewritten("base", without("model.layers.1.self_attn.q_proj.weight")),
            "lacks 1 tensors of the model, such as .*q_proj",
        ),
    ],
)
def test_damage_is_an_error_and_not_noise(saved_copy, damage, words):
    damage(saved_copy)
    with pytest.raises(ValueError, match=words):
        opened(saved_copy)


def test_an_original_is_not_encoded_while_it_loads(tiny_dir):
    with pytest.raises(ValueError, match="does require the model to be pre-quantized"):
        opened(tiny_dir, quantization_config=hf.DpamoeConfig())


def test_registering_twice_changes_nothing():
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    hf.register()
    assert AUTO_QUANTIZER_MAPPING[hf.METHOD] is hf.DpamoeQuantizer


@pytest.fixture
def cached(tiny_saved, tmp_path):
    """A cache of the hub that holds the encoded shipped model as someone/tiny, and its snapshot folder."""
    repository = tmp_path / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return shutil.copytree(tiny_saved, repository / "snapshots" / ("0" * 40))


def test_a_repository_of_the_hub(cached, loaded):
    model = opened("someone/tiny", cache_dir=cached.parents[2], local_files_only=True)
    assert torch.equal(logits(model), logits(loaded))


@pytest.mark.parametrize("k_max", [None, 4])
def test_only_files_of_the_wanted_planes_are_downloaded(cached, tiny_saved, monkeypatch, k_max):
    asked = []

    def download(name, files, **where):
        asked.extend(files)
        for file in files:
            shutil.copyfile(tiny_saved / file, cached / file)

    monkeypatch.setattr(hf, "cached_files", download)
    for file in cached.iterdir():
        if file.name not in ("config.json", checkpoint.RESIDUALS):
            file.unlink()
    changes = {} if k_max is None else {"k_max": k_max}
    config = config_of(tiny_saved, **changes)
    model = opened("someone/tiny", config=config, cache_dir=cached.parents[2], local_files_only=True)
    assert torch.equal(logits(model), logits(dpamoe.load(tiny_saved, k_max=k_max)))
    planes = sorted(int(name.split("-")[2]) for name in asked if name.startswith("model-plane-"))
    assert planes == list(range(k_max or 8)) and checkpoint.INDEX in asked


@pytest.mark.slow
@pytest.mark.parametrize("first", ["dpamoe", "transformers.quantizers.auto"])
def test_the_order_of_imports_does_not_matter(tiny_saved, first):
    code = f"""
import sys
import {first}
assert "{first}" != "dpamoe" or "transformers" not in sys.modules, "dpamoe alone imports transformers"
import dpamoe
from transformers import AutoModelForCausalLM
print(dpamoe.report(AutoModelForCausalLM.from_pretrained(sys.argv[1])).experts)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tiny_saved)], capture_output=True, text=True, cwd=tiny_saved)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == dpamoe.report(dpamoe.load(tiny_saved)).experts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_layers_of_a_gpu_model_on_the_cpu(tiny_saved, split_map, offload_buffers):
    places = {name: "cpu" if place == "disk" else 0 for name, place in split_map.items()}
    # in fp32, since in bf16 the devices' rounding lets a router choose another expert now and then
    model = opened(tiny_saved, device_map=places, offload_buffers=offload_buffers, dtype=torch.float32)
    last = list(encoded_experts(model).values())[-1]
    assert last.down_proj.plane.as_list()[0].is_meta == offload_buffers and last.spent.device.type == "cuda"
    torch.testing.assert_close(
        logits(model, IDS.cuda()).cpu(), logits(opened(tiny_saved, dtype=torch.float32)), rtol=1e-3, atol=1e-3
    )
    assert dpamoe.stats(model)["mean_planes"] == 4
