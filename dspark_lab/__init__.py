"""A laboratory for speculative-decoding drafters: capture, train, evaluate and compare EAGLE-3, DFlash and DSpark."""

__version__ = "0.1.0"
