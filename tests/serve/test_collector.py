"""What Python's garbage collector does once a process serves."""

import subprocess
import sys

STEADY = """
import gc
from jdisagg.serve.deploy import memory
memory.freeze_gc()
before = [each["collections"] for each in gc.get_stats()]
for _ in range(300):  # steps of hundreds of rows, whose tokens are made and dropped
    rows = [(slot, [slot]) for slot in range(512)]
assert [each["collections"] for each in gc.get_stats()] == before, "nobody is looked through"
assert gc.get_freeze_count() > 1000
cycles = [[] for _ in range(50_000)]
for each in cycles:
    each.append(each)
cycles.clear()
del each
rows = [[number] for number in range(20_000)]
assert gc.get_count()[0] < 20_000 and gc.get_stats()[0]["collected"] > 0, "what nobody else drops goes in the end"
"""


def test_steps_start_no_collection_and_what_only_it_can_drop_goes_in_the_end():
    """In a process of its own, for what is frozen stays so."""
    done = subprocess.run([sys.executable, "-c", STEADY], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
