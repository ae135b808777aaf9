"""Accuracy on lm-eval's tasks: equal to log-likelihoods taken by hand, whatever the batch; all mistakes found before."""

import json
import logging
import math
import os
import socket
import subprocess
import sys

import pytest
import torch

import dpamoe
from dpamoe import tasks
from dpamoe.modules import encoded_experts

from .marks import some_slow

lm_eval = pytest.importorskip("lm_eval")

ENDINGS = [
    ("A river runs down from the hills to the", [" sea.", " table.", " because.", " under."], 0),
    ("The file could not be opened, because it does not", [" blue.", " exist.", " exists the.", " of."], 1),
    ("He was the father of two sons and three", [" quickly.", " is.", " daughters.", " the."], 2),
    ("The package contains the documentation and the source", [" ran.", " him.", " yes.", " code."], 3),
    ("In the winter the days are short and the nights are", [" long.", " files.", " option.", " he."], 0),
    ("Press the key to return to the", [" whom.", " previous page.", " sang.", " were."], 1),
    ("She closed the door and went out of the", [" and.", " did.", " house.", " of."], 2),
    ("This program is free software; you can", [" of.", " table.", " its.", " redistribute it."], 3),
    ("A triangle has three sides, a square has", [" four.", " the.", " server.", " their."], 0),
    ("The ship sank, and all of its men were", [" option.", " drowned.", " of.", " variable."], 1),
]
PAIRS = [
    (["The two men was seen.", "The two men were seen."], 1),
    (["She has a house.", "She have a house."], 0),
    (["These file are old.", "These files are old."], 1),
    (["It can be read.", "It can be reads."], 0),
    (["He go to town.", "He goes to town."], 1),
    (["They know him.", "They knows him."], 0),
    (["An answer was given.", "A answer was given."], 0),
]
LOADER = """
import json
from pathlib import Path

import datasets


def rows(name):
    lines = (Path(__file__).parent / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}


def endings(**_):
    return rows("endings")


def pairs(**_):
    return rows("pairs")


def lost(**_):
    return rows("lost")
"""
CHOICE = """
custom_dataset: !function loader.{data}
output_type: multiple_choice
test_split: test
doc_to_choice: choices
doc_to_target: right
metric_list:
  - metric: acc
"""
FILES = {
    "endings.yaml": "task: endings" + CHOICE.format(data="endings") + "  - metric: acc_norm\ndoc_to_text: '{{start}}'\n"
    "target_delimiter: ''\n",
    "pairs.yaml": "task: pairs" + CHOICE.format(data="pairs") + "doc_to_text: ''\ntarget_delimiter: ''\n",
    "few.yaml": "task: few" + CHOICE.format(data="endings") + "doc_to_text: '{{start}}'\ntarget_delimiter: ''\n"
    "num_fewshot: 2\nfewshot_split: test\n",
    "lost.yaml": "task: lost" + CHOICE.format(data="lost") + "doc_to_text: ''\n",
    "rolling.yaml": "task: rolling\ncustom_dataset: !function loader.endings\noutput_type: loglikelihood_rolling\n"
    "test_split: test\ndoc_to_text: ''\ndoc_to_target: '{{start}}'\nmetric_list:\n  - metric: bits_per_byte\n",
    "both.yaml": "group: both\ntask:\n  - endings\n  - pairs\n",
    "mixed.yaml": "group: mixed\ntask:\n  - pairs\n  - rolling\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of task files: `both` groups `endings` and `pairs`; `rolling` has no acc, `lost` no data."""
    folder = tmp_path_factory.mktemp("tasks")
    data = {
        "endings": [{"start": start, "choices": choices, "right": right} for start, choices, right in ENDINGS],
        "pairs": [{"choices": choices, "right": right} for choices, right in PAIRS],
    }
    for name, rows in data.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for name, content in (FILES | {"loader.py": LOADER}).items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def by_hand(model, tokenizer, start, choices):
    """Log-likelihood of each choice behind the begin token and `start`, one run of the model for each."""
    found = []
    for choice in choices:
        known = [tokenizer.bos_token_id, *tokenizer(start)["input_ids"]]
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(start + choice)["input_ids"]]])
        with torch.no_grad():
            log_p = model(ids[:, :-1]).logits.log_softmax(-1)
        found.append(float(log_p[0].gather(1, ids[0, 1:, None])[len(known) - 1 :].sum()))
    return found


def shares(model, tokenizer):
    """Accuracy of `endings`, its accuracy by log-likelihood per character, and accuracy of `pairs`."""
    raw = normed = pairs = 0
    for start, choices, right in ENDINGS:
        found = torch.tensor(by_hand(model, tokenizer, start, choices))
        raw += int(found.argmax()) == right
        normed += int((found / torch.tensor([len(choice) for choice in choices])).argmax()) == right
    for choices, right in PAIRS:
        pairs += int(torch.tensor(by_hand(model, tokenizer, "", choices)).argmax()) == right
    return raw / len(ENDINGS), normed / len(ENDINGS), pairs / len(PAIRS)


@pytest.mark.parametrize("kind", some_slow(["plain", "encoded"], ["plain"]))
def test_accuracy_is_that_of_log_likelihoods_by_hand(kind, request, folder, tokenizer):
    model = request.getfixturevalue(kind)
    endings, normed, pairs = shares(model, tokenizer)
    assert 0.2 < endings <= 1 and 0.2 < pairs <= 1  # a model that had learnt nothing would show nothing
    found = tasks.run_tasks(model, tokenizer, tasks.check_tasks(["both"], folder))
    assert found["accuracy"] == pytest.approx({"endings": endings, "pairs": pairs})
    assert found["acc_norm"] == pytest.approx({"endings": normed})
    assert found["macro"] == pytest.approx((endings + pairs) / 2)
    assert found["samples"] == {"endings": len(ENDINGS), "pairs": len(PAIRS)}
    assert found["stderr"]["pairs"] == pytest.approx(math.sqrt(pairs * (1 - pairs) / (len(PAIRS) - 1)))


@pytest.mark.slow
def test_batches_make_no_difference_and_the_budget_stays(folder, tokenizer, encoded):
    chosen = tasks.check_tasks(["both"], folder)
    dpamoe.stats(encoded, reset=True)
    found = [tasks.run_tasks(encoded, tokenizer, chosen, limit=6, batch_size=size) for size in (1, 4, 16)]
    assert found[0] == found[1] == found[2]
    assert {experts.spend.budget for experts in encoded_experts(encoded).values()} == {3}
    assert dpamoe.stats(encoded)["mean_planes"] == pytest.approx(3, abs=1e-6)


def test_examples_in_front_are_the_same_for_every_model(folder, tokenizer, plain, monkeypatch):
    chosen, seen = tasks.check_tasks(["few"], folder), []
    from dpamoe.harness import DpamoeLM

    whole = DpamoeLM.loglikelihood
    monkeypatch.setattr(
        DpamoeLM, "loglikelihood", lambda self, requests: seen.append([r.args for r in requests]) or whole(self, requests)
    )
    first, second = (tasks.run_tasks(plain, tokenizer, chosen, limit=3) for _ in range(2))
    assert first == second and seen[0] == seen[1]
    assert len(seen[0]) == 12 and seen[0][0][0].count("\n\n") == 2


def test_groups_and_tasks_are_named_once_and_limits_hold(folder, tokenizer, plain):
    chosen = tasks.check_tasks(["pairs", "both"], folder)
    assert list(chosen.tasks) == ["pairs", "endings"]
    found = tasks.run_tasks(plain, tokenizer, chosen, limit=1)
    assert found["samples"] == {"pairs": 1, "endings": 1}
    assert found["stderr"] == {"pairs": None, "endings": None}
    for wrong in ({"limit": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="is 0: use 1 or more"):
            tasks.run_tasks(plain, tokenizer, chosen, **wrong)


def test_one_line_for_each_task_and_nothing_else(folder, tokenizer, plain, caplog, capfd):
    caplog.set_level(logging.INFO, logger="dpamoe")
    found = tasks.run_tasks(plain, tokenizer, tasks.check_tasks(["both"], folder), limit=2)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and lines[0].startswith(f"task 1/2 endings acc {found['accuracy']['endings']:.4f} (")
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("lm_eval").level == logging.NOTSET


def test_the_longest_text_is_that_of_the_model(folder, tokenizer, plain, monkeypatch):
    from dpamoe import harness

    lengths = []
    monkeypatch.setattr(harness.DpamoeLM, "loglikelihood", lambda self, requests: lengths.append(self.max_length) or 1 / 0)
    for wanted in (None, 99):
        with pytest.raises(ZeroDivisionError):
            tasks.run_tasks(plain, tokenizer, tasks.check_tasks(["pairs"], folder), max_length=wanted)
    assert lengths == [512, 99]


@pytest.mark.parametrize(
    "names, sentence",
    [
        (["endings", "pears"], r"task pears is unknown: use those in .*\(both, mixed, endings, few, lost, pairs, rolling\)"),
        (["rolling"], "task rolling reports bits_per_byte and no acc"),
        (["mixed"], "task rolling reports bits_per_byte and no acc"),
        (["lost"], r"task lost could not be loaded \(FileNotFoundError: .*lost.jsonl"),
        ([], "no task is named"),
    ],
)
def test_wrong_names_are_told_before_any_work(folder, names, sentence):
    with pytest.raises(ValueError, match=sentence) as found:
        tasks.check_tasks(names, folder)
    assert "\n" not in str(found.value)


def test_many_tasks_are_not_all_listed(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.yaml").write_text(f"task: number_{number}\n")
    with pytest.raises(ValueError, match=r"task number_x is unknown: .*\(number_\d+, .* or another of 20\)"):
        tasks.check_tasks(["number_x"], tmp_path)
    with pytest.raises(ValueError, match=r"\(number_0, .* or another of 20\)"):
        tasks.check_tasks(["qqq"], tmp_path)


def test_folders_without_tasks(tmp_path):
    with pytest.raises(ValueError, match="task folder .*gone does not exist"):
        tasks.check_tasks(["a"], tmp_path / "gone")
    with pytest.raises(ValueError, match="holds no .*yaml file"):
        tasks.check_tasks(["a"], str(tmp_path))
    (tmp_path / "notes.yaml").write_text("colour: red\n")
    with pytest.raises(ValueError, match="task a is unknown: use those in .* \\(which holds none\\)"):
        tasks.check_tasks(["a"], tmp_path)


def test_without_lm_eval_there_is_one_sentence(folder, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r'tasks need lm-eval, .*: pip install "dpamoe\[eval\]"'):
        tasks.check_tasks(["pairs"], folder)


@pytest.mark.slow
def test_no_network_no_cache_and_the_environment_as_it_was(folder, tiny_dir, tmp_path):
    code = """
import os, socket, sys

def refuse(*_):
    raise AssertionError("the network was asked")

socket.socket.connect = socket.getaddrinfo = refuse
from dpamoe import storage, tasks, text
assert not {"lm_eval", "datasets"} & sys.modules.keys()
before = dict(os.environ)
chosen = tasks.check_tasks(["both"], sys.argv[1])
model = storage.load_original(sys.argv[2])
found = tasks.run_tasks(model, text.load_tokenizer(sys.argv[2]), chosen, limit=1)
print(found["samples"], {name for name in os.environ.keys() | before if os.environ.get(name) != before.get(name)})
"""
    home = tmp_path / "home"
    home.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(tiny_dir)], capture_output=True, text=True,
        env=clean | {"HOME": str(home)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{'endings': 1, 'pairs': 1} set()"), done.stdout
    assert not list(home.rglob("*.arrow")) and not list(home.rglob("*.json*"))


def test_shared_tasks_score_as_with_lm_eval_alone(shared, plain, tokenizer, monkeypatch):
    from lm_eval.evaluator import evaluate as run
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    chosen = tasks.check_tasks(["moe_local"], shared / "tasks")
    assert list(chosen.tasks) == ["moe_continue", "moe_define", "moe_grammar", "moe_cloze"]
    found = tasks.run_tasks(plain, tokenizer, chosen, limit=8)
    adding = type(tokenizer).from_pretrained(tokenizer.name_or_path, add_bos_token=True)
    lm = HFLM(pretrained=plain, tokenizer=adding, batch_size=8, max_length=512, add_bos_token=True)
    theirs = run(lm, {"tasks": dict(chosen.tasks)}, limit=8, bootstrap_iters=0)["results"]
    assert found["accuracy"] == {name: theirs[name]["acc,none"] for name in chosen.tasks}
    assert found["acc_norm"] == {"moe_continue": theirs["moe_continue"]["acc_norm,none"]}
    with pytest.raises(ValueError, match="task heldout_ppl reports .* and no acc"):
        tasks.check_tasks(["heldout_ppl"], shared / "tasks")
