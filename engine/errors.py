"""Every refusal the engine makes: what is wrong, with its numbers, and what would mend it.

`RequestError` is the caller's to mend and leaves the engine as it was. `EngineError` is the engine's own
failure; the request is lost, the engine stays usable unless its message says otherwise.
"""


class KVRingError(Exception):
    """An error a person can act on: `message` says what is wrong, `fix` what would be right."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} ({self.fix})" if self.fix else self.message


class ConfigError(KVRingError):
    """A setting that can't be served: refused before any work starts."""


class TooLittleMemory(ConfigError):
    """Settings that go together, but not into the memory that is free."""


class ModelError(KVRingError):
    """A model file or folder that is missing, damaged or not supported."""


class RequestError(KVRingError):
    """A request that can't be served as asked: refused, nothing else is touched."""


class ContextLengthError(RequestError):
    """Prompt and answer do not fit in the context."""


class HostFullError(RequestError):
    """The host store has no pages left; other requests hold them."""


class EngineError(KVRingError):
    """The engine failed while serving; never an answer instead."""


class OutOfMemoryError(EngineError):
    """Memory ran out inside one request; what the request held has been freed."""
