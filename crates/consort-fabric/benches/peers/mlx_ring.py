"""The all-reduce of MLX's TCP ring, timed as netbench times its own, with fewer repetitions: beside other work each takes
milliseconds, because its threads sleep. Started by mlx.launch; the largest size may be given."""

import json
import sys
import time

import mlx.core as mx

world = mx.distributed.init(backend="ring", strict=True)
mx.set_default_device(mx.cpu)
size = 1024
while size <= (int(sys.argv[1]) if len(sys.argv) > 1 else 64 << 20):
    values = mx.ones((size // 4,), dtype=mx.float32)
    mx.eval(values)
    times = []
    for repetition in range(-2, 50 if size <= 256 << 10 else 10 if size <= 4 << 20 else 3):
        mx.eval(mx.distributed.all_sum(mx.ones((1,))))
        start = time.perf_counter()
        mx.eval(mx.distributed.all_sum(values))
        if repetition >= 0:
            times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    if world.rank() == 0:
        line = {"collective": "all_reduce", "bytes": size, "min_us": times[0], "median_us": times[len(times) // 2]}
        print(json.dumps(line), flush=True)
    size *= 4
