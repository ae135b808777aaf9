"""What every test may use: where the shipped model and the shared data lie, and how close two results must be."""

import copy
import importlib.util
import json
import logging
import os
import shutil
import signal
import warnings
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from dpamoe.kernels.layout import EncodedWeight, groups_of, pack_signs

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: its kernels then run on the CPU
    if importlib.util.find_spec("triton"):
        from .interpreter import speed_up

        speed_up()

if "PYTEST_XDIST_WORKER" in os.environ:  # threads of several processes would wait for each other
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for programs that tests start

SHARED = Path(__file__).resolve().parents[2] / "shared"

# by minutes that their slow tests take; the first ones begin together
LONGEST = ("test_quality", "test_convert_memory", "test_triton_compile", "test_cli_jobs", "test_stream", "test_whole_models")

TOLERANCES = {
    torch.float32: 1e-4,  # sums of up to a few hundred products, added in another order
    torch.bfloat16: 2e-2,  # 8 bits of mantissa
    torch.float16: 2e-3,  # 11 bits of mantissa
}

RESIDUAL_TOLERANCE = {"rtol": 1e-3, "atol": 0}  # a residual is a difference of fp32 outputs that agree to 1/200

SMALL_CONFIG = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
LATENT_ATTENTION = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
# model type of transformers to what its config needs beside SMALL_CONFIG; all have 8 experts of width 32, two active
FAMILIES = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "qwen2_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [0],
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "deepseek_v2": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "q_lora_rank": None, "topk_method": "greedy", **LATENT_ATTENTION,
    },
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "q_lora_rank": 16, "n_group": 2, "topk_group": 1, **LATENT_ATTENTION,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 1,
    },
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16, "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
LATER = {  # families of releases of transformers after the oldest that is supported
    "ergo": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_dense_intermediate_size": 96,
        "shared_intermediate_size": 32, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
        "mlp_layer_types": ["dense", "sparse"],
    },
}  # fmt: skip
MODELS = Path(importlib.util.find_spec("transformers").origin).parent / "models"  # found without being imported
FAMILIES |= {name: fields for name, fields in LATER.items() if (MODELS / name).is_dir()}


def pytest_collection_modifyitems(items):
    """The longest files come first, so that in the end no process is alone with one of them."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(autouse=True)
def logging_as_before():
    """What a command sets for its process does not reach the next test: its handler writes to a stream that is then closed."""
    logger, shown = logging.getLogger("dpamoe"), warnings.showwarning
    before = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate, level = before
    logger.setLevel(level)
    warnings.showwarning = shown


@pytest.fixture(scope="session")
def shared():
    """Folder of larger models and tasks beside the repository; tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip("needs the folder `shared` beside the repository")
    return SHARED


@pytest.fixture(scope="session")
def tiny_dir():
    """Folder of the small trained model that ships with the package."""
    return Path(str(resources.files("dpamoe.assets"))) / "tiny"


@pytest.fixture(scope="session")
def tolerance():
    """Function from a dtype to the `rtol` and `atol` of `torch.testing.assert_close`."""
    return lambda dtype: {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}


@pytest.fixture(scope="session")
def random_encoded():
    """Function that makes an encoded stacked weight of random planes and scales, about 1 / sqrt(I) in size."""
    return _random_encoded


def _random_encoded(experts, out_features, in_features, group_size, planes=8, tied=False, seed=0):
    random = torch.Generator().manual_seed(seed)
    shape = (experts, out_features, groups_of(in_features, group_size))
    signs = torch.rand(planes, experts, out_features, in_features, generator=random) < 0.5
    packed = [pack_signs(positive) for positive in signs]
    if tied:
        unit = (0.5 + torch.rand(experts, generator=random)) * in_features**-0.5
        code = torch.randint(180, 256, shape, generator=random, dtype=torch.uint8)
        offset = torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
        return EncodedWeight(packed, [code], offset, unit, in_features, group_size)
    size = [0.5**c * (0.5 + torch.rand(shape, generator=random)) * in_features**-0.5 for c in range(planes)]
    offset = torch.randn(shape, generator=random) * in_features**-0.5
    return EncodedWeight(packed, [scale.half() for scale in size], offset.half(), None, in_features, group_size)


@pytest.fixture
def ctrl_c():
    """Ctrl-C reaches this process and those that it starts, also where a shell that runs tests in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def random_pairs():
    """Function that makes a routing: expert_ids int64 [T, A], gates fp32 [T, A], chunks int32 [T, A] of 0 and 2 … 8."""
    return _random_pairs


def _random_pairs(tokens, active, experts, seed=0):
    random = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, max(active, experts), generator=random).argsort(1)[:, :active] % experts
    gates = torch.randn(tokens, active, generator=random).softmax(-1)
    chunks = torch.randint(1, 9, (tokens, active), generator=random, dtype=torch.int32)
    return ids, gates, chunks.where(chunks > 1, 0)


@pytest.fixture(scope="session")
def convex_table():
    """Function that makes a residual table, fp32 [E, C + 1], falling and convex; `whole` numbers give ties."""
    return _convex_table


def _convex_table(experts, planes=8, seed=0, whole=False):
    random = torch.Generator().manual_seed(seed)
    if whole:
        falls = torch.randint(0, 5, (experts, planes), generator=random).float()
    else:
        falls = torch.rand(experts, planes, generator=random) * 4.0 ** -torch.arange(planes)
    falls = falls.sort(1, descending=True).values
    return torch.nn.functional.pad(falls.flip(1).cumsum(1).flip(1), (0, 1))


@pytest.fixture(scope="session")
def small_weights(shared):
    """Function that reads expert weights of the model `small`: (layer, kind, experts) to fp32 [E, O, I]."""
    folder = shared / "models" / "small"
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    def read(layer, kind, experts):
        names = [f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight" for expert in experts]
        tensors = []
        for name in names:
            with safe_open(folder / files[name], "pt") as file:
                tensors.append(file.get_tensor(name).float())
        return torch.stack(tensors)

    return read


@pytest.fixture(scope="session")
def residual_tolerance():
    """The `rtol` and `atol` of residual tables."""
    return RESIDUAL_TOLERANCE


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def family(request):
    """Each family of Mixture-of-Experts models, by model type of transformers."""
    return request.param


@pytest.fixture(scope="session")
def random_model():
    """Function that makes a random fp32 model of two layers: (model type, changes of its config).

    What experts hold beside their weights is random too.
    """
    return _random_model


def _random_model(family, changes=None):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SMALL_CONFIG, **FAMILIES.get(family, {}), **(changes or {})})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if "experts" in name and name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
            elif "expert_norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.fixture(scope="session")
def random_ids():
    """Function that makes token ids of the random models, int64 [rows, length], special tokens left out."""
    return _random_ids


def _random_ids(rows, length, seed=0):
    return torch.randint(3, SMALL_CONFIG["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def transformed():
    """Function from a family to a random model and its transformed twin (group size 32, budget 4), own copies each time."""
    import dpamoe

    made = {}

    def make(family):
        if family not in made:
            model = _random_model(family)
            made[family] = (
                copy.deepcopy(model),
                dpamoe.transform(model, calibration=_random_ids(16, 125), spec=dpamoe.EncodeSpec(group_size=32)),
            )
        return copy.deepcopy(made[family])

    return make


@pytest.fixture
def run(capsys):
    """Function that runs the program in this process: arguments to (exit code, stdout, stderr)."""

    from dpamoe.cli.main import main

    def call(*arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def source(tiny_dir, tmp_path_factory):
    """The shipped model in a folder of its own; read only."""
    return shutil.copytree(tiny_dir, tmp_path_factory.mktemp("models") / "source")


@pytest.fixture(scope="session")
def tiny_model(tiny_dir):
    """Function that gives the shipped model, bf16 as it is stored."""
    from dpamoe.storage import load_original

    model = load_original(tiny_dir)
    return lambda: copy.deepcopy(model)


@pytest.fixture(scope="session")
def short_dir(tiny_dir, tiny_model, tmp_path_factory):
    """Folder of the first two layers of the shipped model, which take half the time; read only."""
    folder, model = tmp_path_factory.mktemp("short") / "model", tiny_model()
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_dir / name, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_encoded(tiny_dir, tiny_model):
    """Function that gives the shipped model transformed with its calibration text, bf16, budget 4."""
    import dpamoe

    text = (tiny_dir.parent / "text" / "calibration.txt").read_text(encoding="utf-8")
    model = dpamoe.transform(tiny_model(), calibration=text)
    return lambda: copy.deepcopy(model)


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    """The tokenizer of the shipped model."""
    from dpamoe.text import load_tokenizer

    return load_tokenizer(tiny_dir)


@pytest.fixture(scope="module")
def plain(tiny_model):
    """The shipped model in fp32."""
    return tiny_model().float()


@pytest.fixture
def encoded(tiny_encoded):
    """The shipped model encoded, in fp32, at budget 3."""
    import dpamoe
    from dpamoe import evaluate

    model = evaluate.to_run(tiny_encoded(), "cpu")
    dpamoe.set_budget(model, 3)
    return model


@pytest.fixture(scope="session")
def tiny_saved(tiny_encoded, tmp_path_factory):
    """Folder of the shipped model, encoded and saved; read it, or copy it before changing anything."""
    import dpamoe

    return dpamoe.save(tiny_encoded(), tmp_path_factory.mktemp("saved") / "tiny")


@pytest.fixture
def store_costs(tmp_path, monkeypatch):
    """Function that stores costs of a shape on the CPU, (shape, uniform_from, {tokens: {path: µs}}), in a cache of its own."""
    from dpamoe.kernels import paths

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths.forget_costs()

    def store(shape, uniform_from=None, microseconds=None):
        times = microseconds or {1: {"decode": 1.0, "prefill": 2.0}}
        return paths.save_costs("cpu", {shape.key: paths.Costs(times, uniform_from, 4.0, "2026-01-31", "2.11.0", "3.6.0")})

    yield store
    paths.forget_costs()


@pytest.fixture
def bits_on_cpu(monkeypatch):
    """The module `bitserial_experts`, whose kernels run on the CPU as for a card with 100 KiB of shared memory."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU; test_cuda_bitserial runs the kernels themselves")
    pytest.importorskip("triton.experimental.gluon")
    import triton.language as tl

    from dpamoe.kernels import bitserial_experts

    from . import gluon_on_cpu

    for name, kernel in gluon_on_cpu.launched().items():
        monkeypatch.setattr(bitserial_experts, name, kernel)
    facts = SimpleNamespace(
        shared_memory_per_multiprocessor=100 << 10, shared_memory_per_block_optin=99 << 10, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(tl.block_type, "layout", None, raising=False)
    return bitserial_experts


@pytest.fixture
def early(bits_on_cpu, monkeypatch):
    """Function that sets what happens where a kernel waits for the one before it, on a card where it begins before its end."""
    from dpamoe.kernels import triton_wait

    from . import gluon_on_cpu

    monkeypatch.setattr(bits_on_cpu, "early", lambda device: {"PDL": True, "launch_pdl": True})
    monkeypatch.setattr(triton_wait, "gdc_launch_dependents", lambda: None)

    def choose(each):
        monkeypatch.setattr(gluon_on_cpu.WAITS, "each", each)
        monkeypatch.setattr(triton_wait, "gdc_wait", each)

    return choose


@pytest.fixture
def hopper_on_cpu(monkeypatch):
    """The module `hopper_experts`, whose kernel runs on the CPU; its `hopper_prefill_kernel` is a `hopper_on_cpu.Hopper`."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU; test_cuda_hopper runs the kernel itself")
    pytest.importorskip("triton.experimental.gluon")
    import triton.language as tl

    from dpamoe.kernels import hopper_experts

    from . import hopper_on_cpu

    monkeypatch.setattr(hopper_experts, "hopper_prefill_kernel", hopper_on_cpu.Hopper(0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1))
    monkeypatch.setattr(tl.block_type, "layout", None, raising=False)
    return hopper_experts
