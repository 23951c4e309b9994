"""The command `kvring`. Importing this imports no torch: each command does so when it runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from engine.errors import KVRingError
from kvring_cli import console
from kvring_cli.commands.bench import bench
from kvring_cli.commands.calibrate import calibrate
from kvring_cli.commands.chat import chat
from kvring_cli.commands.doctor import doctor
from kvring_cli.commands.gate import gate
from kvring_cli.commands.guide import guide
from kvring_cli.commands.heads import heads
from kvring_cli.commands.inspect import inspect
from kvring_cli.commands.launch import launch
from kvring_cli.commands.pick_engine import pick_engine
from kvring_cli.commands.plan import plan
from kvring_cli.commands.pull import pull
from kvring_cli.commands.receipt import receipt
from kvring_cli.commands.run import run
from kvring_cli.commands.serve import serve
from kvring_cli.commands.smoke import smoke
from kvring_cli.commands.top import top

INTERRUPTED = 130
_UsageError: Any = typer.BadParameter.__mro__[1]  # typer brings its own click, or uses the installed one

app = typer.Typer(
    name="kvring",
    help="Long contexts on small cards: a small device pool over a lossless host store, with recall.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, chat, serve, pull, inspect, gate):
    app.command(no_args_is_help=True)(command)
app.command()(smoke)
app.command()(top)
app.command()(receipt)
app.command()(doctor)
app.command()(calibrate)
app.command(no_args_is_help=True)(heads)
app.command()(plan)
app.command("pick-engine")(pick_engine)
app.command()(guide)
app.command()(launch)
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        from kvring_cli import version

        console.write("\n".join(version.lines()) + "\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Versions of kvring, torch, CUDA and triton."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def call(arguments: list[str]) -> int:
    """Run one command line; the exit code: 0, 1 for an error, 2 for bad usage, 130 when interrupted."""
    try:
        _stand_somewhere()
        result = app(args=arguments, prog_name="kvring", standalone_mode=False)
    except KVRingError as error:
        console.report(error)
        return 2 if isinstance(error, console.BadUsage) else 1
    except _UsageError as error:
        return _bad_usage(error)
    except BrokenPipeError:
        raise
    except (ImportError, OSError) as error:
        console.report(_not_imported(error) if _importing(error) else _not_written(error))
        return 1
    except KeyboardInterrupt:
        result = INTERRUPTED
    if result == INTERRUPTED:
        console.say("interrupted")
    return result if isinstance(result, int) else 0


def check_line(arguments: list[str]) -> None:
    """Read a command line without running it: bad usage is raised as `call` reports it."""
    name, *rest = arguments
    typer.main.get_command(app).commands[name].make_context(f"kvring {name}", rest)


def _stand_somewhere() -> None:
    """Refuse a working folder that was deleted meanwhile: torch's libraries end the process there, without a reason."""
    try:
        os.getcwd()
    except OSError:
        raise KVRingError("the folder that this was started in is gone", "cd to one that exists") from None


def _importing(error: BaseException) -> bool:
    """Whether a module raised it while it was imported: a package that is missing, or a library of one (an OSError)."""
    import traceback

    below = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ImportError) or any(frame.name == "<module>" for frame in below)


def _not_imported(error: BaseException) -> KVRingError:
    what = f"a package is missing or broken: {' '.join(str(error).split())}"
    return KVRingError(
        what, "kvring doctor says which, and how to mend it; kvring doctor --install checks kvring's own"
    )


def _not_written(error: BaseException) -> KVRingError:
    """A full disk behind stdout or --output; or a file, which is named then."""
    name, why = getattr(error, "filename", None), getattr(error, "strerror", None) or error
    if name:
        return KVRingError(f"{name}: {why}", "check that path and its permissions")
    return KVRingError(f"writing failed: {why}", "check where the output goes")


def _bad_usage(error: Any) -> int:
    command = error.ctx.command_path if error.ctx else "kvring"
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    said = error.format_message().replace(": Value error, ", ": ")  # pydantic's words, in newer typers
    console.report(KVRingError(said, f"{command} --help shows what it takes"))
    return 2


def main() -> None:
    """The entry point."""
    console.soften()
    sys.exit(call(sys.argv[1:]))


if __name__ == "__main__":
    main()
