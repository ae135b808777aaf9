"""The log of a conversion: every event on a line of its own with its time, kept whatever happens."""

import logging
import re
import shutil

import pytest

from dpamoe import stream
from dpamoe.cli import log_file
from dpamoe.team import ALONE, Team

FLAGS = ("--k-max", "2", "--budget", "2", "--group-size", "64")
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "


@pytest.fixture
def arguments(source, tiny_dir, tmp_path):
    text = tmp_path / "calibration.txt"
    text.write_text((tiny_dir.parent / "text" / "calibration.txt").read_text(encoding="utf-8")[:4000], encoding="utf-8")
    return ("convert", source, "--output-dir", tmp_path / "out", "--calibration", text, *FLAGS)


def lines(file):
    """Lines of a log without their times, which all must have."""
    found = file.read_text(encoding="utf-8").splitlines()
    assert all(re.match(TIME, line) for line in found), found
    return [re.sub(TIME, "", line) for line in found]


def test_a_conversion_from_begin_to_end(run, arguments, tmp_path):
    code, out, err = run(*arguments)
    assert code == 0 and "into memory" not in err
    said = lines(tmp_path / "out.log")
    assert said[0] == "begins: dpamoe " + " ".join(map(str, arguments)) and re.match(r"dpamoe .*, torch .*, transf", said[1])
    for layer in range(4):
        began = next(
            i for i, line in enumerate(said) if re.match(rf"model.layers.{layer}: 0.00 GiB into memory; .* free", line)
        )
        done = next(i for i, line in enumerate(said) if line.startswith(f"model.layers.{layer}: on the disk, 0.00 GiB in all"))
        assert began < done
    assert set(out.splitlines()) <= set(said) and re.match(r"ends after \d+ s", said[-1])
    assert {line.removeprefix("dpamoe: ") for line in err.splitlines()} <= set(said)


@pytest.mark.slow
def test_a_failure_is_kept_and_the_next_run_is_added(run, arguments, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(stream, "encode_site", fail)
        code, _, err = run(*arguments)
    assert code == 1
    said = lines(tmp_path / "out.log")
    assert re.fullmatch(r"failed after \d+ s: .*out.partial could not be written \(Input/output error\): .*", said[-1])
    code, _, _ = run(*arguments)
    assert code == 0 and lines(tmp_path / "out.log")[: len(said)] == said


def test_a_mistake_leaves_no_log(run, arguments, tmp_path):
    code, _, _ = run("convert", tmp_path / "nowhere", *arguments[2:])
    assert code == 1 and not (tmp_path / "out.log").exists()
    code, _, _ = run(*arguments)
    before = lines(tmp_path / "out.log")
    code, _, _ = run(*arguments)  # the output is there
    assert code == 1 and lines(tmp_path / "out.log")[: len(before)] == before
    assert re.match(r"failed after 0 s: output folder .* exists", lines(tmp_path / "out.log")[-1])


@pytest.mark.slow
def test_one_log_for_a_batch(run, arguments, source, tmp_path):
    for name in ("a", "b", "c"):
        shutil.copytree(source, tmp_path / name)
    (tmp_path / "b" / "config.json").unlink()
    (tmp_path / "batch.txt").write_text("a\nb\nc\n")
    code, out, _ = run("convert", "--batch", tmp_path / "batch.txt", *arguments[2:])
    assert code == 1
    said = lines(tmp_path / "out.log")
    order = [line for line in said if line.startswith("model ") and " of 3: " in line]
    assert order == [f"model {number} of 3: {tmp_path / name}" for number, name in enumerate("abc", 1)]
    assert f"{tmp_path / 'b'} failed: {tmp_path / 'b'} has no config.json" in "\n".join(said)
    assert "2 of 3 models converted" in said and out.splitlines()[-1] in said


def test_an_interruption(tmp_path):
    with pytest.raises(KeyboardInterrupt), log_file.written(tmp_path / "out", ALONE, ["convert", "a b"], lambda: True):
        raise KeyboardInterrupt
    said = lines(tmp_path / "out.log")
    assert said[0] == "begins: dpamoe convert 'a b'" and re.match(r"interrupted after \d+ s", said[-1])


def test_what_others_show_stays_as_it_was(tmp_path, capsys):
    logger = logging.getLogger("dpamoe")
    before = logger.handlers, logger.level
    shown = logging.StreamHandler()
    logger.handlers, logger.level = [shown], logging.INFO
    logger.manager._clear_cache()
    try:
        with log_file.written(tmp_path / "out", Team(1, 3), [], lambda: True):
            logger.debug("fine\nprint")
            logger.info("coarse")
        assert (logger.handlers, logger.level, shown.level) == ([shown], logging.INFO, logging.NOTSET)
    finally:
        logger.handlers, logger.level = before
        logger.manager._clear_cache()
    assert "[2/3] fine print" in lines(tmp_path / "out.log")
    assert capsys.readouterr().err == "coarse\n"


def test_where_no_file_can_be_the_run_goes_on_without(tmp_path):
    (tmp_path / "out.log").mkdir()
    with log_file.written(tmp_path / "out", ALONE, [], lambda: True):
        logging.getLogger("dpamoe").debug("nowhere")
    assert not list((tmp_path / "out.log").iterdir())


def test_a_full_disk_is_no_second_error(tmp_path, capsys):
    (tmp_path / "out.log").symlink_to("/dev/full")
    with log_file.written(tmp_path / "out", ALONE, [], lambda: True):
        logging.getLogger("dpamoe").debug("lost")
    assert "Traceback" not in capsys.readouterr().err
