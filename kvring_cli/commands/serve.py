"""`kvring serve`: one model over HTTP, in OpenAI's and Anthropic's forms."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from engine.errors import ConfigError, KVRingError
from kvring_cli import console
from kvring_cli.files import check_writable
from kvring_cli.options import CardProfile, Flags, Model, Verbose, engine_options

if TYPE_CHECKING:
    from engine.switches import Resolved
    from kvring_cli.receipt.record import Record
    from kvring_cli.server.service import ServeSettings, Service

_SERVER = "Server"
DEFAULT_MAX_TOKENS = 32768


@engine_options
def serve(
    model: Model,
    *,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.", rich_help_panel=_SERVER)
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="Clients must send this key. Switch: KVRING_API_KEY.", rich_help_panel=_SERVER),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="Without a key: a further name by which clients may call this server; again for more.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    model_id: Annotated[
        str | None,
        typer.Option(
            "--model-id", help="The name clients ask for. Left out: the model's own.", rich_help_panel=_SERVER
        ),
    ] = None,
    default_max_tokens: Annotated[
        int | None,
        typer.Option(
            "--default-max-tokens",
            min=1,
            help="Longest answer of a request that doesn't say. Left out: 32,768, or what fits.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    max_active: Annotated[
        int, typer.Option("--max-active", min=1, max=64, help="Requests at once.", rich_help_panel=_SERVER)
    ] = 4,
    max_pending: Annotated[
        int, typer.Option("--max-pending", min=0, help="Requests that may wait.", rich_help_panel=_SERVER)
    ] = 16,
    pending_timeout: Annotated[
        float, typer.Option("--pending-timeout", min=0, help="Seconds one may wait.", rich_help_panel=_SERVER)
    ] = 600.0,
    request_log: Annotated[
        str | None,
        typer.Option("--request-log", metavar="FILE", help="A JSON line per request.", rich_help_panel=_SERVER),
    ] = None,
    on_failure: Annotated[
        Literal["report", "exit", "restart"],
        typer.Option("--on-failure", help="What to do when the engine dies.", rich_help_panel=_SERVER),
    ] = "report",
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Refuse what would only be warned of, slower paths included.", rich_help_panel=_SERVER
        ),
    ] = False,
    profile: CardProfile = None,
    verbose: Verbose = False,
    flags: Flags,
) -> None:
    """Serve a model over HTTP. A conversation's next turn computes its new tokens only."""
    from kvring_cli.receipt.record import Record
    from kvring_cli.server.hosts import is_loopback
    from kvring_cli.start import settle

    began = time.perf_counter()
    resolved = settle(model, flags, verbose, profile, host_kv_bytes="auto")
    record = Record(resolved)
    if strict and resolved.warnings:
        raise ConfigError(f"--strict: {resolved.warnings[0]}", "mend it, or leave --strict out")
    if api_key == "":
        raise ConfigError("--api-key is empty: everybody could come in", "a key, or leave --api-key out")
    key = api_key or os.environ.get("KVRING_API_KEY") or None
    private = is_loopback(host)
    if allowed_host and (key or not private):
        console.warn("--allowed-host changes nothing beside a key or a public --host: any name may be called there")
    if key is None and not private:
        exposed = f"{host} can be reached by others, and there is no --api-key"
        if strict:
            raise ConfigError(f"--strict: {exposed}", "--api-key KEY, or leave --strict out")
        console.warn(exposed)
    if request_log is not None:
        check_writable("--request-log", request_log)
    listener = _bind(host, port)
    from kvring_cli.server.service import ServeSettings

    settings = ServeSettings(
        model_id=model_id,
        api_key=key,
        default_max_tokens=default_max_tokens or DEFAULT_MAX_TOKENS,
        max_active=max_active,
        max_pending=max_pending,
        pending_timeout=pending_timeout,
        on_failure=on_failure,
        hosts=tuple(name.lower() for name in allowed_host or ()) if private and key is None else None,
    )
    source = "default" if default_max_tokens is None else "--default-max-tokens"
    try:
        _serve(resolved, settings, listener, request_log, source, strict, began, record)
    except BaseException as error:
        record.end(error)
        raise


def _serve(
    resolved: Resolved,
    settings: ServeSettings,
    listener: socket.socket,
    request_log: str | None,
    source: str,
    strict: bool,
    began: float,
    record: Record,
) -> None:
    from kvring_cli.server.log import RequestLog, ready_lines
    from kvring_cli.server.service import Service
    from kvring_cli.server.stopping import Server

    def load(loaded: Any) -> Any:
        from engine.engine import Engine
        from engine.pauses import exempt_loaded

        engine = Engine.load(resolved.config, loaded, say=lambda line: console.say(f"start | {line}"))
        faults = [engine.backend.degraded, *engine.capacity.notes, engine.unpinned(wait=True)] if strict else []
        if any(faults):
            engine.close()
            raise ConfigError(
                f"--strict: {next(filter(None, faults))}", "mend it, ask for what fits, or leave --strict out"
            )
        exempt_loaded()
        return engine

    service = Service(load, settings, RequestLog(request_log, record.request))
    server = Server(service)
    fatal: list[BaseException] = []

    def ready(service: Service) -> None:
        engine = service.engine
        for note in filter(None, (*engine.capacity.notes, engine.unpinned())):
            console.say(f"note: {note}")
        lines = ready_lines(engine, time.perf_counter() - began)
        for line in lines:
            console.say(line)
        record.ready(engine, lines)
        room = engine.capacity.context - 1
        clamped = f", clamped to what fits in the context: {room:,}" if room < settings.default_max_tokens else ""
        console.say(f"max_tokens where a request doesn't say | {settings.default_max_tokens:,} ({source}){clamped}")

    def serving(service: Service) -> None:
        console.say(_listening(listener, service))

    def load_failed(error: BaseException) -> None:
        fatal.append(error)
        server.should_exit = True

    def died(error: BaseException) -> None:
        console.report(KVRingError(f"the engine stopped: {type(error).__name__}: {error}"))
        if settings.on_failure == "exit":
            load_failed(KVRingError("the engine stopped, and --on-failure is exit", "--on-failure restart serves on"))

    service.on_ready, service.on_serving = ready, serving
    service.on_load_failure, service.on_worker_death = load_failed, died
    service.start()
    try:
        with contextlib.suppress(KeyboardInterrupt), console.asked_to_stop():
            server.run(sockets=[listener])
    finally:
        service.close()
        service.log.close()
    if fatal:
        raise fatal[0]


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything is loaded: a port that is taken is told at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        if os.name != "nt":  # there it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host}:{port}: {error.strerror or error}", "--port 0 takes a free one"
        ) from None
    return listener


def _listening(listener: socket.socket, service: Service) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    auth = "enabled" if service.settings.api_key else "disabled"
    return f"listening on http://{shown}:{port} | model {service.model_id} | auth {auth}"
