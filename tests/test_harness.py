"""The lm-eval model "dpamoe": from folders and from memory, equal to the model run by hand, whatever the batch."""

import importlib
import logging
import subprocess
import sys

import pytest
import torch

import dpamoe
from dpamoe import evaluate, text
from dpamoe.modules import encoded_experts

from . import recorded

pytest.importorskip("lm_eval")

LOADER = """
import datasets


def spoken(**_):
    rows = [
        {"start": "A river runs down from the hills to the", "choices": [" sea.", " table."], "right": 0},
        {"start": "He was the father of two", "choices": [" quickly.", " sons and three daughters."], "right": 1},
        {"start": "It does not", "choices": [" exist.", " blue the."], "right": 0},
    ]
    return {"test": datasets.Dataset.from_list(rows)}
"""
TASK = """
task: spoken
custom_dataset: !function loader.spoken
output_type: multiple_choice
test_split: test
doc_to_text: '{{start}}'
doc_to_choice: choices
doc_to_target: right
target_delimiter: ''
metric_list:
  - metric: acc
"""
PAIRS = [
    ("A river runs down from the hills to the", " sea."),
    ("A river runs down from the hills to the", " sea, and from there it is not known where the water goes."),
    ("A river runs down from the hills to the", " table."),
    ("", "The package contains the documentation."),
    ("", "No."),
    ("He was not able", " to"),
    ("The file could not be opened, because it does not", " exist in the directory that was given."),
    ("The father of two sons", " and three daughters"),
    ("Press the key to return to the previous", " page."),
]  # fmt: skip


@pytest.fixture(scope="module")
def harness():
    from dpamoe import harness

    return harness


@pytest.fixture
def wrap(harness, tokenizer):
    """Function that makes the lm-eval model of a model in memory."""
    return lambda model, **more: harness.DpamoeLM(pretrained=model, tokenizer=tokenizer, add_bos_token=True, **more)


def requests(pairs, kind="loglikelihood"):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=pair, idx=0) for pair in pairs]


def score(model, ids, count):
    """Log-likelihood of the last `count` ids and whether they are greedy, one run of the model."""
    with torch.no_grad():
        log_p = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)[-count:]
    targets = torch.tensor(ids[-count:])
    return float(log_p.gather(1, targets[:, None]).sum()), bool((log_p.argmax(-1) == targets).all())


def by_hand(model, tokenizer, start, end):
    begin = [tokenizer.bos_token_id]
    known, whole = (begin + tokenizer(part)["input_ids"] for part in (start, start + end))
    return score(model, whole, len(whole) - len(known))


@pytest.fixture
def assert_same(tolerance):
    """Function that compares two lists of log-likelihood and whether greedy."""

    def check(found, expected):
        values = [torch.tensor([value for value, _ in answers]) for answers in (found, expected)]
        torch.testing.assert_close(*values, **tolerance(torch.float32))
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]

    return check


@pytest.mark.parametrize("kind", ["plain", "encoded"])
def test_log_likelihoods_are_those_by_hand_in_any_batch(kind, request, wrap, tokenizer, assert_same):
    model = request.getfixturevalue(kind)
    expected = [by_hand(model, tokenizer, *pair) for pair in PAIRS]
    for size in (1, 4, 16):
        assert_same(wrap(model, batch_size=size).loglikelihood(requests(PAIRS)), expected)
    assert {greedy for _, greedy in expected} == {True, False}


def test_models_without_partial_logits_score_the_same(plain, wrap, assert_same):
    expected = wrap(plain, batch_size=4).loglikelihood(requests(PAIRS))
    lm = wrap(plain, batch_size=4)
    lm._partial_logits = False
    assert_same(lm.loglikelihood(requests(PAIRS)), expected)


def test_hflm_scores_the_same(plain, tiny_dir, wrap, assert_same):
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=str(tiny_dir), device="cpu", dtype="float32", batch_size=4, add_bos_token=True)
    assert_same(wrap(plain, batch_size=4).loglikelihood(requests(PAIRS)), lm.loglikelihood(requests(PAIRS)))


def test_each_token_reads_the_same_planes_in_any_batch(encoded, wrap, monkeypatch):
    whole, rows = type(encoded).forward, []

    def record_rows(self, ids, **more):
        rows.append(ids)
        return whole(self, ids, **more)

    monkeypatch.setattr(type(encoded), "forward", record_rows)
    seen = []
    for size in (1, 4, 16):
        with recorded.planes() as chunks:
            wrap(encoded, batch_size=size).loglikelihood(requests(PAIRS))
        layers = len(encoded_experts(encoded))
        spent = {}
        for number, ids in enumerate(rows):
            by_layer = torch.stack(chunks[number * layers : (number + 1) * layers]).view(layers, *ids.shape, -1)
            for row, planes in zip(ids, by_layer.unbind(1), strict=True):
                length = int((row != 0).sum())  # padded with 0, which no text holds
                spent[tuple(row[:length].tolist())] = planes[:, :length].tolist()
        seen.append(spent)
        rows.clear()
    assert len(seen[0]) > 5 and seen[0] == seen[1] == seen[2]


def test_continuations_that_share_all_but_their_last_token(plain, wrap, tokenizer, assert_same):
    """Scored in one run, also where the same text is cut into context and continuation elsewhere."""
    lm = wrap(plain, batch_size=4)
    ids = [1, *tokenizer("The package contains the source")["input_ids"]]
    cuts = [(None, ids[:-1], ids[-1:]), (None, ids[:-3], ids[-3:]), (None, ids[:-3], [*ids[-3:-1], 77])]
    found = lm._loglikelihood_tokens(cuts)
    assert_same(found, [score(plain, context + continuation, len(continuation)) for _, context, continuation in cuts])


def test_long_contexts_are_cut_on_the_left_and_long_continuations_refused(plain, wrap, tokenizer, caplog, assert_same):
    lm = wrap(plain, max_length=8)
    caplog.set_level(logging.WARNING, logger="dpamoe")
    ids = [1, *tokenizer("A river runs down from the hills to the sea.")["input_ids"]]
    assert_same(lm._loglikelihood_tokens([(None, ids[:-2], ids[-2:])]), [score(plain, ids[-9:], 2)])
    assert [r.getMessage() for r in caplog.records if r.name == "dpamoe"] == ["1 of 1 texts are cut on the left to 8 tokens"]
    with pytest.raises(ValueError, match="have 2 to 9 tokens, 1 to 8 can be scored"):
        lm._loglikelihood_tokens([(None, ids[:3], ids[3:12]), (None, ids[:3], ids[3:5])])
    with pytest.raises(ValueError, match="have 0 to 0 tokens"):
        lm._loglikelihood_tokens([(None, ids, [])])


def test_whole_texts_and_detected_batches(plain, tokenizer, harness, assert_same):
    lm = harness.DpamoeLM(plain, tokenizer=tokenizer, batch_size="auto", max_batch_size=2, max_length=24)
    assert_same(lm.loglikelihood(requests(PAIRS[3:5])), [by_hand(plain, tokenizer, *pair) for pair in PAIRS[3:5]])
    story = "The package contains the documentation."
    ids = [tokenizer.bos_token_id, *tokenizer(story)["input_ids"]]
    assert lm.loglikelihood_rolling(requests([(story,)])) == pytest.approx([score(plain, ids, len(ids) - 1)[0]], rel=1e-4)


@pytest.mark.slow
def test_encoded_folders_by_name(harness, tiny_saved, plain, tmp_path, assert_same):
    """Budget and allocation pass through model_args; the scores are those of the same model in memory."""
    import lm_eval
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    (tmp_path / "loader.py").write_text(LOADER)
    (tmp_path / "spoken.yaml").write_text(TASK)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    outcome = lm_eval.simple_evaluate(
        model="dpamoe", model_args=f"pretrained={tiny_saved},budget=3.5,allocation=gate-only,add_bos_token=True",
        tasks=["spoken"], task_manager=manager, bootstrap_iters=0,
    )  # fmt: skip
    assert outcome["config"]["budget"] == 3.5 and outcome["config"]["allocation"] == "gate-only"
    assert outcome["config"]["model_num_parameters"] == plain.num_parameters()
    model = evaluate.to_run(dpamoe.load(tiny_saved, 3.5), "cpu")
    dpamoe.set_spend(model, allocation="gate-only")
    tokenizer = text.load_tokenizer(tiny_saved)
    samples = outcome["samples"]["spoken"]
    assert len(samples) == 3
    for sample in samples:
        expected = [by_hand(model, tokenizer, *pair) for pair in sample["arguments"]]
        assert_same([answer for (answer,) in sample["resps"]], expected)
    for budget in (2, 8):
        lm = get_model("dpamoe").create_from_arg_string(f"pretrained={tiny_saved},budget={budget}", {"batch_size": 4})
        lm_eval.simple_evaluate(model=lm, tasks=["spoken"], task_manager=manager, bootstrap_iters=0)
        assert dpamoe.stats(lm.model)["mean_planes"] == budget


def test_how_a_folder_is_loaded(harness, tiny_saved, tiny_dir):
    lm = harness.DpamoeLM(str(tiny_saved), k_max=4, budget=4.0, device="cpu")
    assert {int(experts.k_max) for experts in encoded_experts(lm.model).values()} == {4}
    assert lm.model.dtype == torch.float32 and lm.batch_size == 1 and not lm.model.training
    assert harness.DpamoeLM(tiny_saved, dtype="bfloat16", device="cpu").model.dtype == torch.bfloat16
    original = harness.DpamoeLM(str(tiny_dir), device="cpu", max_length=77)
    assert not encoded_experts(original.model) and original.model.dtype == torch.float32 and original.max_length == 77
    assert original.get_model_info()["model_num_parameters"] == original.model.num_parameters()


def test_models_survive_what_hflm_does_to_them(harness, tiny_saved, encoded, random_ids, wrap):
    ids = random_ids(2, 12)
    for model in (evaluate.to_run(dpamoe.load(tiny_saved, 3), "cpu"), encoded):
        with torch.no_grad():
            before = model(ids).logits
            lm = wrap(model, budget=3.0, allocation="dpa")
            lm.model.to(lm.device)
            assert lm.model is model and torch.equal(model(ids).logits, before)
    written = lm.generate_until(
        requests([("The package contains the", {"until": ["\n"], "max_gen_toks": 4})], "generate_until")
    )
    assert len(written) == 1 and written[0].strip()


def test_the_tokenizer_of_the_folder_is_found(harness, tiny_saved):
    lm = harness.DpamoeLM(dpamoe.load(tiny_saved))
    assert lm.tok_encode("hello") == lm.tokenizer("hello")["input_ids"]
    lm.add_bos_token = True
    assert lm.tok_encode("hello") == [1, *lm.tokenizer("hello")["input_ids"]]
    assert lm.tok_encode("hello", add_special_tokens=False) == lm.tokenizer("hello")["input_ids"]
    assert lm.tok_encode("<s>hello") == [1, *lm.tokenizer("hello")["input_ids"]]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"pretrained": "original", "budget": 3.5}, "is an original model, so budget=3.5 means nothing: convert it first"),
        ({"pretrained": "original", "k_max": 4}, "so k_max=4 means nothing"),
        ({"pretrained": "encoded", "budget": 9}, "budget is 9 planes per expert"),
        ({"pretrained": "encoded", "k_max": 9}, "k_max 9 asked of a checkpoint with planes 2 to 8"),
        ({"pretrained": "encoded", "allocation": "best"}, "allocation is 'best': use one of"),
        ({"pretrained": "encoded", "parallelize": True}, 'parallelize cannot be used with the model "dpamoe"'),
        ({"pretrained": "nowhere/at all"}, "model folder nowhere/at all does not exist"),
        ({"pretrained": "in memory", "budget": 3}, "holds no encoded experts"),
        ({"pretrained": "in memory", "k_max": 3}, "k_max=3 says what to read from a folder"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(harness, tiny_dir, tiny_saved, plain, arguments, sentence):
    places = {"original": str(tiny_dir), "encoded": str(tiny_saved), "in memory": plain}
    pretrained = places.get(arguments["pretrained"], arguments["pretrained"])
    with pytest.raises(ValueError, match=sentence):
        harness.DpamoeLM(**(arguments | {"pretrained": pretrained}))


@pytest.mark.slow
def test_lm_eval_alone_refuses_our_folders_and_our_name(tiny_saved):
    """Without dpamoe neither is known; `hf` stops at the quantization type, before it would make up experts."""
    code = """
import sys
from lm_eval.api.registry import get_model
for name in ("hf", "dpamoe"):
    try:
        get_model(name)(pretrained=sys.argv[1], device="cpu")
    except ValueError as error:
        print(error)
assert "dpamoe" not in sys.modules
import dpamoe.harness
print(get_model("dpamoe").__name__)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tiny_saved)], capture_output=True, text=True, cwd=tiny_saved)
    assert done.returncode == 0, done.stderr
    refusal, unknown, known = done.stdout.strip().splitlines()
    assert refusal.startswith("Unknown quantization type, got dpamoe")
    assert unknown.startswith("Attempted to load model 'dpamoe', but no model for this name found!")
    assert known == "DpamoeLM"


def test_without_lm_eval_importing_says_what_to_install(harness, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "dpamoe.harness")
    monkeypatch.delattr(dpamoe, "harness")
    with pytest.raises(ImportError, match=r'dpamoe.harness needs lm-eval: pip install "dpamoe\[eval\]"'):
        importlib.import_module("dpamoe.harness")
