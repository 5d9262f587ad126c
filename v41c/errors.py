"""Every error class of the product. Each message is one line: where, what was expected, what was found, what to do."""


class V41CError(Exception):
    """Base of every error a user can cause; the command line prints it as one line and exits with `exit_code`.

    2: what was asked for cannot be meant, and another command line is the remedy. 1: it could be, and did not work out:
    a damaged file, missing hardware, a comparison that failed.
    """

    exit_code = 1


class UsageError(V41CError):
    """A command or call was given an argument that cannot be meant."""

    exit_code = 2


class ConfigError(V41CError):
    """A model configuration is inconsistent; the message names the key, the value and what was expected."""


class CheckpointError(V41CError):
    """A checkpoint file or tensor is missing, extra, misshapen, of the wrong dtype, or not readable."""


class TokenizerError(V41CError):
    """A tokenizer file is missing, unreadable or does not fit the model configuration."""


class VerifyError(V41CError):
    """A graph breaks a rule of the IR; the message names the operation, the rule, and expected against found."""


class TraceError(V41CError):
    """The eager model uses something the importer does not know; the message names the operation and its module."""


class UnsupportedError(V41CError):
    """A target has no kernel for an operation at these types; the message names operation, target and reason."""


class ArtifactError(V41CError):
    """An engine folder is incomplete, damaged, of another format version, or built for another processor."""


class DeviceError(V41CError):
    """The hardware that an engine was compiled for is not there, is another one, or refused something."""


class ContextError(V41CError):
    """A request does not fit the engine's context, vocabulary or slots."""

    exit_code = 2


class RefusedError(V41CError):
    """A server does not take a request: `status` is HTTP's, `param` the field, `code` a word for programs."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class MovedError(V41CError):
    """A pass moved numbers that it must not move; the message names it and where it first shows, `report` has all."""

    def __init__(self, message: str, report: object) -> None:
        super().__init__(message)
        self.report = report
