"""The one error of this library: an argument that no implementation can take."""


class KernelError(ValueError):
    """An argument's shape, dtype or value does not fit the others; the message holds both."""
