"""Every named mistake a caller can make, as one tree. Nothing here is raised for a full house (that is a `Reject`).

JdisaggError
├── ConfigError              a flag, a TOML key, a mesh or a size that cannot be
│   ├── MeshError            a mesh text that does not parse, or does not fit the devices or the model
│   ├── FlagError            an unknown flag or a value of the wrong kind
│   └── OutputError          --output is not ours to write, or cannot be written
├── CheckpointError          the folder, a file or a tensor is not what the model needs
│   ├── UnsupportedModel     an architecture or an option this project does not run
│   ├── MissingTensor        a tensor the model needs is in no file
│   ├── WrongShape           a tensor is there with another shape
│   ├── WrongDtype           a tensor is there, but its numbers are no floating-point ones
│   └── NotFetched           a model of the package index did not come, or is not the one that was meant
├── RequestError             the client's request cannot be served as written (HTTP 400)
│   └── TooLong              prompt + max_tokens over the model's limit
├── TransportError           KV did not cross between two processes
│   ├── PeerDead             the other process closed the connection, or cannot be reached
│   ├── TransferTimeout      the deadline passed first
│   ├── TransferCancelled    either end called it off
│   ├── TransferRefused      an end says no: unknown, pulled before, expired, another transport
│   │   └── TransferFull     it would go over an end's limit of bytes
│   ├── BadTicket            a ticket or message that is malformed or not signed by our secret
│   ├── PeerMismatch         a peer of another secret, model, KV layout, dtype or version
│   └── SenselessWord        a peer says what makes no sense here: its session ends, nobody else's
│       └── LateWord         it did, before one of the two workers changed its role: nobody hears it
├── DecodeError              JSON that is no value of the declared types
├── JournalError             a record that cannot be read or replayed
└── IllegalTransition        a phase or handoff event that the table does not have
"""


class JdisaggError(Exception):
    """Root of every error this project raises on purpose."""


class ConfigError(JdisaggError):
    """A configuration that cannot be run; the launcher prints it in one line and exits with 2."""


class MeshError(ConfigError):
    """A mesh text that does not parse, or a mesh that does not fit the devices or the model."""


class FlagError(ConfigError):
    """An unknown flag or configuration key, or a value of the wrong kind."""


class OutputError(ConfigError):
    """The file of a batch's answers is somebody else's, or has no room for an answer; no half of one stays in it."""


class CheckpointError(JdisaggError):
    """A checkpoint folder that cannot be loaded."""


class UnsupportedModel(CheckpointError):
    """An architecture, or an option of one, that this project does not run."""


class MissingTensor(CheckpointError):
    """A tensor that the model needs is in none of the checkpoint's files."""


class WrongShape(CheckpointError):
    """A tensor whose shape is not the one the configuration asks for."""


class WrongDtype(CheckpointError):
    """A tensor of integers, or of another format that weights cannot have."""


class NotFetched(CheckpointError):
    """A model that is fetched by its name and cannot be: no network, no room, or another digest."""


class RequestError(JdisaggError):
    """A request that cannot be served as written. `param` names the field at fault, where one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TooLong(RequestError):
    """Prompt plus requested output is longer than the model, or any pool, can hold."""


class TransportError(JdisaggError):
    """KV did not cross between two processes; the source still has it, or has let it go, as the ticket's state says."""


class PeerDead(TransportError):
    """The other process closed the connection in the middle, or cannot be reached at all."""


class TransferTimeout(TransportError):
    """The deadline passed before the transfer was over."""


class TransferCancelled(TransportError):
    """Either end called the transfer off."""


class TransferRefused(TransportError):
    """An end says no: it knows no such offer, or the offer was pulled before, has ended, or is another transport's."""


class TransferFull(TransferRefused):
    """The bytes would go over a limit; nothing was sent, and the offer stands."""


class BadTicket(TransportError):
    """A ticket or message that is malformed, over the size limits, or not signed by our secret."""


class PeerMismatch(TransportError):
    """A peer that does not share our secret, or runs another model, KV layout, dtype or version."""


class SenselessWord(TransportError):
    """A peer's message of the wrong kind, direction, type or range; the session with that peer ends by it."""


class LateWord(SenselessWord):
    """A word between two workers that made sense until one of them changed its role: it is dropped."""


class DecodeError(JdisaggError):
    """JSON that is no noun, or whose fields are of other types than declared; the text names the field."""


class JournalError(JdisaggError):
    """A journal that cannot be read, or whose replay decides otherwise."""


class IllegalTransition(JdisaggError):
    """An event that the transition table has no row for; the state is left as it was."""
