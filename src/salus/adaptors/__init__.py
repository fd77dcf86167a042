"""Adaptors: what finds iterations in a framework's unmodified scripts. One file a framework; the rules that hold for
all of them are in `iterations`. They run in the user's process and know a lease, never the service or its policies.
"""
