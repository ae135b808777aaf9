"""The command `dpamoe`: its parser, logging and exit codes (0 good, 1 failed, 2 usage, 130 interrupted)."""

import argparse
import json
import logging
import sys
import warnings

from dpamoe import __version__
from dpamoe.cli import bench, convert, demo, doctor, evaluate, generate, inspect, plan, plot, profile, reproduce, tune, verify
from dpamoe.team import ToldElsewhere

COMMANDS = (demo, plan, convert, verify, profile, inspect, evaluate, plot, reproduce, generate, tune, bench, doctor)


class _Defaults(argparse.HelpFormatter):
    """Say what a flag is without being given, where that is a number or a word."""

    def _get_help_string(self, action: argparse.Action) -> str:
        shown = isinstance(action.default, int | float | str) and not isinstance(action.default, bool) and action.nargs != 0
        if not shown or action.default == argparse.SUPPRESS or "default:" in action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"


def build_parser() -> argparse.ArgumentParser:
    """The parser with one sub-command per file of this folder."""
    parser = argparse.ArgumentParser(
        prog="dpamoe", description="Any-precision experts for Mixture-of-Experts models: one checkpoint, every operating point."
    )
    parser.add_argument("--version", action="version", version=f"dpamoe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        name = command.NAME
        sub = commands.add_parser(name, help=command.HELP, description=command.HELP, formatter_class=_Defaults)
        command.arguments(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        sub.add_argument("--debug", action="store_true", help="show the full traceback of an error")
        sub.set_defaults(run=command.run, show=command.show)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; results go to stdout, progress and errors to stderr."""
    args = build_parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    _quiet_libraries()
    try:
        result = args.run(args)
        if result is None:  # another process shows it
            return 0
        shown = json.dumps(result, ensure_ascii=False, allow_nan=False) if args.json else args.show(result)
        if shown is not None:
            print(shown, flush=True)
    except KeyboardInterrupt:
        print(
            "dpamoe: interrupted; what was finished is kept, nothing half-written was left under the output's name",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except ToldElsewhere:
        return 1
    except (ValueError, OSError, MemoryError) as error:
        if args.debug:
            raise
        message = " ".join(str(error).split()) or type(error).__name__  # what libraries say may run over several lines
        print(f"dpamoe {args.command}: error: {message}", file=sys.stderr)
        return 1
    except Exception as error:  # a person gets a sentence; --debug gets the traceback
        if args.debug:
            raise
        message = " ".join(str(error).split())
        print(f"dpamoe {args.command}: error: {type(error).__name__}: {message} (--debug shows where)", file=sys.stderr)
        return 1
    return int(bool(result.get("failed")))


def _quiet_libraries() -> None:
    """Our own log lines on stderr; transformers' bars and chatter only on a terminal."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("dpamoe: %(message)s"))
    logger = logging.getLogger("dpamoe")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    warnings.showwarning = lambda message, *rest, **also: logger.warning("%s", message)
    from transformers.utils import logging as theirs

    theirs.set_verbosity_error()
    if not sys.stderr.isatty():
        theirs.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
