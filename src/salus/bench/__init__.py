"""The benchmarks behind `salus bench`: one small file an experiment."""
