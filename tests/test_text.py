"""Text to token windows: files that are refused, documents, windows by hand."""

from types import SimpleNamespace

import pytest
import torch

from dpamoe import text


class _Letters:
    """A tokenizer with one id per letter: a is 10, b is 11, …"""

    def __init__(self, begin=None, end=None):
        self.bos_token_id, self.eos_token_id = begin, end

    def __call__(self, written, add_special_tokens, verbose):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) - 87 for letter in written if letter.isalpha()]}


def test_reads_utf8(tmp_path):
    (tmp_path / "text.txt").write_bytes("Grüße\n\nzwei".encode())
    assert text.read_text(tmp_path / "text.txt") == "Grüße\n\nzwei"


@pytest.mark.parametrize(
    "content, words", [(b"", "is empty"), (b" \n\t\n", "is empty"), (b"ab\xff\xfe", "not UTF-8 text (byte 2)")]
)
def test_files_without_text_are_refused(tmp_path, content, words):
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(ValueError) as caught:
        text.read_text(tmp_path / "text.txt")
    assert "text.txt" in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_what_is_no_file_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="does not exist"):
        text.read_text(tmp_path / name)


def test_documents_stand_between_begin_and_end():
    written = "ab\nc\n\n\n \nde\n"
    assert text.token_ids(_Letters(1, 2), written).tolist() == [1, 10, 11, 12, 2, 1, 13, 14, 2]
    assert text.token_ids(_Letters(1), written).tolist() == [1, 10, 11, 12, 1, 13, 14]
    assert text.token_ids(_Letters(), written).tolist() == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("written", ["", "\n\n \n", "a", "..."])
def test_text_without_tokens_is_refused(written):
    with pytest.raises(ValueError, match="holds no tokens"):
        text.token_ids(_Letters(), written)


def test_shipped_tokenizer_marks_documents_as_in_training(tiny_dir):
    tokenizer = text.load_tokenizer(tiny_dir)
    ids = text.token_ids(tokenizer, "The first.\n\nThe second.")
    assert ids.dtype == torch.int64
    assert (ids == 1).nonzero().flatten().tolist()[0] == 0 and int((ids == 1).sum()) == 2
    assert int(ids[-1]) == 2 and int((ids == 2).sum()) == 2
    assert tokenizer.decode(ids[ids > 2]) in ("The first.The second.", "The first. The second.")


@pytest.mark.parametrize("broken", ["missing", "damaged", "unknown"])
def test_tokenizer_that_cannot_be_loaded_is_refused(tmp_path, broken):
    if broken == "damaged":
        (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "truncation"')
    with pytest.raises(ValueError, match="token ids"):
        text.load_tokenizer("" if broken == "unknown" else tmp_path)


def test_windows_by_hand():
    ids = torch.arange(10, 17)
    assert [window.tolist() for window in text.windows(ids, 4, None)] == [[10, 11, 12, 13], [14, 15, 16]]
    assert [window.tolist() for window in text.windows(ids, 4, 1)] == [[1, 10, 11, 12], [1, 13, 14, 15], [1, 16]]
    assert [window.tolist() for window in text.windows(ids, 4, 1, 5)] == [[1, 10, 11, 12], [1, 13, 14]]
    assert [window.tolist() for window in text.windows(ids[:5], 4, None)] == [[10, 11, 12, 13]]  # one token predicts nothing


@pytest.mark.parametrize("tokens", [2, 3, 64, 65, 129])
@pytest.mark.parametrize("length", [2, 3, 64, 512])
def test_with_a_begin_token_every_token_is_predicted_once(tokens, length):
    ids = torch.arange(100, 100 + tokens)
    windows = text.windows(ids, length, 1)
    assert torch.equal(torch.cat([window[1:] for window in windows]), ids)
    assert all(window[0] == 1 and 2 <= len(window) <= length for window in windows)


@pytest.mark.parametrize("tokens, length, bos, limit", [(9, 1, None, None), (0, 8, 1, None), (1, 8, None, None), (9, 8, 1, 1)])
def test_windows_that_predict_nothing_are_refused(tokens, length, bos, limit):
    with pytest.raises(ValueError, match="nothing to predict|at least 2"):
        text.windows(torch.arange(tokens), length, bos, limit)


def test_batches_hold_windows_of_equal_length_in_order():
    parts = [torch.full((length,), number) for number, length in enumerate([4, 4, 4, 3, 4])]
    made = text.batches(parts, 2)
    assert [batch.shape for batch in made] == [(2, 4), (1, 4), (1, 3), (1, 4)]
    assert [batch[:, 0].tolist() for batch in made] == [[0, 1], [2], [3], [4]]
    assert text.batches([], 2) == []


@pytest.mark.parametrize("longest, expected", [(2048, 512), (512, 512), (128, 128), (None, 512), (-1, 512)])
def test_window_length_is_bounded_by_positions(longest, expected):
    config = SimpleNamespace(max_position_embeddings=longest)
    config.get_text_config = lambda: config
    assert text.window_length(config) == expected
