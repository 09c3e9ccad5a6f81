"""Programs run as child processes are not for the doctest collector: one needs a fuzzer to import."""

collect_ignore = ["fuzz.py", "fusefs.py", "malformed.py", "probe.py", "soak.py"]
