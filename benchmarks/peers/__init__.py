"""The same load on other engines of the same machine, one at a time: `python -m benchmarks.peers.compare --help`."""
