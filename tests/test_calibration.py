"""Calibration inputs: what is made of each form, text that the model writes itself, and what is refused."""

import warnings

import pytest
import torch
from torch import nn

from dpamoe import calibration


class Plain(nn.Module):
    """No language model."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, scale=1.0):
        return self.layer(x) * scale


def ids_of(batches):
    """Token ids of all batches, one list per row; each batch holds nothing else."""
    assert all(args == () and list(kwargs) == ["input_ids"] for args, kwargs in batches)
    return [row for _, kwargs in batches for row in kwargs["input_ids"].tolist()]


def test_which_models_are_language_models(random_model):
    assert calibration.is_language_model(random_model("qwen3_moe"))
    assert not calibration.is_language_model(random_model("qwen3_moe").model.layers[0])
    assert not calibration.is_language_model(Plain())


def test_a_language_model_makes_its_own_example(random_model):
    model = random_model("qwen3_moe")
    args, kwargs = calibration.example_batch(model, None)
    assert args == () and list(kwargs) == ["input_ids"]
    assert kwargs["input_ids"].shape == (2, 16) and int(kwargs["input_ids"].max()) < 128
    assert torch.equal(calibration.example_batch(model, None)[1]["input_ids"], kwargs["input_ids"])
    model(**kwargs)


def test_any_other_module_must_be_given_one():
    with pytest.raises(TypeError, match=r"Plain has no Hugging Face config to make inputs from: pass example_inputs"):
        calibration.example_batch(Plain(), None)


def test_forms_of_one_input(random_model):
    x, plain, language = torch.ones(2, 3), Plain(), random_model("qwen3_moe")
    assert calibration.example_batch(plain, x) == ((x,), {})
    assert calibration.as_batch(plain, (x, 2.0)) == ((x, 2.0), {})
    assert calibration.as_batch(plain, [x, 2.0]) == ((x, 2.0), {})
    assert calibration.as_batch(plain, {"x": x}) == ((), {"x": x})
    flat = torch.arange(5)
    assert ids_of([calibration.as_batch(language, flat)]) == [[0, 1, 2, 3, 4]]
    assert ids_of([calibration.as_batch(language, flat.view(1, 5))]) == [[0, 1, 2, 3, 4]]


def test_an_encoding_of_a_tokenizer_is_taken_as_keywords(random_model, tiny_dir):
    from transformers import AutoTokenizer

    encoding = AutoTokenizer.from_pretrained(tiny_dir)("The database", return_tensors="pt")
    args, kwargs = calibration.as_batch(random_model("qwen3_moe"), encoding)
    assert args == () and torch.equal(kwargs["input_ids"], encoding["input_ids"])


@pytest.mark.parametrize("inputs", [3, 2.5, None, {1, 2}])
def test_other_inputs_are_refused(inputs):
    with pytest.raises(TypeError, match="pass a tensor, a tuple of positional or a dict of keyword arguments"):
        calibration.as_batch(Plain(), inputs)


def test_token_ids_become_windows_that_hold_each_token_once(random_model):
    """Positions end at 128, so a window holds the begin token and 127 others."""
    model = random_model("qwen3_moe")
    ids = torch.arange(3, 128).repeat(9)[:1000]
    rows = ids_of(calibration.calibration_batches(model, ids, ((), {})))
    assert all(row[0] == 1 and len(row) <= 128 for row in rows) and len(rows) == 8
    expected = [[1, *part.tolist()] for part in ids.split(127)]
    assert rows != expected and sorted(rows) == sorted(expected)  # in seeded random order
    assert rows == ids_of(calibration.calibration_batches(model, ids, ((), {})))
    assert rows == ids_of(calibration.calibration_batches(model, ids.view(10, 100), ((), {})))


def test_long_text_is_cut_to_the_samples_wanted(random_model):
    model = random_model("qwen3_moe")
    batches = calibration.id_batches(model, torch.arange(3, 128).repeat(40), length=16, samples=20)
    rows = ids_of(batches)
    assert len(rows) == 20 and all(len(row) == 16 for row in rows)
    assert max(len(kwargs["input_ids"]) for _, kwargs in batches) == calibration.BATCH


def test_text_needs_a_tokenizer_and_uses_it(tiny_model, random_model, tiny_dir):
    from transformers import AutoTokenizer

    written = "The database engine.\n\nAnother document."
    (row,) = ids_of(calibration.calibration_batches(tiny_model(), written, ((), {})))
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    first, second = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in written.split("\n\n"))
    assert row == [1, *first, 2, 1, *second, 2]
    with pytest.raises(ValueError, match="give token ids"):
        calibration.calibration_batches(random_model("qwen3_moe"), written, ((), {}))


@pytest.mark.parametrize("written", ["", " \n\n\n "])
def test_text_without_words_is_refused(tiny_model, written):
    with pytest.raises(ValueError, match="holds no tokens"):
        calibration.calibration_batches(tiny_model(), written, ((), {}))


@pytest.mark.parametrize(
    "ids, words", [([], "no token ids"), ([1], "1 tokens|at least 2"), ([3, 128], "3 to 128"), ([-1, 3], "-1 to 3")]
)
def test_token_ids_that_do_not_fit_are_refused(random_model, ids, words):
    given = torch.tensor(ids, dtype=torch.long)
    with pytest.raises(ValueError, match=words):
        calibration.calibration_batches(random_model("qwen3_moe"), given, ((), {}))


def test_a_float_tensor_is_one_input():
    x = torch.randn(4, 3)
    ((args, kwargs),) = calibration.calibration_batches(Plain(), x, ((), {}))
    assert args == (x,) and kwargs == {}


def test_an_iterable_is_taken_item_by_item():
    x = torch.randn(4, 3)
    found = calibration.calibration_batches(Plain(), (item for item in (x, (x, 2.0), {"x": x})), ((), {}))
    assert found == [((x,), {}), ((x, 2.0), {}), ((), {"x": x})]
    with pytest.raises(ValueError, match="empty iterable"):
        calibration.calibration_batches(Plain(), iter(()), ((), {}))


def test_without_calibration_a_plain_module_is_measured_on_its_example():
    example = ((torch.ones(1, 3),), {})
    with pytest.warns(UserWarning, match="measured on the example inputs alone"):
        assert calibration.calibration_batches(Plain(), None, example) == [example]


@pytest.mark.parametrize("training", [True, False])
def test_own_text_is_seeded_and_leaves_no_trace(random_model, training):
    model = random_model("qwen3_moe").train(training)
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = ids_of(calibration.calibration_batches(model, None, ((), {})))
    assert torch.equal(torch.random.get_rng_state(), state) and model.training == training
    assert len(rows) == 32 and all(len(row) == 128 and row[0] == 1 for row in rows)  # positions end at 128
    assert not any(2 in row for row in rows)  # the end token is held back
    assert len({tuple(row) for row in rows}) == 32
    torch.manual_seed(8)
    assert rows == ids_of(calibration.calibration_batches(model, None, ((), {})))


@pytest.mark.slow
def test_own_text_of_the_shipped_model_is_256_tokens_that_it_finds_likely(tiny_model):
    model = tiny_model().float()
    batches = calibration.own_text(model)
    rows = torch.cat([kwargs["input_ids"] for _, kwargs in batches])
    assert rows.shape == (32, 257)
    random = torch.randint(3, 2048, (4, 257), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own, other = (model(input_ids=ids, labels=ids).loss for ids in (rows[:4], random))
    assert own < 4.5 and own < other / 2  # temperature 1: near the entropy of the model, ln 2048 is 7.6


def test_device_of_what_holds_no_parameters():
    assert calibration.device_of(nn.ReLU()) == torch.device("cpu")
    assert calibration.device_of(nn.BatchNorm1d(2, affine=False)) == torch.device("cpu")
    for without_weights in (nn.Linear(2, 2, device="meta"), nn.BatchNorm1d(2, affine=False, device="meta")):
        assert calibration.device_of(without_weights) == torch.device("cpu")  # inputs hold numbers all the same
