"""v41c: a compiler-driven graph pipeline for models of the DeepSeek-V4.1-Flash architecture."""

__version__ = "0.1.0"
