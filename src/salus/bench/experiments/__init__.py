"""The experiments of the paper, each a small file: `run` does it, `verdicts` says how it went, `draw` shows it."""
