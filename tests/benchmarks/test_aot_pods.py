from benchmarks.aot_pods import steps_of


def test_of_each_worker_the_largest_step_that_was_compiled_is_told_beside_its_fullest_device():
    sent = {"inside": 2.0, "between": 1.0}
    step = {"worker": "p", "kind": "prefill", "exact": True, "compile_s": 9.0, "collectives": {"all-reduce": 4}}
    step |= {"sent_bytes": sent, "links_s": 0.1, "floor_s": 0.2}
    stages = [{"worker": "p", "total_bytes": each, "limit_bytes": 9} for each in (5, 7)]
    programs = [step, {**step, "kind": "draw"}, {**step, "exact": False, "floor_s": 0.9}]
    (found,) = steps_of("h100_2", {"target": "h100:2x8", "mesh": "m", "programs": programs, "stages": stages})
    assert (found.device_bytes, found.limit_bytes, found.floor_s, found.between_bytes) == (7, 9, 0.2, 1.0)
