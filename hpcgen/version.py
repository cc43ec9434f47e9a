"""The version, in a separate module so that reading it does not import the interface."""

__version__ = "0.2.0"
