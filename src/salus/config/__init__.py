"""Settings have one home: files in TOML, variables in the environment, and options (docs/configuration.md).

Not for code in a user's job: that has no TOML before Python 3.11. What a job needs, it gets in its environment.
"""
