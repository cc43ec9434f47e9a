"""The version, where every module can read it without importing the interface."""

__version__ = "0.2.0"
