"""lit-refusion: one backbone, one data pipeline, interchangeable training objectives and decoders."""

__version__ = "0.1.0"
